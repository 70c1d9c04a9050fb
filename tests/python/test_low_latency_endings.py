"""When low-latency calls are over: events and hooks."""

import gc
import weakref

import low_latency_reference as reference
import torch
from cluster import on_ranks
from low_latency_calls import M, combine, dispatch, ll_case, make_buffer, outputs_of


@on_ranks(3)
def test_endings(group):
    """Events and hooks; what they need is kept for them."""
    buffer = make_buffer(group)
    rank = buffer.rank
    case = ll_case([M] * buffer.group_size)
    outputs = outputs_of(case)
    wanted = reference.combined(case, rank, outputs)

    waits = torch.zeros(buffer.group_size, dtype=torch.int64)
    received = torch.zeros(case.local_experts, dtype=torch.int32)
    words = torch.zeros(case.local_experts, (buffer.group_size * M + 3) // 4, dtype=torch.int64)
    known = case.topk_weights[rank].clone()
    rows, count, handle, event, hook = dispatch(
        buffer, case, use_fp8=False, async_finish=True, dispatch_wait_recv_cost_stats=waits,
        cumulative_local_expert_recv_stats=received, arrival_counters=words, arrival_rows=4, combine_weights=known,
    )  # fmt: skip
    assert hook is None and (words == 1 << 24).all(), "on the CPU a call has received when it returns"
    for kept in (waits, received, case.x[rank], case.topk_idx[rank], rows, known):
        assert any(tensor is kept for tensor in event.extra_tensors)
    event.current_stream_wait()
    reference.check_dispatched(case, rank, M, (rows, count, handle, event, hook), stats=received)
    back, event, hook = combine(buffer, case, outputs[rank], handle, async_finish=True, combine_wait_recv_cost_stats=waits)
    for kept in (waits, outputs[rank], case.topk_idx[rank], case.topk_weights[rank], back, handle):
        assert any(tensor is kept for tensor in event.extra_tensors)
    del handle
    event.current_stream_wait()
    assert hook is None
    reference.close(back, wanted)
    del event

    for with_weights in (False, True):
        out = torch.empty_like(back)
        x, idx = case.x[rank].clone(), case.topk_idx[rank].clone()
        known = case.topk_weights[rank].clone() if with_weights else None
        rows, count, handle, event, hook = buffer.low_latency_dispatch(
            x, idx, M, case.num_experts, use_fp8=False, return_recv_hook=True, combine_weights=known
        )
        assert event.event is None
        x.fill_(7)  # may be overwritten once the send part has run
        del rows, count, x, idx, known
        gc.collect()
        hook()
        idx, weights = case.topk_idx[rank].clone(), case.topk_weights[rank].clone()
        returned, _, hook = buffer.low_latency_combine(
            outputs[rank], idx, weights, handle, return_recv_hook=True, out=out
        )
        assert returned is out
        del idx, weights, handle, returned
        gc.collect()
        hook()
        hook()  # a second time does nothing
        reference.close(out, wanted)


@on_ranks(3)
def test_dropped_hooks(group):
    """A hook that is dropped unused: its receive part still comes, with the next call, and has what it reads."""
    buffer = make_buffer(group)
    rank = buffer.rank
    case = ll_case([M] * buffer.group_size)
    outputs = outputs_of(case)
    handle = dispatch(buffer, case, use_fp8=False)[2]

    def sent(x, idx):
        buffer.low_latency_dispatch(x, idx, M, case.num_experts, use_fp8=False, return_recv_hook=True)
        return weakref.ref(x), weakref.ref(idx)

    def returned(idx, weights, out=None):
        buffer.low_latency_combine(outputs[rank], idx, weights, handle, return_recv_hook=True, out=out)
        return weakref.ref(idx), weakref.ref(weights)

    mine = case.topk_idx[rank], case.topk_weights[rank]
    out = torch.zeros_like(case.x[rank])
    for kept, next_call in (
        (sent(case.x[rank].clone(), mine[0].clone()), lambda: dispatch(buffer, case, use_fp8=False)),
        (returned(mine[0].clone(), mine[1].clone(), out), lambda: combine(buffer, case, outputs[rank], handle)),
    ):
        gc.collect()
        assert all(each() is not None for each in kept), "the receive part waits"
        next_call()
        gc.collect()
        assert all(each() is None for each in kept), "it has come"
    reference.close(out, reference.combined(case, rank, outputs))
    # A buffer that ends lets go of what waits.
    kept = returned(mine[0].clone(), mine[1].clone())
    del buffer, handle
    gc.collect()
    assert all(each() is None for each in kept)
