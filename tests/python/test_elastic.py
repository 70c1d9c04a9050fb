"""The second interface on CPU ranks, against plain PyTorch: bit for bit."""

import elastic_reference as reference
import pytest
import torch
from common import ranks_a_node
from elastic_cases import H, M, check_handle, check_rows, make_buffer, send
from reference import make_case
from test_calls import equal


def round_trip(group, tokens, options, nodes=False):
    with ranks_a_node(2 * nodes):
        buffers = {multiple: make_buffer(group, allow_multiple_reduction=multiple) for multiple in (True, False)}
    buffer = buffers[True]
    rank = buffer.rank_idx
    case = make_case(tokens, hidden=H, drop=0.2, **options)
    per_selection, per_rank = reference.selection_values(case, H), reference.rank_values(case, H)
    generator = torch.Generator().manual_seed(rank)
    first, second = (torch.randn(case.x[rank].shape, generator=generator).to(torch.bfloat16) for _ in range(2))
    for alignment, cpu_sync, most in ((1, True, M), (16, True, max(1, *tokens)), (16, False, M + 3)):
        want = reference.expected(case, rank, most, alignment)
        n, end = len(want.ids), len(want.selections)
        call = {"num_max_tokens_per_rank": most, "expert_alignment": alignment, "do_cpu_sync": cpu_sync}
        stats = torch.full((case.local_experts,), 5, dtype=torch.int32)
        flat = send(buffer, case, cumulative_local_expert_recv_stats=stats, **call)
        assert (stats - 5).tolist() == want.counts
        check_handle(case, want, flat, alignment, most, cpu_sync, False)
        check_rows(want, flat, False)
        wide = send(buffer, case, do_expand=True, do_zero_padding=alignment > 1, **call)
        check_handle(case, want, wide, alignment, most, cpu_sync, True)
        check_rows(want, wide, True, zeroed=alignment > 1)

        biases = [((None, second), (second,)), ((first, second), (first, second))]
        for bias, terms in [(None, ()), (first, (first,))] if alignment == 1 else biases:
            rows = torch.full((flat[0].size(0), H), float("nan"), dtype=torch.bfloat16)
            rows[:n] = reference.rows_of_rank(case, want, per_rank, rank, most)
            back, weights, event = buffer.combine(rows, flat[3], flat[2], bias)
            equal(back, reference.combined(case, rank, terms, per_rank=per_rank), "combined rows")
            equal(weights, torch.where(case.topk_idx[rank] >= 0, case.topk_weights[rank], 0.0), "combined weights")
            assert event.event is None
            rows = torch.full((wide[0].size(0), H), float("nan"), dtype=torch.bfloat16)
            rows[:end] = reference.rows_of_selections(want, per_selection, most)
            back, weights, _ = buffer.combine(rows, wide[3], wide[2], bias)
            equal(back, reference.combined(case, rank, terms, per_selection=per_selection), "combined expanded rows")
            equal(weights, torch.where(case.topk_idx[rank] >= 0, case.topk_weights[rank], 0.0), "combined weights of rows")
            if len(terms) != 1:
                back, none, _ = buffers[False].combine(rows, wide[3], bias=bias)
                wanted = reference.combined(case, rank, terms, per_selection=per_selection, multiple=False)
                equal(back, wanted, "combined expanded rows, rounded once")
                assert none is None
    assert (buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == ((2, 2) if nodes else (1, case.num_ranks))


@pytest.mark.parametrize("tokens", [[13], [20, 7], [9, 24, 0, 5], [0, 0]], ids=str)
def test_round_trip(ranks, tokens):
    ranks(len(tokens)).run(round_trip, tokens, {"num_topk": 4})


def test_many_selections_and_int32(ranks):
    ranks(4).run(round_trip, [6, 3, 5, 4], {"num_topk": 9, "index_dtype": torch.int32})


def test_between_nodes(ranks):
    ranks(4).run(round_trip, [9, 14, 0, 5], {"num_topk": 4}, True)


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
