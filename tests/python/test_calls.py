"""dispatch and combine on CPU ranks, against the reference."""

import pytest
import reference
import torch
from cluster import on_ranks
from reference import make_case

import deep_ep
from deep_ep import Buffer, Config

CONFIG = Config(4)
SIZE = 1 << 24


def equal(actual, expected, what):
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape}, expected {expected.shape}"
    assert torch.equal(actual, expected), f"{what}: {actual}, expected {expected}"


def send(buffer, case, x=None, topk=True, **options):
    rank = buffer.rank
    per_rank, none, per_expert, in_rank, event = buffer.get_dispatch_layout(case.topk_idx[rank], case.num_experts)
    assert none is None and event.event is None
    expected = reference.layout(case, rank)
    for actual, wanted, what in zip((per_rank, per_expert, in_rank), expected, ("per rank", "per expert", "in rank")):
        equal(actual, wanted, f"layout, {what}")
    if topk:
        options.update(topk_idx=case.topk_idx[rank], topk_weights=case.topk_weights[rank])
    return buffer.dispatch(
        case.x[rank] if x is None else x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        config=CONFIG,
        **options,
    )


def check_received(result, expected, rank, topk=True):
    recv_x, recv_idx, recv_weights, counts, handle, event = result
    equal(recv_x, expected.x, "recv_x")
    assert recv_x.is_contiguous()
    if topk:
        equal(recv_idx, expected.topk_idx, "recv_topk_idx")
        equal(recv_weights, expected.topk_weights, "recv_topk_weights")
    else:
        assert recv_idx is None and recv_weights is None
    assert counts == expected.counts and all(type(count) is int for count in counts)
    assert type(handle) is tuple and len(handle) == 7
    assert [handle[0][i][rank].item() for i in range(len(expected.ends))] == expected.ends
    assert isinstance(event, deep_ep.EventOverlap)


def check_round_trip(buffer, case):
    rank = buffer.rank
    expected = [reference.dispatched(case, r) for r in range(case.num_ranks)]
    result = send(buffer, case)
    check_received(result, expected[rank], rank)
    handle = result[4]
    back, weights, event = buffer.combine(result[0], handle, result[2], config=CONFIG)
    wanted, wanted_weights = reference.combined(case, rank, [e.x for e in expected], [e.topk_weights for e in expected])
    equal(back, wanted, "combined_x")
    equal(weights, wanted_weights, "combined_topk_weights")
    assert event.event is None
    again, none, _ = buffer.combine(result[0].clone(), handle, config=CONFIG)
    equal(again, wanted, "combined_x of rows outside the buffer")
    assert none is None
    return buffer


def round_trip(group, tokens, options):
    case = make_case(tokens, **options)
    buffer = check_round_trip(Buffer(group, SIZE), case)
    rank = buffer.rank
    check_received(send(buffer, case, topk=False), reference.dispatched(case, rank), rank, topk=False)


@pytest.mark.parametrize(
    "tokens, options",
    [([70, 1, 13], {}), ([0, 0, 0], {}), ([20, 30, 10], {"index_dtype": torch.int32, "num_topk": 6}), ([33], {})],
)
def test_round_trip(ranks, tokens, options):
    ranks(len(tokens)).run(round_trip, tokens, options)


@on_ranks(3)
def test_bias(group):
    buffer = Buffer(group, SIZE)
    case = make_case([30, 12, 0], drop=0.4)
    rank = buffer.rank
    rows = [reference.dispatched(case, r).x for r in range(case.num_ranks)]
    result = send(buffer, case)
    first, second = torch.randn_like(case.x[rank]), torch.randn_like(case.x[rank])
    for given, terms in ((first, (first,)), ((first, second), (first, second)), ([None, second], (second,))):
        back, _, _ = buffer.combine(result[0], result[4], bias=given, config=CONFIG)
        equal(back, reference.combined(case, rank, rows, bias=terms)[0], "combined_x with bias")


def scales(group):
    """However they lie in memory; packed ones, too. Counts are aligned."""
    buffer = Buffer(group, SIZE)
    case = make_case([30, 12, 7], hidden=512)
    rank = buffer.rank
    x8 = [x.to(torch.float8_e4m3fn) for x in case.x]
    wanted = reference.dispatched(case, rank, [x.view(torch.uint8) for x in x8])
    handle = send(buffer, case)[4]
    for dtype in (torch.float32, torch.int32):
        values = [(torch.arange(len(x) * 4).view(-1, 4) * (7 + s)).to(dtype) for s, x in enumerate(case.x)]
        padded = torch.zeros(values[rank].size(0), 9, dtype=dtype)[:, :4]
        padded.copy_(values[rank])
        for layout in (values[rank], values[rank].t().contiguous().t(), padded):
            fresh = send(buffer, case, (x8[rank], layout), expert_alignment=128)
            assert fresh[3] == [-(-count // 128) * 128 for count in wanted.counts]
            for rows, row_scales in (fresh[0], buffer.dispatch((x8[rank], layout), handle=handle, config=CONFIG)[0]):
                assert rows.dtype == torch.float8_e4m3fn and row_scales.is_contiguous()
                equal(rows.view(torch.uint8), wanted.x, "8-bit rows")
                equal(row_scales, reference.dispatched(case, rank, values).x, "scales")


def test_scales(ranks):
    ranks(3).run(scales)


@on_ranks(3)
def test_events(group):
    buffer = Buffer(group, SIZE)
    case = make_case([30, 12, 7])
    mine = reference.dispatched(case, buffer.rank)
    for previous in (None, buffer.capture(), deep_ep.EventOverlap(), deep_ep.utils.EventHandle()):
        result = send(buffer, case, previous_event=previous, async_finish=True)
        assert result[5].event is not None
        with result[5]:
            pass
        result[5].current_stream_wait()
        check_received(result, mine, buffer.rank)
    for previous in (buffer.capture(), buffer.capture().event):
        result = send(buffer, case, previous_event=previous, async_finish=True, allocate_on_comm_stream=True)
        check_received(result, mine, buffer.rank)
    for wrong in ({"async_finish": True}, {"previous_event": buffer.capture()}):
        with pytest.raises(ValueError, match="allocate_on_comm_stream"):
            send(buffer, case, allocate_on_comm_stream=True, **wrong)


@on_ranks(3)
def test_as_with_older_pytorch(group):
    was = deep_ep._native.use_exchange_api(False)
    try:
        round_trip(group, [9, 8, 7], {})
        scales(group)
    finally:
        deep_ep._native.use_exchange_api(was)
