"""Events of the second interface, and a buffer of the first beside one of the second."""

import elastic_reference as reference
import low_latency_calls as low_latency
import low_latency_reference
import pytest
from cluster import on_ranks
from elastic_cases import H, M, check_rows, make_buffer, send
from reference import make_case

from deep_ep import EventHandle, EventOverlap
from deep_ep.buffers.elastic import ElasticBuffer


@on_ranks(2)
def test_events_and_barrier(group):
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
    for options in ({}, {"use_comm_stream": False}, {"with_cpu_sync": True}, {"sequential": False}):
        buffer.barrier(**options)


@on_ranks(2)
def test_beside_the_first_interface(group):
    """An ElasticBuffer and a Buffer with low-latency calls on one group."""
    buffer, first = make_buffer(group), low_latency.make_buffer(group)
    case = make_case([9, 14], hidden=H, num_topk=4)
    small = low_latency.ll_case([low_latency.M] * 2)
    for _ in range(2):
        result = send(buffer, case)
        low_latency_reference.check_dispatched(
            small, first.rank, low_latency.M, low_latency.dispatch(first, small, use_fp8=False)
        )
        check_rows(reference.expected(case, buffer.rank_idx, M, 1), result, False)
