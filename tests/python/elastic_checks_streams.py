"""Checks of streams and events: who waits for what, and what stays alive until then."""

import functools
import os
from unittest import mock

import elastic_reference as reference
import torch
from elastic_cases import check_rows, send
from elastic_check_parts import H, M, SPIN, check, noise, on_host
from normal_mode import equal

from deep_ep import EventHandle


@check()
def inputs_written_late(ranks):
    """Calls come behind work of their stream, or behind ``previous_event``."""
    buffer, case = ranks.buffer(), ranks.case(6)
    want = reference.expected(case, ranks.rank, M, 1)
    mine, idx, weights = (ranks.there(each[ranks.rank]) for each in (case.x, case.topk_idx, case.topk_weights))
    for expand in (False, True):
        for cpu_sync in (False, True):
            x = torch.zeros_like(mine)
            torch.cuda._sleep(SPIN)
            x.copy_(mine)
            result = buffer.dispatch(x, idx, weights, num_experts=case.num_experts, do_cpu_sync=cpu_sync, do_expand=expand)
            check_rows(want, on_host(result[:3]), expand)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = torch.zeros_like(mine)
                torch.cuda._sleep(SPIN)
                y.copy_(mine)
                ready = EventHandle()
            result = buffer.dispatch(
                y, idx, weights, num_experts=case.num_experts, do_cpu_sync=cpu_sync, do_expand=expand, previous_event=ready,
                allocate_on_comm_stream=True, async_with_compute_stream=True,
            )  # fmt: skip
            with result[4]:
                pass
            check_rows(want, on_host(result[:3]), expand)
    buffer.destroy()


@check()
def previous_event_before_epilogue(ranks):
    """Nothing of the call is done before the event is."""
    buffer, case = ranks.buffer(), ranks.case(6)
    want = reference.expected(case, ranks.rank, M, 1)
    rows, values = reference.input_of_combine(case, want, M, False, H)
    flat = send(buffer, case)
    rows = ranks.there(reference.padded(rows, flat[0].size(0)))
    send(buffer, case, do_cpu_sync=False)
    side = torch.cuda.Stream()

    def behind_an_event(call, **options):
        ranks.wait()
        with torch.cuda.stream(side):
            torch.cuda._sleep(10 * SPIN)
            blocked, event = torch.cuda.Event(), EventHandle()
            blocked.record(side)
        *result, over = call(previous_event_before_epilogue=event, async_with_compute_stream=True, **options)
        done = torch.cuda.Event()
        done.record(buffer.get_comm_stream())
        assert not done.query() or blocked.query(), "the call was done before the event it must come after"
        with over:  # waits when it is left
            pass
        return result

    for expand in (False, True):
        result = behind_an_event(functools.partial(send, buffer, case), do_cpu_sync=False, do_expand=expand)
        check_rows(want, on_host(tuple(result[:3])), expand)
    combined = behind_an_event(functools.partial(buffer.combine, rows, flat[3]))[0]
    equal(combined.cpu(), reference.combined(case, ranks.rank, (), **values), "combined")
    buffer.destroy()


def asynchronous_round(ranks, buffer, case, expand):
    """All tensors are dropped as soon as Python allows; what they lay in is filled with NaN at once."""
    want = reference.expected(case, ranks.rank, M, 1)
    returned, values = reference.input_of_combine(case, want, M, expand, H)
    inputs = [ranks.there(each[ranks.rank]) for each in (case.x, case.topk_idx, case.topk_weights)]
    torch.cuda._sleep(SPIN // 20)
    x, idx, weights = inputs
    del inputs
    rows, local, received, handle, event = buffer.dispatch(
        x, idx, weights, num_experts=case.num_experts, do_cpu_sync=False, do_expand=expand, async_with_compute_stream=True,
        do_handle_copy=not expand,
    )  # fmt: skip
    del x, idx, weights
    noise()
    event.current_stream_wait()
    copies = tuple(None if each is None else each.clone() for each in (rows, local, received))
    y = ranks.there(reference.padded(returned, rows.size(0)))
    del rows, local
    noise()
    combined, back, event = buffer.combine(y, handle, received, async_with_compute_stream=True)
    del y, handle, received
    noise()
    event.current_stream_wait()
    event = None
    result = combined.clone(), back.clone()
    del combined, back
    noise()
    check_rows(want, on_host(copies), expand)
    equal(result[0].cpu(), reference.combined(case, ranks.rank, (), **values), "combined rows")
    equal(result[1].cpu(), reference.kept_weights(case, ranks.rank), "combined weights")


@check()
def tensors_dropped_early(ranks):
    buffer = ranks.buffer()
    for round_ in range(6):
        asynchronous_round(ranks, buffer, ranks.case(20 + round_ // 2), round_ % 2 == 1)
    buffer.destroy()


@check()
def tensors_kept_by_events_instead(ranks):
    """EP_AVOID_RECORD_STREAM=1."""
    with mock.patch.dict(os.environ, EP_AVOID_RECORD_STREAM="1"):
        tensors_dropped_early(ranks)


@check()
def calls_that_must_not_make_the_host_wait(ranks):
    """PyTorch's own waits, by its debug mode; the library's, because the GPU is kept busy meanwhile."""
    buffer, case = ranks.buffer(), ranks.case(8)
    want = reference.expected(case, ranks.rank, M, 8)
    rows, values = reference.input_of_combine(case, want, M, True, H)
    x, idx, weights = (ranks.there(each[ranks.rank]) for each in (case.x, case.topk_idx, case.topk_weights))

    def calls():
        made = []
        for expand in (False, True):
            sent = buffer.dispatch(
                x, idx, weights, num_experts=case.num_experts, expert_alignment=8, do_cpu_sync=False, do_expand=expand
            )
            made.append(sent)
            made.append(buffer.dispatch(x, topk_weights=weights, handle=sent[3], do_expand=expand))
            made.append(buffer.combine(sent[0], sent[3], sent[2]))
            made.append(buffer.combine(sent[0], sent[3], async_with_compute_stream=True))
        return made

    calls()
    ranks.wait()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(40 * SPIN)
        busy = torch.cuda.Event()
        busy.record()
        made = calls()
        waited = busy.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    ranks.wait()
    assert not waited, "a call made the host wait for the GPU"
    check_rows(want, on_host(made[0][:3]), False)
    combined = buffer.combine(ranks.there(reference.padded(rows, made[4][0].size(0))), made[4][3])[0]
    equal(combined.cpu(), reference.combined(case, ranks.rank, (), **values), "combined")
    buffer.destroy()
