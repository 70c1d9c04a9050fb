"""dispatch and combine on CPU ranks, against the reference."""

import pytest
import reference
import torch
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
    assert type(handle) is tuple and len(handle) == 6
    assert [handle[0][i][rank].item() for i in range(len(expected.ends))] == expected.ends
    assert isinstance(event, deep_ep.EventOverlap)


def round_trip(group, tokens, options):
    buffer = Buffer(group, SIZE)
    case = make_case(tokens, **options)
    rank = buffer.rank
    expected = [reference.dispatched(case, r) for r in range(case.num_ranks)]
    result = send(buffer, case)
    check_received(result, expected[rank], rank)
    check_received(send(buffer, case, topk=False), expected[rank], rank, topk=False)
    handle = result[4]

    back, weights, event = buffer.combine(result[0], handle, result[2], config=CONFIG)
    wanted, wanted_weights = reference.combined(case, rank, [e.x for e in expected], [e.topk_weights for e in expected])
    equal(back, wanted, "combined_x")
    equal(weights, wanted_weights, "combined_topk_weights")
    assert event.event is None
    again, none, _ = buffer.combine(result[0].clone(), handle, config=CONFIG)
    equal(again, wanted, "combined_x of rows outside the buffer")
    assert none is None


@pytest.mark.parametrize("tokens", [[70, 1, 13], [0, 25, 0], [0, 0, 0]])
def test_round_trip(ranks, tokens):
    ranks(3).run(round_trip, tokens, {})


def test_int32_indices(ranks):
    ranks(3).run(round_trip, [20, 30, 10], {"index_dtype": torch.int32, "num_topk": 6})


def test_one_rank(ranks):
    ranks(1).run(round_trip, [33], {})


def bias(group):
    buffer = Buffer(group, SIZE)
    case = make_case([30, 12, 0], drop=0.4)
    rank = buffer.rank
    rows = [reference.dispatched(case, r).x for r in range(case.num_ranks)]
    result = send(buffer, case)
    first, second = torch.randn_like(case.x[rank]), torch.randn_like(case.x[rank])
    for given, terms in ((first, (first,)), ((first, second), (first, second)), ((None, second), (second,)),
                         ([first, None], (first,))):  # fmt: skip
        back, _, _ = buffer.combine(result[0], result[4], bias=given, config=CONFIG)
        equal(back, reference.combined(case, rank, rows, bias=terms)[0], "combined_x with bias")


def test_bias(ranks):
    ranks(3).run(bias)


def scales(group):
    buffer = Buffer(group, SIZE)
    case = make_case([30, 12, 7], hidden=128)
    rank = buffer.rank
    x8 = [x.to(torch.float8_e4m3fn) for x in case.x]
    generator = torch.Generator().manual_seed(5)
    handle = send(buffer, case)[4]
    for width in (1, 3, 8):
        for dtype in (torch.float32, torch.int32):
            values = [(torch.rand(x.size(0), width, generator=generator) * 1000).to(dtype) for x in case.x]
            padded = torch.zeros(values[rank].size(0), width + 5, dtype=dtype)[:, :width]
            padded.copy_(values[rank])
            wanted_rows = reference.dispatched(case, rank, [x.view(torch.uint8) for x in x8]).x
            wanted_scales = reference.dispatched(case, rank, values).x
            for layout in (values[rank], values[rank].t().contiguous().t(), padded, padded[:, ::1]):
                for result in (
                    send(buffer, case, (x8[rank], layout)),
                    buffer.dispatch((x8[rank], layout), handle=handle, config=CONFIG),
                ):
                    rows, row_scales = result[0]
                    assert rows.dtype == torch.float8_e4m3fn
                    equal(rows.view(torch.uint8), wanted_rows, "8-bit rows")
                    equal(row_scales, wanted_scales, "scales")
                    assert row_scales.is_contiguous()


def test_scales(ranks):
    ranks(3).run(scales)


def cached(group):
    buffer = Buffer(group, SIZE)
    case = make_case([30, 12, 7])
    rank = buffer.rank
    handle = send(buffer, case, topk=False)[4]
    other = make_case([5, 50, 9], seed=3)
    send(buffer, other)
    for dtype, hidden in ((torch.bfloat16, 64), (torch.float16, 128), (torch.int8, 16), (torch.float64, 2), (torch.int64, 32),
                          (torch.float8_e5m2, 64), (torch.float32, 4)):  # fmt: skip
        generator = torch.Generator().manual_seed(hidden)
        x = [(torch.randn(len(t), hidden, generator=generator) * 50).to(dtype) for t in case.x]
        result = buffer.dispatch(x[rank], handle=handle, config=CONFIG)
        assert result[0].dtype == dtype
        equal(result[0].view(torch.uint8), reference.dispatched(case, rank, [t.view(torch.uint8) for t in x]).x, str(dtype))
        assert result[1:5] == (None, None, None, None)


def test_cached(ranks):
    ranks(3).run(cached)


def worst(group):
    buffer = Buffer(group, SIZE)
    case = make_case([30, 12, 7])
    rank = buffer.rank
    expected = [reference.dispatched(case, r) for r in range(case.num_ranks)]
    mine = expected[rank]
    count = mine.x.size(0)
    rows, idx, weights, counts, handle, _ = send(buffer, case, num_worst_tokens=90)
    assert rows.shape == (90, 64) and idx.shape == weights.shape == (90, 3) and counts == []
    equal(rows[:count], mine.x, "rows")
    equal(idx[:count], mine.topk_idx, "indices")
    equal(weights[:count], mine.topk_weights, "weights")
    assert (idx[count:] == -1).all()
    again = buffer.dispatch(case.x[rank], handle=handle, config=CONFIG)[0]
    assert again.shape == (90, 64)
    equal(again[:count], mine.x, "cached rows")
    wanted, wanted_weights = reference.combined(case, rank, [e.x for e in expected], [e.topk_weights for e in expected])
    back, back_weights, _ = buffer.combine(rows, handle, weights, config=CONFIG)
    equal(back, wanted, "combined_x")
    equal(back_weights, wanted_weights, "weights")
    with pytest.raises(MemoryError, match="num_worst_tokens"):
        send(buffer, case, num_worst_tokens=3)
    check_received(send(buffer, case), mine, rank)


def test_worst_case(ranks):
    ranks(3).run(worst)


def indices_that_name_nobody(group):
    buffer = Buffer(group, SIZE)
    idx = torch.tensor([[0, 0, 1], [-1, -1, -1], [100, -7, 11], [12, 2**40, 3]])
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 12)
    assert per_expert.tolist() == [2, 1, 0, 1] + [0] * 7 + [1]
    assert per_rank.tolist() == [2, 0, 1]
    assert in_rank.tolist() == [[True, False, False], [False] * 3, [False, False, True], [True, False, False]]
    x = torch.ones(4, 8, dtype=torch.bfloat16)
    weights = torch.ones(4, 3)
    _, recv_idx, recv_weights, _, handle, _ = buffer.dispatch(
        x, None, per_rank, None, in_rank, per_expert, idx, weights, config=CONFIG
    )
    if buffer.rank == 2:
        assert recv_idx.tolist() == [[-1, -1, 3]] * 3 and recv_weights.tolist() == [[0, 0, 1]] * 3
    rows = torch.full((recv_idx.size(0), 8), 2.0, dtype=torch.bfloat16)
    back, back_weights, _ = buffer.combine(rows, handle, recv_weights, config=CONFIG)
    assert back[:, 0].tolist() == [2, 0, 2, 2]
    assert back_weights.tolist() == [[1, 1, 1], [0, 0, 0], [0, 0, 1], [0, 0, 1]]


def test_indices_that_name_nobody(ranks):
    ranks(3).run(indices_that_name_nobody)


def events(group):
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


def test_events(ranks):
    ranks(3).run(events)


def older_pytorch(group):
    was = deep_ep._native.use_exchange_api(False)
    try:
        round_trip(group, [9, 8, 7], {})
        scales(group)
        cached(group)
    finally:
        deep_ep._native.use_exchange_api(was)


def test_as_with_older_pytorch(ranks):
    ranks(3).run(older_pytorch)
