"""Handles of the second interface, read and written by programs."""

import elastic_reference as reference
import torch
from elastic_cases import H, M, check_rows, make_buffer, send
from normal_mode import equal
from reference import make_case


def handle_attributes(group):
    """What engines do with a handle between dispatch and combine."""
    buffer = make_buffer(group)
    rank = buffer.rank_idx
    case = make_case([9, 14, 0, 5][: buffer.num_ranks], hidden=H, num_topk=4, drop=0.2)
    want = reference.expected(case, rank, M, 16)
    flat_rows, flat_values = reference.input_of_combine(case, want, M, False, H)
    rows, values = reference.input_of_combine(case, want, M, True, H)
    wanted, expanded = (reference.combined(case, rank, (), **each) for each in (flat_values, values))
    n = len(want.ids)
    for cpu_sync in (True, False):
        def fresh(**options):
            return send(buffer, case, expert_alignment=16, do_cpu_sync=cpu_sync, **options)[3]

        # 1. The layout is changed by hand.
        handle = fresh(do_expand=True)
        handle.do_expand = False
        equal(buffer.combine(reference.padded(flat_rows, handle.num_recv_tokens), handle)[0], wanted, "do_expand = False")
        # 2. Selections are added up by the program: row i stands for received token i.
        handle = fresh(do_expand=True)
        handle.recv_src_metadata[:, 2:] = -1
        handle.recv_src_metadata[:, 2] = torch.arange(handle.recv_src_metadata.size(0))
        for extra in (0, 5):
            more = reference.padded(flat_rows, handle.num_recv_tokens + extra)
            equal(buffer.combine(more, handle)[0], wanted, "slots written in place")
        # 3. Another tensor, or a part of it.
        handle = fresh(do_expand=True)
        handle.recv_src_metadata = handle.recv_src_metadata[:n].clone()
        equal(buffer.combine(rows, handle)[0], expanded, "metadata[:n]")
        # 4. Rows behind the received ones hold anything.
        handle = fresh(do_expand=True)
        handle.recv_src_metadata[n:] = -(2**30) if cpu_sync else 2**30
        equal(buffer.combine(rows, handle)[0], expanded, "anything behind")
        check_rows(want, buffer.dispatch(case.x[rank], handle=handle, do_expand=True), True, with_weights=False)
        # 5. Everything from a dispatch that was made again.
        for expand in (False, True):
            handle, again = fresh(do_expand=expand), fresh(do_expand=expand)
            for name, value in vars(handle).items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(value[:n], getattr(again, name)[:n]), f"{name} differs from call to call"
                    setattr(handle, name, getattr(again, name))
            del again
            if expand:
                equal(buffer.combine(reference.padded(rows, handle.num_expanded_tokens), handle)[0], expanded, "again")
            else:
                equal(buffer.combine(reference.padded(flat_rows, handle.num_recv_tokens), handle)[0], wanted, "again")
            check_rows(want, buffer.dispatch(case.x[rank], handle=handle, do_expand=expand), expand, with_weights=False)
    copied = send(buffer, case)[3]
    kept = send(buffer, case, do_handle_copy=False)[3]
    assert kept.topk_idx is case.topk_idx[rank] and copied.topk_idx is not case.topk_idx[rank]
    assert torch.equal(copied.topk_idx, kept.topk_idx)


def test_handle_attributes(ranks):
    ranks(2).run(handle_attributes)
    ranks(4).run(handle_attributes)
