"""Low-latency dispatch and combine on CPU ranks, against the reference."""

import low_latency_reference as reference
import pytest
import torch
from low_latency_calls import M, combine, dispatch, ll_case, make_buffer, outputs_of

import deep_ep


def round_trip(group, tokens, options):
    buffer = make_buffer(group)
    rank = buffer.rank
    for seed, form in enumerate(({"use_fp8": False}, {}, {"round_scale": True}, {"round_scale": True, "use_ue8m0": True})):
        case = ll_case(tokens, seed=seed, **options)
        form = {"use_fp8": True, **form}
        result = dispatch(buffer, case, **form)
        reference.check_dispatched(case, rank, M, result, **form)
        assert isinstance(result[3], deep_ep.EventOverlap) and result[3].event is None and result[4] is None
        outputs = outputs_of(case)
        back, event, hook = combine(buffer, case, outputs[rank], result[2])
        reference.close(back, reference.combined(case, rank, outputs))
        assert event.event is None and hook is None
        again, _, _ = combine(buffer, case, outputs[rank], result[2])
        assert torch.equal(back, again), "a second combine gives other bits"


@pytest.mark.parametrize("tokens", [[M, 1, 3], [0, 4, 0], [0, 0, 0]])
def test_round_trip(ranks, tokens):
    ranks(3).run(round_trip, tokens, {})


@pytest.mark.parametrize("options", [{"index_dtype": torch.int32, "num_topk": 5}, {"num_topk": 1}, {"drop": 1.0}])
def test_selections(ranks, options):
    ranks(3).run(round_trip, [M, 2, 4], options)


def test_one_rank(ranks):
    ranks(1).run(round_trip, [5], {})


def masking(group):
    """A rank masked by hand is left out of everything, and comes back."""
    buffer = make_buffer(group, enable_shrink=True)
    rank, ranks = buffer.rank, buffer.group_size
    gone = ranks - 1
    case = ll_case([M] * ranks)
    outputs = outputs_of(case)
    status = torch.empty(ranks, dtype=torch.int32)

    def masks():
        buffer.low_latency_query_mask_buffer(status)
        return status.tolist()

    handle = dispatch(buffer, case)[2]
    buffer.low_latency_update_mask_buffer(gone, True)
    assert masks() == [0] * gone + [1]
    buffer.low_latency_update_mask_buffer(gone)
    assert masks() == [0] * ranks, "by default it unmasks"
    if rank != gone:
        buffer.low_latency_update_mask_buffer(gone, True)
        back, _, _ = combine(buffer, case, outputs[rank], handle)
        reference.close(back, reference.combined(case, rank, outputs, without=[gone]))
        result = dispatch(buffer, case, use_fp8=False)
        reference.check_dispatched(case, rank, M, result, without=[gone])
        buffer.clean_low_latency_buffer(M, 512, case.num_experts)
        assert masks() == [0] * gone + [1]
        buffer.low_latency_clean_mask_buffer()
        assert masks() == [0] * ranks
        buffer.low_latency_update_mask_buffer(gone, True)
    buffer.low_latency_resume()
    assert masks() == [0] * ranks
    result = dispatch(buffer, case, use_fp8=False)
    reference.check_dispatched(case, rank, M, result)
    reference.close(combine(buffer, case, outputs[rank], result[2])[0], reference.combined(case, rank, outputs))
    for wrong in (torch.empty(ranks + 1, dtype=torch.int32), torch.empty(ranks, dtype=torch.int64)):
        with pytest.raises(ValueError):
            buffer.low_latency_query_mask_buffer(wrong)
    for wrong in (-1, ranks):
        with pytest.raises(ValueError, match="rank"):
            buffer.low_latency_update_mask_buffer(wrong, True)


def test_masking(ranks):
    ranks(3).run(masking)
