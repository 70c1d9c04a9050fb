"""What programs do with the memory of results: freeing it early by ``resize_(0)``, and ``record_stream``."""

import gc
import pickle
import types

import pytest
import torch
from reference import make_case
from test_calls import CONFIG, equal
from elastic_cases import two_ranks_a_node
from test_errors import Alone, plain_sentence

from deep_ep import Buffer, _native, results
from deep_ep.buffers.elastic import ElasticBuffer

HEAP = 64 << 20  # the least that a buffer takes
HIDDEN = 2048


def sent(buffer, x, idx, num_experts, **options):
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, num_experts)
    return buffer.dispatch(
        x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=idx,
        topk_weights=torch.ones(idx.shape, dtype=torch.float32), config=CONFIG, **options,
    )  # fmt: skip


def of_buffer(buffer, tensor):
    begin = buffer.runtime.local_memory()
    return 0 <= tensor.data_ptr() - begin.data_ptr() < begin.numel()


def large(fill, hidden=HIDDEN):
    return torch.full((2048, hidden), float(fill), dtype=torch.bfloat16)


@pytest.mark.parametrize("freed", [False, True])
def test_resize_gives_memory_of_the_buffer_back(freed):
    """Of rows that somebody still refers to."""
    buffer = Buffer(None, 1 << 20, comm=Alone)
    idx = torch.zeros(2048, 1, dtype=torch.int64)
    held, here = [], []
    for i in range(12):  # 8 MiB each
        rows, _, _, _, handle, _ = sent(buffer, large(i), idx, 2)
        assert (rows == i).all()
        here.append(of_buffer(buffer, rows))
        view = rows.detach()[1:]
        held.append((rows, view, handle))
        if freed:
            storage = view.untyped_storage()
            assert storage.nbytes() == storage.size() == 8 << 20
            assert storage.resize_(8 << 20) is storage and (rows == i).all()
            assert storage.resize_(0) is storage
            del storage
            gc.collect()
            assert rows.untyped_storage().nbytes() == rows.untyped_storage().size() == rows.untyped_storage().data_ptr() == 0
            assert rows.untyped_storage().resize_(0) is view.untyped_storage()
    assert here[0] and all(here) == freed, "rows in the buffer's memory"


def test_other_sizes_are_refused():
    buffer = Buffer(None, 1 << 20, comm=Alone)
    rows = sent(buffer, torch.ones(3, 64, dtype=torch.bfloat16), torch.zeros(3, 1, dtype=torch.int64), 2)[0]
    for size in (1, 1 << 20):
        with pytest.raises(RuntimeError, match=f"has 384 bytes, allowed: these, or 0.*not {size}") as raised:
            rows.untyped_storage().resize_(size)
        plain_sentence(str(raised.value))
    assert rows.tolist() == [[1.0] * 64] * 3
    assert pickle.loads(pickle.dumps(rows)).tolist() == rows.tolist()
    rows.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="has 0 bytes"):
        rows.untyped_storage().resize_(384)


def test_storages_do_not_keep_themselves():
    """No cycle: the memory goes with the last reference, not with the garbage collection."""
    buffer = Buffer(None, 1 << 20, comm=Alone)
    idx = torch.zeros(2048, 1, dtype=torch.int64)
    gc.disable()
    try:
        for i in range(20):
            rows = sent(buffer, large(i), idx, 2)[0]
            assert of_buffer(buffer, rows)
            del rows
    finally:
        gc.enable()


def low_latency(buffer, x, idx, **options):
    return buffer.low_latency_dispatch(x, idx, 16, 4, **options)


@pytest.mark.parametrize("freed", [False, True])
@pytest.mark.parametrize("kind", ["rows", "fp8", "hook", "rank major", "combined"])
def test_resize_gives_memory_of_low_latency_results_back(freed, kind):
    """It is the next call's, though somebody still refers to the tensors."""
    buffer = Buffer(None, 0, 1 << 22, low_latency_mode=True, comm=Alone)
    x, idx = torch.ones(16, 512, dtype=torch.bfloat16), torch.arange(32).reshape(16, 2) % 4
    held, addresses = [], set()
    for i in range(6):
        hook = None
        if kind == "rank major":
            rows, count, local, weights, handle, _, _ = buffer.low_latency_dispatch_rank_major(
                x, idx, 16, 4, torch.ones(16, 2), use_fp8=False
            )
            results = (rows, count, local, weights)
        elif kind == "combined":
            rows, count, handle, _, _ = low_latency(buffer, x, idx, use_fp8=False)
            results = (buffer.low_latency_combine(rows.clone(), idx, torch.ones(16, 2), handle)[0], rows, count)
        else:
            rows, count, handle, _, hook = low_latency(buffer, x, idx, use_fp8=kind == "fp8", return_recv_hook=kind == "hook")
            results = (*rows, count) if kind == "fp8" else (rows, count)
        addresses.add(results[0].data_ptr())
        held.append((results, handle))
        if freed:
            for each in results:
                assert each.untyped_storage().resize_(0).nbytes() == 0 == each.untyped_storage().size()
        if hook is not None:
            hook()  # the receiving kernel still has the memory
        sent_back = torch.full((1 if kind == "rank major" else 4, 16, 512), 2.0).to(x)
        combined = buffer.low_latency_combine(sent_back, idx, torch.ones(16, 2), handle)[0]
        assert (combined == (2 if kind == "rank major" else 4)).all(), "a handle goes on working"
    assert (len(addresses) < 6) == freed, addresses


def test_small_results_may_be_freed():
    buffer = Buffer(None, 1 << 20, comm=Alone)
    idx = torch.zeros(2048, 1, dtype=torch.int64)
    layouts, addresses = [], set()
    for _ in range(6):
        layouts.append(buffer.get_dispatch_layout(idx, 2))
        per_rank, _, per_expert, in_rank, _ = layouts[-1]
        result = buffer.dispatch(
            large(1, 64), num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
            topk_idx=idx, topk_weights=torch.ones(2048, 1), config=CONFIG,
        )  # fmt: skip
        layouts.append(result)
        addresses.add(in_rank.data_ptr())
        for each in (per_rank, per_expert, in_rank, result[1], result[2]):
            storage = each.untyped_storage()
            assert storage.nbytes() and storage.resize_(0) is storage and storage.nbytes() == 0
            assert each.untyped_storage().resize_(0) is storage, "once more"
        wanted = large(1, 64)
        equal(buffer.combine(result[0], result[4], config=CONFIG)[0], wanted, "combined with the handle of freed results")
    assert len(addresses) < 4


def test_handles_and_memory_of_the_buffer_are_kept():
    buffer = Buffer(None, 1 << 20, 1 << 22, low_latency_mode=True, comm=Alone)
    x, idx = torch.ones(16, 512, dtype=torch.bfloat16), torch.zeros(16, 1, dtype=torch.int64)
    handle = sent(buffer, x, idx, 4)[4]
    low = low_latency(buffer, x, idx)[2]
    of_the_buffer = (buffer.runtime.local_memory(), buffer.get_next_low_latency_combine_buffer(low))
    for each in (handle[0], handle[3], handle[5], *low[:2], *of_the_buffer):
        storage = each.untyped_storage()
        with pytest.raises(RuntimeError, match="belong to a handle or to the buffer of deep_ep") as raised:
            storage.resize_(0)
        plain_sentence(str(raised.value))
        assert storage.nbytes() == each.numel() * each.element_size() and storage.resize_(storage.nbytes()) is storage


def test_storages_of_others_are_as_before():
    ours, empty = torch.ones(8), torch.empty(0)
    assert torch.UntypedStorage.resize_.__module__ == "deep_ep.results"
    assert ours.untyped_storage().resize_(64).nbytes() == 64 and ours.untyped_storage().resize_(0).nbytes() == 0
    assert empty.untyped_storage().resize_(8).nbytes() == 8
    theirs = torch.frombuffer(bytearray(16), dtype=torch.int32)
    for size in (0, 16, 32):
        with pytest.raises(RuntimeError, match="not resizable"):
            theirs.untyped_storage().resize_(size)
    assert theirs.tolist() == [0] * 4
    results.watch_resize()
    assert ours.untyped_storage().resize_(32).nbytes() == 32, "told twice"


def each_result(group, elastic):
    """Every kind of result may be freed; the next calls are right."""
    case = make_case([9, 14], hidden=64, num_topk=3)
    for _ in range(3):
        if elastic:
            buffer = ElasticBuffer(group, num_max_tokens_per_rank=16, hidden=64, num_topk=3)
            rank = buffer.rank_idx
            for expand in (False, True):
                rows, _, _, handle, _ = buffer.dispatch(
                    case.x[rank], case.topk_idx[rank], num_experts=case.num_experts, do_expand=expand
                )
                combined = buffer.combine(rows.clone(), handle)[0]
                again = buffer.dispatch(case.x[rank], handle=handle)[0]
                for each in (rows, combined, again):
                    each.untyped_storage().resize_(0)
        else:
            buffer = Buffer(group, 1 << 20)
            rank = buffer.rank
            x = (case.x[rank].to(torch.float8_e4m3fn), torch.ones(case.x[rank].size(0), 1))
            (rows, scales), _, _, _, handle, _ = sent(buffer, x, case.topk_idx[rank], case.num_experts)
            plain = rows.float().to(torch.bfloat16)
            again = buffer.dispatch(case.x[rank], handle=handle, config=CONFIG)[0]
            combined = buffer.combine(plain, handle, config=CONFIG)[0]
            wanted = combined.clone()
            for each in (rows, scales, again, combined):
                each.untyped_storage().resize_(0)
            equal(buffer.combine(plain, handle, config=CONFIG)[0], wanted, "combined after all was freed")


@pytest.mark.parametrize("elastic", [False, True])
def test_every_result_may_be_freed(ranks, elastic):
    ranks(2).run(each_result, elastic)


class Node:
    """A step of a layer, as schedules that overlap two batches cut it: inputs are detached, and freed as soon as the step
    has used them; the backward pass is run by hand, step by step."""

    def __init__(self, function, frees_inputs=False):
        self.function, self.frees_inputs = function, frees_inputs

    def forward(self, *inputs):
        self.inputs = [each.detach().requires_grad_(each.is_floating_point()) for each in inputs]
        with torch.enable_grad():
            self.output = self.function(*self.inputs)
        if self.frees_inputs:
            for each in inputs:
                if each.is_cuda:
                    each.record_stream(torch.cuda.current_stream())
                each.untyped_storage().resize_(0)
        return self.output.detach()

    def backward(self, gradient):
        torch.autograd.backward(self.output, gradient)
        self.output = None
        return self.inputs[0].grad


class Sent(torch.autograd.Function):
    @staticmethod
    def forward(context, x, buffer, idx, num_experts, handles):
        result = sent(buffer, x, idx, num_experts)
        context.buffer, context.handle = buffer, result[4]
        handles.append(result[4])
        return result[0]

    @staticmethod
    def backward(context, gradient):
        return context.buffer.combine(gradient.contiguous(), context.handle, config=CONFIG)[0], None, None, None, None


class Combined(torch.autograd.Function):
    @staticmethod
    def forward(context, x, buffer, handle):
        context.buffer, context.handle = buffer, handle
        return buffer.combine(x, handle, config=CONFIG)[0]

    @staticmethod
    def backward(context, gradient):
        return context.buffer.dispatch(gradient.contiguous(), handle=context.handle, config=CONFIG)[0], None, None


def megatron_overlap(group, nodes):
    """One batch goes forward while the one before goes backward, layer by layer. Detached tensors of all layers stay until
    the backward pass."""
    layers, tokens = 2, 64
    with two_ranks_a_node(nodes):
        buffer = Buffer(group, 1 << 20)
    hidden = 256
    size = buffer.group_size
    idx = torch.stack([torch.arange(tokens) % (2 * size), (torch.arange(tokens) + 2) % (2 * size)], dim=1)
    copies = torch.tensor([len({e // 2 for e in row}) for row in idx.tolist()]).unsqueeze(1)
    kept = []

    def layer():
        handles = []
        return [
            Node(lambda x: Sent.apply(x, buffer, idx, 2 * size, handles)),
            Node(lambda rows: rows * 2, frees_inputs=True),  # what experts make of them: a copy to begin with
            Node(lambda rows: Combined.apply(rows, buffer, handles[0]), frees_inputs=True),
        ]

    def forward(nodes_of_layer, x):
        for node in nodes_of_layer:
            x = node.forward(x)
            kept.append(node.inputs)  # they are there until the end
        return x

    def backward(nodes_of_layer, gradient):
        for node in reversed(nodes_of_layer):
            gradient = node.backward(gradient)
        return gradient

    batches = [[layer() for _ in range(layers)] for _ in range(3)]
    gradients = []
    for now in range(len(batches) + 1):
        x = torch.ones(tokens, hidden, dtype=torch.bfloat16)
        gradient = torch.ones(tokens, hidden, dtype=torch.bfloat16)
        for at in range(layers):
            if now < len(batches):
                x = forward(batches[now][at], x)
            if now > 0:
                gradient = backward(batches[now - 1][layers - 1 - at], gradient)
        wanted = (2.0 * copies.float()) ** layers
        if now < len(batches):
            equal(x, wanted.expand(-1, hidden).to(torch.bfloat16), "output of the layers")
        if now > 0:
            gradients.append(gradient)
    for gradient in gradients:
        equal(gradient, wanted.expand(-1, hidden).to(torch.bfloat16), "gradient of the layers")


@pytest.mark.parametrize("nodes", [False, True])
def test_megatron_overlap(ranks, nodes):
    ranks(4).run(megatron_overlap, nodes)


def test_record_stream_finds_the_memory_of_views():
    """What PyTorch's method cannot: it is told by the address. Without a GPU there is no stream but 0."""
    buffer = Buffer(None, 1 << 20, comm=Alone)
    result = sent(buffer, torch.ones(3, 64, dtype=torch.bfloat16), torch.zeros(3, 1, dtype=torch.int64), 2)
    for each in (result[0], result[1], result[2], result[4][0], result[0].detach()[2:].t()):
        assert _native.record_stream(each.untyped_storage().data_ptr(), 0)
    small = Buffer(None, 0, 1 << 22, low_latency_mode=True, comm=Alone)
    x, idx = torch.ones(16, 512, dtype=torch.bfloat16), torch.zeros(16, 1, dtype=torch.int64)
    (rows, scales), count, handle, _, _ = low_latency(small, x, idx)
    combined = small.low_latency_combine(rows.to(x), idx, torch.ones(16, 1), handle)[0]
    layout = small.get_dispatch_layout(idx, 4)
    for other in (rows, rows[1:], scales, count, *handle[:2], combined, layout[0], layout[2], layout[3]):
        assert _native.record_stream(other.untyped_storage().data_ptr(), 0)
    assert not _native.record_stream(torch.ones(4).data_ptr(), 0)
    address = result[0].data_ptr()
    assert _native.free_result(address, 384)
    del result, each
    assert not _native.record_stream(address, 0) and not _native.free_result(address, 384)


def test_record_stream_is_passed_on(monkeypatch):
    seen = []
    monkeypatch.setattr(results, "_of_pytorch", None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: seen.append((tensor, stream)))
    results.watch_record_stream()
    ours = torch.Tensor.record_stream
    results.watch_record_stream()
    assert torch.Tensor.record_stream is ours, "once"
    monkeypatch.setattr(_native, "record_stream", lambda address, stream: seen.append((address, stream)))

    class Stream:
        cuda_stream = 5

    tensor, stream = torch.ones(3), Stream()
    tensor.record_stream(stream)
    assert seen == [(tensor, stream)], "on the CPU nobody is told"
    del seen[:]
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    tensor[1:].record_stream(stream)
    assert seen[0][1] is stream and seen[1] == (tensor.untyped_storage().data_ptr(), 5)
    del seen[:]
    monkeypatch.setattr(torch.cuda, "Stream", lambda **same: Stream() if same["stream_id"] == 7 else None)
    plain = types.SimpleNamespace(stream_id=7, device_index=0, device_type=1)  # as torch.Stream, which has no handle
    tensor.record_stream(plain)
    assert seen[1] == (tensor.data_ptr(), 5)
    del seen[:]
    parameter = torch.nn.Parameter(torch.ones(2))  # results are none, and others may have no storage
    parameter.record_stream(stream)
    assert len(seen) == 1
