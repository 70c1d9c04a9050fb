"""Handles of the second interface: read and written by programs, and as gradients."""

import elastic_reference as reference
import torch
from elastic_cases import H, M, check_rows, make_buffer, send, spread_weights
from reference import make_case
from test_calls import equal


def handle_attributes(group):
    """What engines do with a handle between dispatch and combine."""
    buffer = make_buffer(group)
    rank = buffer.rank_idx
    case = make_case([9, 14, 0, 5][: buffer.num_ranks], hidden=H, num_topk=4, drop=0.2)
    want = reference.expected(case, rank, M, 16)
    per_selection, per_rank = reference.selection_values(case, H), reference.rank_values(case, H)
    flat_rows = reference.rows_of_rank(case, want, per_rank, rank, M)
    n = len(want.ids)
    for cpu_sync in (True, False):
        def fresh(**options):
            return send(buffer, case, expert_alignment=16, do_cpu_sync=cpu_sync, **options)[3]

        def padded(rows, size):
            result = torch.full((size, H), float("nan"), dtype=torch.bfloat16)
            result[: rows.size(0)] = rows
            return result

        wanted = reference.combined(case, rank, (), per_rank=per_rank)
        # 1. The layout is changed by hand.
        handle = fresh(do_expand=True)
        handle.do_expand = False
        equal(buffer.combine(padded(flat_rows, handle.num_recv_tokens), handle)[0], wanted, "do_expand = False")
        # 2. Selections are added up by the program: row i stands for received token i.
        handle = fresh(do_expand=True)
        handle.recv_src_metadata[:, 2:] = -1
        handle.recv_src_metadata[:, 2] = torch.arange(handle.recv_src_metadata.size(0))
        for extra in (0, 5):
            rows = padded(flat_rows, handle.num_recv_tokens + extra)
            equal(buffer.combine(rows, handle)[0], wanted, "slots written in place")
        # 3. Another tensor, or a part of it.
        handle = fresh(do_expand=True)
        handle.recv_src_metadata = handle.recv_src_metadata[:n].clone()
        rows = reference.rows_of_selections(want, per_selection, M)
        equal(buffer.combine(rows, handle)[0], reference.combined(case, rank, (), per_selection=per_selection), "metadata[:n]")
        # 4. Everything from a dispatch that was made again.
        for expand in (False, True):
            handle, again = fresh(do_expand=expand), fresh(do_expand=expand)
            for name, value in vars(handle).items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(value[:n], getattr(again, name)[:n]), f"{name} differs from call to call"
                    setattr(handle, name, getattr(again, name))
            del again
            if expand:
                rows = padded(reference.rows_of_selections(want, per_selection, M), handle.num_expanded_tokens)
                equal(buffer.combine(rows, handle)[0], reference.combined(case, rank, (), per_selection=per_selection), "again")
            else:
                equal(buffer.combine(padded(flat_rows, handle.num_recv_tokens), handle)[0], wanted, "again")
            check_rows(want, buffer.dispatch(case.x[rank], handle=handle, do_expand=expand), expand, with_weights=False)
    copied = send(buffer, case)[3]
    kept = send(buffer, case, do_handle_copy=False)[3]
    assert kept.topk_idx is case.topk_idx[rank] and copied.topk_idx is not case.topk_idx[rank]
    assert torch.equal(copied.topk_idx, kept.topk_idx)


def test_handle_attributes(ranks):
    ranks(2).run(handle_attributes)
    ranks(4).run(handle_attributes)


def tail_of_anything(group):
    """Rows of the metadata behind the received ones hold anything, and x has a row for each received one only."""
    buffers = {multiple: make_buffer(group, allow_multiple_reduction=multiple) for multiple in (True, False)}
    case = make_case([9, 14], hidden=H, num_topk=4, drop=0.2)
    per_selection = reference.selection_values(case, H)
    for multiple, buffer in buffers.items():
        rank = buffer.rank_idx
        want = reference.expected(case, rank, M, 1)
        handle = send(buffer, case, do_cpu_sync=False, do_expand=True)[3]
        for tail in (2**30, -(2**30)):
            handle.recv_src_metadata[len(want.ids) :] = tail
            weights = spread_weights(want, want.weights) if multiple else None
            x = reference.rows_of_selections(want, per_selection, M)
            back, back_weights, _ = buffer.combine(x, handle, weights)
            equal(back, reference.combined(case, rank, (), per_selection=per_selection, multiple=multiple), "combined rows")
            if multiple:
                equal(back_weights, torch.where(case.topk_idx[rank] >= 0, case.topk_weights[rank], 0.0), "weights")
            again = buffer.dispatch(case.x[rank], handle=handle, do_expand=True, do_zero_padding=True)
            check_rows(want, again, True, zeroed=True, with_weights=False)


def test_tail_of_anything(ranks):
    ranks(2).run(tail_of_anything)


def backward(group):
    """Training as Megatron and NeMo do it: gradients go the other way, by combine and by cached dispatch."""
    buffer = make_buffer(group)
    rank = buffer.rank_idx
    case = make_case([9, 14], hidden=H, num_topk=4, drop=0.2)
    want = reference.expected(case, rank, M, 1)
    options = {"async_with_compute_stream": True, "allocate_on_comm_stream": True, "previous_event": buffer.capture()}
    x = case.x[rank].clone().requires_grad_()
    rows, local, weights, handle, event = send(buffer, case, x, **options)
    assert event.event is not None
    event.current_stream_wait()
    check_rows(want, (rows, local, weights), False)
    # Gradient of dispatch: combine, with the gradients of the weights.
    grad, grad_weights, event = buffer.combine(rows, handle, weights * 2, num_sms=handle.num_sms, **options)
    with event(release_handle=True):
        pass
    assert event.event is None
    copies = torch.tensor([len({e // case.local_experts for e in row if e >= 0}) for row in case.topk_idx[rank].tolist()])
    assert torch.allclose(grad.float(), case.x[rank].float() * copies.unsqueeze(1), rtol=0.02)
    equal(grad_weights, torch.where(case.topk_idx[rank] >= 0, case.topk_weights[rank] * 2, 0.0), "gradients of weights")
    # Gradient of combine: a cached dispatch.
    again, _, _, same, _ = buffer.dispatch(case.x[rank], handle=handle, num_sms=handle.num_sms, do_cpu_sync=False)
    assert same is handle
    equal(again, rows, "cached rows")


def test_backward(ranks):
    ranks(2).run(backward)
