"""Checks of test_elastic_checks.py: what tests of CPU ranks show of HybridEPBuffer, overlap and compiled layers, with GPUs."""

import torch
from elastic_check_parts import SPIN, check, on_host

from deep_ep import Buffer


class OnGpu:
    """A buffer whose calls take tensors of the host and give tensors of the host."""

    def __init__(self, buffer, device):
        self.buffer, self.device = buffer, device

    def moved(self, value):
        if isinstance(value, tuple):
            return tuple(self.moved(each) for each in value)
        return value.to(self.device) if isinstance(value, torch.Tensor) and value.dim() else value

    def __getattr__(self, name):
        member = getattr(self.buffer, name)
        if not callable(member):
            return member

        def call(*values, **named):
            return on_host(member(*map(self.moved, values), **{key: self.moved(value) for key, value in named.items()}))

        return call


@check(alone=False)
def hybrid_ep_there_and_back(ranks):
    import test_hybrid_ep as hybrid

    whole = hybrid.HybridEPBuffer
    hybrid.HybridEPBuffer = lambda *values: OnGpu(whole(*values), ranks.device)
    try:
        hybrid.there_and_back(ranks.group, list(range(8)))
        hybrid.selections(ranks.group)
    finally:
        hybrid.HybridEPBuffer = whole


@check(alone=False)
def low_latency_forms(ranks):
    """Each form of rows, bit for bit; the divisions of a GPU must round as those of the CPU."""
    import low_latency_calls as calls

    torch.set_default_device(ranks.device)
    try:
        for hidden in (512, 7168):
            buffer = calls.make_buffer(ranks.group, hidden, experts=4 * ranks.size)
            case = calls.ll_case([calls.M - rank % 3 for rank in range(ranks.size)], hidden)
            calls.check_round_trip(buffer, case, {"use_fp8": False})
            for form in calls.FORMS[1:]:
                calls.check_round_trip(buffer, case, {"use_fp8": True, **form})
    finally:
        torch.set_default_device("cpu")


@check(alone=False)
def combine_beside_its_gemm(ranks):
    """The stream of the GEMM begins to write x when combine has been waiting for 50 ms."""
    import low_latency_calls as calls
    from test_low_latency_overlap import forms, produce

    case = calls.ll_case([calls.M] * ranks.size)
    size = Buffer.get_low_latency_rdma_size_hint(calls.M, 512, ranks.size, case.num_experts)
    buffer = Buffer(ranks.group, 0, size, low_latency_mode=True, num_qps_per_rank=4)
    mine = [ranks.there(part[ranks.rank]) for part in (case.x, case.topk_idx, case.topk_weights)]
    _, count, handle, _, _ = buffer.low_latency_dispatch(mine[0], mine[1], calls.M, case.num_experts, use_fp8=False)
    x = ranks.there(calls.outputs_of(case)[ranks.rank])
    wanted, _, hook = buffer.low_latency_combine(x, mine[1], mine[2], handle, return_recv_hook=True)
    hook()
    gemm = torch.cuda.Stream()
    for form, (signals, block_m, value) in forms(x, count):
        made, first = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
        produce(x, first, torch.zeros_like(signals), block_m, value)  # loads its kernels, which a waiting kernel would hinder
        ranks.wait()
        with torch.cuda.stream(gemm):
            torch.cuda._sleep(SPIN)
            produce(x, made, signals, block_m, value)
        back, _, hook = buffer.low_latency_combine(made, mine[1], mine[2], handle, overlap=True, return_recv_hook=True, **form)
        hook()
        ranks.wait()
        assert torch.equal(back, wanted), f"block_m {block_m}"


@check(alone=False)
def layers_compiled_for_graphs(ranks):
    import test_ops
    import torch._inductor.config

    torch._inductor.config.emulate_precision_casts = True  # else it rounds less often, and experts are chosen otherwise
    torch._dynamo.reset()
    for kind, expand, calls in (("normal", False, 2), ("elastic", True, 1)):
        layer = test_ops.Layer(test_ops.make_buffer(ranks.group, kind), expand, calls).to(ranks.device)
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead", dynamic=True)
            for tokens in ((12, 7), (5, 31), (12, 7)):
                expected = test_ops.step(layer, layer, tokens[layer.rank % 2])
                actual = test_ops.step(layer, compiled, tokens[layer.rank % 2])
                for at, (one, other) in enumerate(zip(actual, expected)):  # compiled code adds in another order
                    off = ((one.float() - other.float()).norm() / other.float().norm()).item()
                    assert off <= 0.02 or other.numel() == 0, f"{kind}, {tokens}, output {at}: off by {off}"
