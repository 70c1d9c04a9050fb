"""Checks of streams and events: who waits for what, and what stays alive until then."""

import os

import elastic_reference as reference
import torch
from elastic_cases import check_rows
from elastic_check_parts import H, M, SPIN, check, expanded_rows, flat_rows, kept_weights, noise, on_host
from test_calls import equal

from deep_ep import EventHandle


@check()
def event_combinations(ranks):
    buffer, case = ranks.buffer(), ranks.case(5)
    for previous, asynchronous, allocate in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 1), (1, 1, 1)):
        options = {"async_with_compute_stream": asynchronous, "allocate_on_comm_stream": allocate}
        for expand in (False, True):
            x = ranks.there(case.x[ranks.rank])
            event = buffer.capture() if previous else None
            result = ranks.send(buffer, case, x, previous_event=event, do_expand=expand, **options)
            assert (result[4].event is not None) == bool(asynchronous)
            with result[4]:
                check_rows_later = result
            check_rows(reference.expected(case, ranks.rank, M, 1), on_host(check_rows_later[:3]), expand)
    buffer.destroy()


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
    values = reference.rank_values(case, H)
    ranks.send(buffer, case, do_cpu_sync=False)
    side = torch.cuda.Stream()
    for expand in (False, True):
        ranks.wait()
        with torch.cuda.stream(side):
            torch.cuda._sleep(10 * SPIN)
            blocked, event = torch.cuda.Event(), EventHandle()
            blocked.record(side)
        options = {"previous_event_before_epilogue": event, "async_with_compute_stream": True}
        result = ranks.send(buffer, case, do_cpu_sync=False, do_expand=expand, **options)
        done = torch.cuda.Event()
        done.record(buffer.get_comm_stream())
        assert not done.query() or blocked.query(), "the call was done before the event it must come after"
        with result[4]:
            pass
        check_rows(want, on_host(result[:3]), expand)
    flat = ranks.send(buffer, case)
    rows = ranks.there(flat_rows(case, want, flat[0].size(0), values, ranks.rank))
    ranks.wait()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10 * SPIN)
        blocked, event = torch.cuda.Event(), EventHandle()
        blocked.record(side)
    combined, _, over = buffer.combine(
        rows, flat[3], previous_event_before_epilogue=event, async_with_compute_stream=True
    )
    done = torch.cuda.Event()
    done.record(buffer.get_comm_stream())
    assert not done.query() or blocked.query(), "combine was done before the event it must come after"
    with over:  # waits when it is left
        pass
    equal(combined.cpu(), reference.combined(case, ranks.rank, (), per_rank=values), "combined")
    buffer.destroy()


def asynchronous_round(ranks, buffer, case, want, values, expand):
    """All tensors are dropped as soon as Python allows; what they lay in is filled with NaN at once."""
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
    fill = expanded_rows if expand else (lambda *given: flat_rows(*given, ranks.rank))
    y = ranks.there(fill(case, want, rows.size(0), values))
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
    kind = {"per_selection" if expand else "per_rank": values}
    equal(result[0].cpu(), reference.combined(case, ranks.rank, (), **kind), "combined rows")
    equal(result[1].cpu(), kept_weights(case, ranks.rank), "combined weights")


@check()
def tensors_dropped_early(ranks):
    buffer = ranks.buffer()
    for round_ in range(6):
        case = ranks.case(20 + round_ // 2)
        want, expand = reference.expected(case, ranks.rank, M, 1), round_ % 2 == 1
        values = (reference.selection_values if expand else reference.rank_values)(case, H)
        asynchronous_round(ranks, buffer, case, want, values, expand)
    buffer.destroy()


@check()
def tensors_kept_by_events_instead(ranks):
    """EP_AVOID_RECORD_STREAM=1."""
    os.environ["EP_AVOID_RECORD_STREAM"] = "1"
    try:
        tensors_dropped_early(ranks)
    finally:
        del os.environ["EP_AVOID_RECORD_STREAM"]


@check()
def results_used_on_another_stream(ranks):
    """With ``record_stream``, as for any tensor of PyTorch: the stream still works when the tensor is gone."""
    buffer = ranks.buffer()
    side = torch.cuda.Stream()
    for round_ in range(6):
        case = ranks.case(30 + round_)
        want, expand = reference.expected(case, ranks.rank, M, 1), round_ % 2 == 1
        rows, local, weights, handle, _ = ranks.send(buffer, case, do_expand=expand, do_cpu_sync=round_ < 3)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(SPIN)
            used = rows.clone(), None if local is None else local.clone(), weights.clone()
        for each in (rows, local, weights):
            if each is not None:
                each.record_stream(side)
        del rows, local, weights, handle, each
        other = ranks.case(40 + round_)
        for _ in range(3):  # on the first stream, which may have the memory again as soon as it is free
            ranks.send(buffer, other, do_expand=expand)
            noise()
        side.synchronize()
        check_rows(want, on_host(used), expand)
    buffer.destroy()


@check()
def calls_that_must_not_make_the_host_wait(ranks):
    """PyTorch's own waits, by its debug mode; the library's, because the GPU is kept busy meanwhile."""
    buffer, case = ranks.buffer(), ranks.case(8)
    want, values = reference.expected(case, ranks.rank, M, 8), reference.selection_values(case, H)
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
    rows = ranks.there(expanded_rows(case, want, made[4][0].size(0), values))
    equal(buffer.combine(rows, made[4][3])[0].cpu(), reference.combined(case, ranks.rank, (), per_selection=values), "combined")
    buffer.destroy()
