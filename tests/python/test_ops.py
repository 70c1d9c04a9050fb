"""deep_ep.ops: layers with our operators, compiled and not, forward and backward, on CPU ranks."""

import functools
import gc
import shutil

import pytest
import torch
from cluster import on_ranks
from common import ranks_a_node
from reference import make_case
from test_errors import Alone

from deep_ep import Buffer, ElasticBuffer, EPBuffer, ops
from deep_ep.errors import InvalidArgument, UseAfterDestroy

H, INNER, TOPK, EXPERTS_PER_RANK = 64, 32, 3, 4


def make_buffer(group, kind):
    if kind == "normal":
        return Buffer(group, 1 << 24)
    make = ElasticBuffer if kind == "elastic" else EPBuffer
    return make(group, num_max_tokens_per_rank=48, hidden=H, num_topk=TOPK)


class Layer(torch.nn.Module):
    """Experts as matrix products, between our operators; ``calls`` layers of the same weights, one after the other."""

    def __init__(self, buffer, expand=False, calls=1):
        super().__init__()
        self.ranks, self.rank = (
            (buffer.group_size, buffer.rank) if isinstance(buffer, Buffer) else (buffer.num_ranks, buffer.rank_idx)
        )
        self.buffer, self.state, self.expand, self.calls = buffer, ops.state_of(buffer), expand, calls
        self.experts = EXPERTS_PER_RANK * self.ranks
        generator = torch.Generator().manual_seed(3 + self.rank)
        make = lambda *shape: torch.nn.Parameter(torch.randn(shape, generator=generator) / shape[-2] ** 0.5)  # noqa: E731
        self.router = torch.nn.Parameter(torch.randn(H, self.experts, generator=torch.Generator().manual_seed(1)) / H**0.5)
        self.up, self.down = make(EXPERTS_PER_RANK, H, INNER), make(EXPERTS_PER_RANK, INNER, H)

    def run_experts(self, rows, idx, weights, counts):
        wide, result = rows.float(), torch.zeros(rows.shape, device=rows.device)
        if self.expand:  # by expert: which rows are an expert's follows from the counts
            ends = counts.cumsum(0).unsqueeze(0)
            at = torch.arange(rows.size(0), device=rows.device).unsqueeze(1)
            shares = ((at < ends) & (at >= ends - counts)) * weights.unsqueeze(1)
        else:
            shares = torch.stack([(weights * (idx == expert)).sum(1) for expert in range(EXPERTS_PER_RANK)], 1)
        for expert in range(EXPERTS_PER_RANK):
            result = result + torch.nn.functional.silu(wide @ self.up[expert]) @ self.down[expert] * shares[:, expert : expert + 1]
        return result.to(torch.bfloat16)

    def forward(self, x):
        for _ in range(self.calls):
            weights, idx = torch.topk((x.float() @ self.router).softmax(1), TOPK, 1)
            rows, idx, weights, counts, handle = ops.dispatch(self.state, x, idx, weights, self.experts, 8, self.expand)
            x = x + ops.combine(self.state, self.run_experts(rows, idx, weights, counts), handle)
        return x


def step(layer, forward, tokens):
    generator = torch.Generator().manual_seed(tokens + 100 * layer.rank)
    device = layer.router.device
    x = torch.randn(tokens, H, generator=generator).to(device, torch.bfloat16).requires_grad_()
    layer.zero_grad()
    out = forward(x)
    (out.float() * torch.linspace(-1, 1, H, device=device)).sum().backward()
    return out.detach(), x.grad, layer.router.grad, layer.up.grad, layer.down.grad


def alone(layer, x):
    """The layer on one rank, with the experts of all."""
    weights, idx = torch.topk((x.float() @ layer.router).softmax(1), TOPK, 1)
    out = x.float()
    for rank in range(layer.ranks):
        generator = torch.Generator().manual_seed(3 + rank)
        up = torch.randn(EXPERTS_PER_RANK, H, INNER, generator=generator) / H**0.5
        down = torch.randn(EXPERTS_PER_RANK, INNER, H, generator=generator) / INNER**0.5
        for expert in range(EXPERTS_PER_RANK):
            share = (weights * (idx == rank * EXPERTS_PER_RANK + expert)).sum(1, keepdim=True)
            out = out + torch.nn.functional.silu(x.float() @ up[expert]) @ down[expert] * share
    return out


@pytest.mark.parametrize("of_node", [0, 1], ids=["a node", "between nodes"])
@pytest.mark.parametrize("kind, expand", [("normal", False), ("elastic", False), ("elastic", True), ("ep", True)])
@on_ranks(2)
def test_results_and_gradients_are_those_of_one_rank(group, kind, expand, of_node):
    with ranks_a_node(of_node):
        layer = Layer(make_buffer(group, kind), expand)
    for tokens in ((13, 6), (0, 9)):
        actual = step(layer, layer, tokens[layer.rank])[:3]
        wanted = step(layer, lambda x: alone(layer, x), tokens[layer.rank])[:3]
        for one, other in zip(actual, wanted):  # combine rounds to bfloat16 on the way there and back
            assert (one.float() - other.float()).norm() <= 0.01 * other.float().norm()


def compiled_is_eager(group, kind, expand, calls, backend):
    import torch._inductor.config

    torch._inductor.config.emulate_precision_casts = True  # else it rounds less often, and experts are chosen otherwise
    buffer = make_buffer(group, kind)
    layer = Layer(buffer, expand, calls)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
        for tokens in ((12, 7), (5, 31)):
            expected, before = step(layer, layer, tokens[layer.rank]), int(layer.state[1, 0])
            actual = step(layer, compiled, tokens[layer.rank])
            assert int(layer.state[1, 0]) - before == 4 * calls  # dispatch and combine, forward and backward
            for one, other in zip(actual, expected):
                if backend == "inductor":  # it adds in another order
                    assert (one.float() - other.float()).norm() <= 1e-5 * other.float().norm()
                else:
                    assert torch.equal(one, other)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "sizes differ, graphs do not"


@pytest.mark.parametrize("kind, expand, calls", [("normal", False, 2), ("elastic", True, 1)])
def test_a_compiled_layer_is_the_eager_one(ranks, kind, expand, calls):
    ranks(2).run(compiled_is_eager, kind, expand, calls, "aot_eager")


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_a_layer_compiled_by_inductor_is_the_eager_one(ranks):
    ranks(2).run(compiled_is_eager, "normal", False, 2, "inductor")


@on_ranks(1)
def test_parts_of_a_compiled_layer_take_no_tuple(group):
    """PyTorch records such parts into CUDA graphs."""
    from functorch.compile import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    layer, called = Layer(make_buffer(group, "normal")), {}

    def collect(graph, inputs, **options):
        called.update((str(node.target), node.meta["val"]) for node in graph.graph.nodes if str(node.target).startswith("deep_ep."))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        backend = functools.partial(compile_fx, inner_compile=collect)
        step(layer, torch.compile(layer, fullgraph=True, backend=backend, dynamic=True), 5)
    assert {f"deep_ep.{name}.default" for name in ("receive_rows", "receive_weights", "combined_weights")} <= called.keys()
    assert all(isinstance(value, torch.Tensor) for value in called.values()), called


@on_ranks(2)
def test_calls_that_are_equal_or_not_used_stay(group):
    """All ranks must make them; the other ranks wait for them."""
    buffer = make_buffer(group, "normal")
    state = ops.state_of(buffer)
    case = make_case([5, 8])
    x, idx, weights = case.x[buffer.rank], case.topk_idx[buffer.rank], case.topk_weights[buffer.rank]

    def unused_and_equal(x):
        ops.dispatch(state, x, idx, weights, case.num_experts)
        rows, _, _, _, handle = ops.dispatch(state, x, idx, weights, case.num_experts)
        ops.combine(state, rows, handle)
        return ops.combine(state, rows, handle) + ops.combine(state, rows, handle)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        actual = torch.compile(unused_and_equal, fullgraph=True, backend="aot_eager")(x)
    assert int(state[1, 0]) == 5
    assert torch.equal(actual, unused_and_equal(x))
    gc.collect()
    assert not ops._sent


@on_ranks(2)
def test_mistakes_and_lifetimes(group):
    buffer = make_buffer(group, "normal")
    state = ops.state_of(buffer)
    assert ops.state_of(buffer) is state and state.shape == (2, 2)
    case = make_case([5, 8])
    sent = (state, case.x[buffer.rank], case.topk_idx[buffer.rank], case.topk_weights[buffer.rank], case.num_experts)
    rows, idx, weights, counts, handle = ops.dispatch(*sent)
    assert counts.tolist() == [int((idx == expert).sum()) for expert in range(4)]
    again = ops.dispatch(*sent, expert_alignment=16)[3]
    assert again.tolist() == [-(-int(count) // 16) * 16 for count in counts]
    with pytest.raises(InvalidArgument, match="the tensor that dispatch returned"):
        ops.combine(state, rows, torch.zeros_like(handle))
    with pytest.raises(InvalidArgument, match="received already"):
        torch.ops.deep_ep.receive(*sent[:4], handle, sent[4], False)
    with pytest.raises(InvalidArgument, match="only with the state of an ElasticBuffer"):
        ops.dispatch(*sent, do_expand=True)
    each = ElasticBuffer(group, num_max_tokens_per_rank=48, hidden=H, num_topk=TOPK, allow_multiple_reduction=False)
    with pytest.raises(InvalidArgument, match="that has allow_multiple_reduction"):
        ops.dispatch(ops.state_of(each), *sent[1:], do_expand=True)
    with pytest.raises(TypeError, match="expected a Buffer or an ElasticBuffer"):
        ops.state_of(group)
    other = make_buffer(group, "ep")
    second = ops.state_of(other)
    selected = sent[2].clone()
    of_second = ops.dispatch(second, sent[1], selected, *sent[3:])
    selected.fill_(0)
    assert torch.equal(ops.combine(second, of_second[0], of_second[4]), ops.combine(state, rows, handle))
    del of_second
    # The dispatch of a handle goes with the last tensor that shares its memory.
    view = handle[1:]
    del handle
    assert len(ops._sent) == 1
    del view
    assert not ops._sent
    del buffer
    gc.collect()
    with pytest.raises(UseAfterDestroy, match="is gone"):
        ops.dispatch(*sent)


def test_operators_keep_the_rules_of_pytorch():
    """What they say they write, what gradients go through, and what fake kernels say, by PyTorch's own check. ``receive`` it cannot
    call twice, and no two handles of ``send`` are equal."""
    buffer = Buffer(None, 1 << 22, comm=Alone)
    state, x = ops.state_of(buffer), torch.randn(5, 64).to(torch.bfloat16)
    idx, weights = torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
    rows, _, recv_weights, _, handle = ops.dispatch(state, x, idx, weights, 4)
    of_eager = ("test_schema", "test_autograd_registration", "test_faketensor")
    for name, arguments in (
        ("send", (state, x, idx, weights, 4, 1, False)),
        ("combine", (state, rows.requires_grad_(), None, handle)),
        ("combine", (state, rows.detach(), recv_weights, handle)),
        ("combine_backward", (state, x, handle, rows.size(0))),
    ):
        tests = of_eager if name == "send" else (*of_eager, "test_aot_dispatch_dynamic")
        torch.library.opcheck(getattr(torch.ops.deep_ep, name).default, arguments, test_utils=tests)


def test_padding_is_zero_on_both_ways(monkeypatch):
    """Rows between the experts' go into products whose gradients are summed: what was in memory before may be NaN."""
    buffer = ElasticBuffer(Alone, num_max_tokens_per_rank=5, hidden=64, num_topk=2)
    state, x = ops.state_of(buffer), torch.randn(5, 64).to(torch.bfloat16)
    idx, weights = torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
    asked, call = [], ElasticBuffer.dispatch

    def dispatch(*arguments, **options):
        asked.append(options["do_zero_padding"])
        return call(*arguments, **options)

    monkeypatch.setattr(ElasticBuffer, "dispatch", dispatch)
    rows, _, _, counts, handle = ops.dispatch(state, x, idx, weights, 4, 16, True)
    assert rows.size(0) == counts.sum() and (rows == 0).all(1).sum() == rows.size(0) - 10
    rows.requires_grad_()
    ops.combine(state, rows, handle).sum().backward()
    assert asked == [True, True] and (rows.grad == 0).all(1).sum() == rows.size(0) - 10
