"""The second interface without a host wait: there is room for all that may come. And ranks that differ in their weights."""

import dataclasses
import random

import elastic_reference as reference
import pytest
import torch
from elastic_cases import H, M, check_handle, check_rows, make_buffer, send
from reference import make_case
from test_calls import equal
from test_errors import Alone

from deep_ep import peers
from deep_ep.errors import RankMismatch


@pytest.mark.parametrize("multiple", [True, False])
def test_experts_named_several_times(multiple):
    buffer = make_buffer(Alone, allow_multiple_reduction=multiple)
    for seed in range(12):
        choose = random.Random(seed)
        local, topk, alignment = choose.choice((1, 2, 3, 5)), choose.choice((2, 4, 6)), choose.choice((1, 4, 16))
        case = make_case([choose.choice((1, 9, M))], H, topk, max(local, topk), seed, torch.int64, 0.2)
        case.topk_idx[0].remainder_(local + 1).sub_(1)  # -1 for some, and the others often twice
        case = dataclasses.replace(case, num_experts=local)
        want = reference.expected(case, 0, M, alignment)
        result = send(buffer, case, do_expand=True, do_zero_padding=True, do_cpu_sync=False, expert_alignment=alignment)
        check_handle(case, want, result, alignment, M, False, True)
        check_rows(want, result, True, zeroed=True)
        handle = result[3]
        assert handle.psum_num_recv_tokens_per_expert.max() <= result[0].size(0)
        assert handle.recv_src_metadata[:, 2:].max() < result[0].size(0)
        cached = buffer.dispatch(case.x[0], topk_weights=case.topk_weights[0], handle=handle, do_expand=True, do_zero_padding=True)
        check_rows(want, cached, True, zeroed=True)
        values = reference.selection_values(case, H)
        y = torch.full((result[0].size(0), H), float("nan"), dtype=torch.bfloat16)
        filled = reference.rows_of_selections(want, values, M)
        y[: filled.size(0)] = filled
        combined, _, _ = buffer.combine(y, handle)
        equal(combined, reference.combined(case, 0, [], per_selection=values, multiple=multiple), "combined rows")


def weights_of_some(group):
    buffer = make_buffer(group)
    rank, ranks = buffer.rank_idx, buffer.num_ranks
    case = make_case([6] * ranks, hidden=H, num_topk=4)
    for odd in range(ranks):
        for cpu_sync in (True, False):
            with pytest.raises(RankMismatch, match=rf"topk_weights is (not )?given on rank {rank} but (not )?given on rank"):
                send(buffer, case, topk_weights=None if rank == odd else case.topk_weights[rank], do_cpu_sync=cpu_sync)
                buffer.barrier()  # without a host wait the next call says it
            result = send(buffer, case, topk_weights=None if cpu_sync else case.topk_weights[rank])
            check_rows(reference.expected(case, rank, M, 1), result, False, with_weights=not cpu_sync)


def test_weights_of_some_ranks(ranks):
    ranks(2).run(weights_of_some)


def test_memory_inside_a_node_is_the_window(monkeypatch):
    asked = []
    heap_bytes = peers._heap_bytes
    monkeypatch.setattr(peers, "_heap_bytes", lambda of, memory: asked.append(memory) or heap_bytes(of, memory))
    buffer = make_buffer(Alone, num_bytes=256 << 20)
    inside, between = asked
    assert inside <= (128 << 20) + (2 << 20) and between == 2 * buffer.num_bytes
    case = make_case([M], hidden=H, num_topk=4)
    check_rows(reference.expected(case, 0, M, 1), send(buffer, case), False)
