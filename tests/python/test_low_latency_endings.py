"""When low-latency calls are over: events, hooks, arrival counters."""

import gc
import weakref

import low_latency_reference as reference
import pytest
import torch
from low_latency_calls import M, combine, dispatch, ll_case, make_buffer, outputs_of


def endings(group):
    """Events and hooks; what they need is kept for them."""
    buffer = make_buffer(group)
    rank = buffer.rank
    case = ll_case([M] * buffer.group_size)
    outputs = outputs_of(case)
    wanted = reference.combined(case, rank, outputs)

    waits = torch.zeros(buffer.group_size, dtype=torch.int64)
    received = torch.zeros(case.local_experts, dtype=torch.int32)
    rows, count, handle, event, hook = dispatch(
        buffer, case, use_fp8=False, async_finish=True, dispatch_wait_recv_cost_stats=waits,
        cumulative_local_expert_recv_stats=received,
    )  # fmt: skip
    assert hook is None
    for kept in (waits, received, case.x[rank], case.topk_idx[rank], rows):
        assert any(tensor is kept for tensor in event.extra_tensors)
    event.current_stream_wait()
    reference.check_dispatched(case, rank, M, (rows, count, handle, event, hook), stats=received)
    back, event, hook = combine(buffer, case, outputs[rank], handle, async_finish=True, combine_wait_recv_cost_stats=waits)
    del handle
    for kept in (waits, outputs[rank], case.topk_idx[rank], case.topk_weights[rank], back):
        assert any(tensor is kept for tensor in event.extra_tensors)
    event.current_stream_wait()
    assert hook is None
    reference.close(back, wanted)
    del event

    out = torch.empty_like(back)
    x, idx = case.x[rank].clone(), case.topk_idx[rank].clone()
    rows, count, handle, event, hook = buffer.low_latency_dispatch(
        x, idx, M, case.num_experts, use_fp8=False, return_recv_hook=True
    )
    assert event.event is None
    x.fill_(7)  # may be overwritten once the send part has run
    del rows, count, x, idx
    gc.collect()
    hook()
    idx, weights = case.topk_idx[rank].clone(), case.topk_weights[rank].clone()
    back, _, hook = buffer.low_latency_combine(
        outputs[rank], idx, weights, handle, return_recv_hook=True, out=out
    )
    assert back is out
    del idx, weights, handle, back
    gc.collect()
    hook()
    hook()  # a second time does nothing
    reference.close(out, wanted)
    with pytest.raises(ValueError, match="async_finish"):
        dispatch(buffer, case, async_finish=True, return_recv_hook=True)


def test_endings(ranks):
    ranks(3).run(endings)


def dropped_hooks(group):
    """A hook that is dropped unused: its receive part still comes, with the next call, and has what it reads."""
    buffer = make_buffer(group)
    rank = buffer.rank
    case = ll_case([M] * buffer.group_size)
    outputs = outputs_of(case)
    wanted = reference.combined(case, rank, outputs)
    for _ in range(2):
        x, idx = case.x[rank].clone(), case.topk_idx[rank].clone()
        _, _, handle, _, hook = buffer.low_latency_dispatch(
            x, idx, M, case.num_experts, use_fp8=False, return_recv_hook=True
        )
        kept = [weakref.ref(x), weakref.ref(idx)]
        del x, idx, hook
        gc.collect()
        assert all(each() is not None for each in kept), "the receive part waits"
        handle = dispatch(buffer, case, use_fp8=False)[2]
        gc.collect()
        assert all(each() is None for each in kept), "it has come"

        idx, weights, out = case.topk_idx[rank].clone(), case.topk_weights[rank].clone(), torch.zeros_like(case.x[rank])
        kept = [weakref.ref(idx), weakref.ref(weights)]
        hook = buffer.low_latency_combine(outputs[rank], idx, weights, handle, return_recv_hook=True, out=out)[2]
        del idx, weights, hook
        gc.collect()
        spoiled = [torch.full_like(case.topk_weights[rank], 1e9) for _ in range(64)]  # freed memory is soon another one's
        assert all(each() is not None for each in kept)
        combine(buffer, case, outputs[rank], handle)
        reference.close(out, wanted)
        del spoiled
        gc.collect()
        assert all(each() is None for each in kept)
    # A buffer that ends lets go of what waits.
    weights = case.topk_weights[rank].clone()
    buffer.low_latency_combine(outputs[rank], case.topk_idx[rank], weights, handle, return_recv_hook=True)
    kept = weakref.ref(weights)
    del weights, handle, buffer
    gc.collect()
    assert kept() is None


def test_dropped_hooks(ranks):
    ranks(3).run(dropped_hooks)


def arrival_counters(group):
    """On the CPU a call has received when it returns; tests in C++ look while it still receives."""
    buffer = make_buffer(group)
    ranks = buffer.group_size
    case = ll_case([M] * ranks)
    for rows in (0, 4):
        words = torch.zeros(4, 1 if rows == 0 else (ranks * M + rows - 1) // rows, dtype=torch.int64)
        for call in range(1, 4):
            result = dispatch(
                buffer, case, arrival_counters=words, arrival_rows=rows, async_finish=call == 2, return_recv_hook=call == 3
            )
            if result[4] is not None:
                result[4]()
            if call == 2:
                result[3].current_stream_wait()
            assert (words == call << 24).all(), words
    with pytest.raises(ValueError, match="arrival_counters"):
        dispatch(buffer, case, arrival_counters=torch.zeros(4, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="arrival_rows is 3"):
        dispatch(buffer, case, arrival_counters=torch.zeros(4, 2, dtype=torch.int64), arrival_rows=3)
    masked = make_buffer(group, enable_shrink=True)
    with pytest.raises(ValueError, match="arrival_counters .*masking"):
        dispatch(masked, case, arrival_counters=torch.zeros(4, 1, dtype=torch.int64))


def test_arrival_counters(ranks):
    ranks(2).run(arrival_counters)
