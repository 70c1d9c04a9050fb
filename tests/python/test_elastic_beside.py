"""Buffers, settings and interfaces beside each other, and events."""

import os

import elastic_reference as reference
import pytest
import torch
import torch.distributed as dist
from common import ranks_a_node
from elastic_cases import H, M, check_rows, make_buffer, send
from reference import make_case
from test_errors import plain_sentence

from deep_ep import Buffer, EventHandle, EventOverlap
from deep_ep.buffers.elastic import ElasticBuffer
from deep_ep.errors import RankMismatch

HELD = 4096


def lies_in(memory, tensor):
    return memory.data_ptr() <= tensor.data_ptr() < memory.data_ptr() + memory.numel()


def held_between_nodes(group):
    """Rows that programs keep, many times the size of the buffer. They do not lie in it: between nodes, what does not fit
    there takes a slower way."""
    with ranks_a_node():
        buffer = make_buffer(group, num_bytes=16 << 20, hidden=HELD, num_max_tokens_per_rank=64)
    x = torch.full((64, HELD), float(buffer.rank_idx), dtype=torch.bfloat16)
    idx = torch.arange(4).expand(64, 4).contiguous()  # every rank gets every token
    kept = []
    for _ in range(12):
        rows, local, weights, handle, _ = buffer.dispatch(x, idx, torch.ones(64, 4), num_experts=4)
        kept.append((rows, local, weights))
        kept.append(buffer.dispatch(x, handle=handle)[:1])
    for tensor in (tensor for result in kept for tensor in result):
        assert not lies_in(buffer.runtime.local_memory(), tensor)
    for rows, *_ in kept:
        assert rows[::64, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert sum(each[0].numel() * 2 for each in kept) > 47 << 20 > 2 * buffer.num_bytes


def test_held_between_nodes(ranks):
    ranks(4).run(held_between_nodes)


def other_settings(group):
    rank = dist.get_rank(group)
    try:
        os.environ["DEEP_EP_RANKS_PER_NODE"] = "1" if rank else "0"
        with pytest.raises(RankMismatch, match="ranks_per_node is . on rank . but . on rank .; it must be equal") as raised:
            make_buffer(group)
        plain_sentence(str(raised.value))
    finally:
        del os.environ["DEEP_EP_RANKS_PER_NODE"]


def test_ranks_with_other_settings(ranks):
    ranks(2).run(other_settings)


def events(group):
    buffer = make_buffer(group)
    rank = buffer.rank_idx
    case = make_case([9, 14], hidden=H, num_topk=4)
    want = reference.expected(case, rank, M, 1)
    captured = ElasticBuffer.capture()
    assert isinstance(captured, EventHandle)
    for previous, asynchronous, allocate in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 1), (1, 1, 1)):
        for event in (captured, EventOverlap(captured), EventOverlap()) if previous else (None,):
            options = {"async_with_compute_stream": asynchronous, "allocate_on_comm_stream": allocate,
                       "previous_event": event, "previous_event_before_epilogue": event}  # fmt: skip
            result = send(buffer, case, **options)
            assert (result[4].event is not None) == bool(asynchronous)
            with result[4]:
                pass
            check_rows(want, result, False)
            buffer.combine(result[0], result[3], **options)  # the result is dropped
    for wrong, allocate, kind in ((captured, False, ValueError), (3, True, TypeError)):
        with pytest.raises(kind, match="previous_event"):
            send(buffer, case, previous_event=wrong, allocate_on_comm_stream=allocate)
    called = []
    event = send(buffer, case, async_with_compute_stream=True)[4]
    event.register_hook_after_wait(lambda: called.append(1))
    event.current_stream_wait()
    assert called == [1]
    for options in ({}, {"use_comm_stream": False}, {"with_cpu_sync": True}, {"sequential": False}):
        buffer.barrier(**options)


def test_events_and_barrier(ranks):
    ranks(2).run(events)


def beside_the_first_interface(group):
    """An ElasticBuffer and a Buffer with low-latency calls on one group."""
    import low_latency_calls as low_latency
    import low_latency_reference

    buffer, first = make_buffer(group), low_latency.make_buffer(group)
    case = make_case([9, 14], hidden=H, num_topk=4)
    small = low_latency.ll_case([low_latency.M] * 2)
    for _ in range(2):
        result = send(buffer, case)
        low_latency_reference.check_dispatched(
            small, first.rank, low_latency.M, low_latency.dispatch(first, small, use_fp8=False)
        )
        check_rows(reference.expected(case, buffer.rank_idx, M, 1), result, False)
    assert isinstance(first, Buffer)


def test_beside_the_first_interface(ranks):
    ranks(2).run(beside_the_first_interface)
