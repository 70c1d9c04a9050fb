"""Low-latency dispatch and combine on CPU ranks, against the reference."""

import gc
import os

import low_latency_reference as reference
import pytest
import torch
import torch.distributed as dist
from reference import make_case

import deep_ep
from deep_ep import Buffer

M = 6


def make_buffer(group, hidden=512, max_tokens=M, experts=12, **options):
    size = Buffer.get_low_latency_rdma_size_hint(max_tokens, hidden, group.size(), experts)
    return Buffer(group, 0, size, low_latency_mode=True, num_qps_per_rank=4, **options)


def ll_case(tokens, hidden=512, **options):
    return make_case(tokens, hidden=hidden, **options)


def dispatch(buffer, case, max_tokens=M, **options):
    rank = buffer.rank
    return buffer.low_latency_dispatch(case.x[rank], case.topk_idx[rank], max_tokens, case.num_experts, **options)


def combine(buffer, case, output, handle, **options):
    rank = buffer.rank
    return buffer.low_latency_combine(output, case.topk_idx[rank], case.topk_weights[rank], handle, **options)


def outputs_of(case, max_tokens=M, hidden=512, seed=0):
    return [reference.expert_output(case, rank, max_tokens, hidden, seed) for rank in range(case.num_ranks)]


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


@pytest.mark.parametrize("tokens", [[M, M, M], [M, 1, 3], [0, 4, 0], [0, 0, 0]])
def test_round_trip(ranks, tokens):
    ranks(3).run(round_trip, tokens, {})


@pytest.mark.parametrize("options", [{"index_dtype": torch.int32, "num_topk": 5}, {"num_topk": 1}, {"drop": 1.0}])
def test_selections(ranks, options):
    ranks(3).run(round_trip, [M, 2, 4], options)


def without_nvlink(group):
    """The same bits, whether NVLink is used or forbidden."""
    case = ll_case([M, 1, 3])
    outputs = outputs_of(case)
    received = []
    for allowed in (True, False):
        buffer = make_buffer(group, allow_nvlink_for_low_latency_mode=allowed)
        result = dispatch(buffer, case, return_recv_hook=True)
        result[4]()
        reference.check_dispatched(case, buffer.rank, M, result, use_fp8=True)
        back, _, _ = combine(buffer, case, outputs[buffer.rank], result[2])
        received.append(back)
        buffer.clean_low_latency_buffer(M, 512, case.num_experts)
    assert torch.equal(*received), "other bits without NVLink"


def test_without_nvlink(ranks):
    ranks(3).run(without_nvlink)


def test_one_rank(ranks):
    ranks(1).run(round_trip, [5], {})


def duplicates(group):
    """A token that names an expert twice reaches it twice and is weighted twice."""
    buffer = make_buffer(group)
    rank = buffer.rank
    case = ll_case([M] * buffer.group_size)
    for idx in case.topk_idx:
        idx[:, 1] = idx[:, 0]
        idx[2] = -1
    result = dispatch(buffer, case, use_fp8=False)
    reference.check_dispatched(case, rank, M, result)
    outputs = outputs_of(case)
    back, _, _ = combine(buffer, case, outputs[rank], result[2])
    reference.close(back, reference.combined(case, rank, outputs))
    assert (back[2] == 0).all(), "a token without selections gives zeros"


def test_duplicates(ranks):
    ranks(3).run(duplicates)


def special_values(group):
    """Blocks of zeros, exact powers of two, block maxima of 448 times the scale."""
    buffer = make_buffer(group)
    case = ll_case([M] * buffer.group_size, drop=0)
    for x in case.x:
        x[0] = 0
        x[1, :128] = 448.0
        x[1, 128:256] = 2.0**-20
        x[2] = torch.pow(2.0, torch.arange(512) % 16 - 8).to(torch.bfloat16)
        x[3, ::2] = -x[3, ::2].abs() * 1000
    for form in ({}, {"round_scale": True}, {"round_scale": True, "use_ue8m0": True}):
        reference.check_dispatched(case, buffer.rank, M, dispatch(buffer, case, **form), use_fp8=True, **form)


def test_special_values(ranks):
    ranks(2).run(special_values)


def statistics(group):
    buffer = make_buffer(group)
    ranks = buffer.group_size
    stats = torch.zeros(4, dtype=torch.int32)
    waits = [torch.zeros(ranks, dtype=torch.int64) for _ in range(2)]
    case = ll_case([M] * ranks)
    outputs = outputs_of(case)
    for repetition in range(3):
        result = dispatch(
            buffer, case, cumulative_local_expert_recv_stats=stats, dispatch_wait_recv_cost_stats=waits[0]
        )
        assert torch.equal(stats, result[1] * (repetition + 1)), "counts are added to the statistics"
        combine(buffer, case, outputs[buffer.rank], result[2], combine_wait_recv_cost_stats=waits[1])
    assert all((wait >= 0).all() for wait in waits)
    for wrong in (torch.zeros(ranks, ranks, dtype=torch.int64), torch.zeros(ranks, dtype=torch.int32)):
        with pytest.raises(ValueError, match="wait_recv_cost_stats"):
            dispatch(buffer, case, dispatch_wait_recv_cost_stats=wrong)


def test_statistics(ranks):
    ranks(3).run(statistics)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def check_rows(case, buffer, count, handle, values):
    """What ``values`` [L, R * M, H] float32 says is near what was sent, by the largest channel of each token."""
    local = case.num_experts // buffer.group_size
    for expert in range(local):
        for source in range(buffer.group_size):
            bounds = int(handle[1][expert, source])
            for row in range(bounds >> 32, (bounds >> 32) + (bounds & 0xFFFFFFFF)):
                sent = case.x[source][int(handle[0][expert, row])].float()
                assert (values[expert, row] - sent).abs().max() <= sent.abs().max() * 0.2
    assert int(count.sum()) > 0


def nvfp4(group):
    buffer = make_buffer(group)
    case = ll_case([M] * buffer.group_size)
    for scale in (None, torch.tensor([20.0])):
        (rows, scales), count, handle, _, _ = dispatch(buffer, case, use_nvfp4=True, x_global_scale=scale)
        local, height, half = rows.shape
        assert rows.dtype == scales.dtype == torch.uint8
        assert scales.shape == (32, 4, (height + 127) // 128, 4, half // 32, local)
        codes = torch.stack((rows & 15, rows >> 4), dim=-1).reshape(local, height, 2 * half)
        r, c = torch.arange(height)[:, None], torch.arange(half // 8)[None, :]
        eight_bits = scales[r % 32, r // 32 % 4, r // 128, c % 4, c // 4].permute(2, 0, 1).contiguous()
        factors = eight_bits.view(torch.float8_e4m3fn).float() / (1 if scale is None else scale)
        check_rows(case, buffer, count, handle, E2M1[codes.long()] * factors.repeat_interleave(16, dim=-1))
    for error, options in (
        ("x_global_scale", {"x_global_scale": torch.ones(1)}),
        ("x_global_scale", {"use_nvfp4": True, "x_global_scale": torch.ones(2)}),
        ("use_nvfp4", {"use_nvfp4": True, "round_scale": True}),
        ("scale_per_token", {"use_fp8": False, "scale_per_token": True}),
    ):
        with pytest.raises(ValueError, match=error):
            dispatch(buffer, case, **options)


def test_nvfp4(ranks):
    ranks(2).run(nvfp4)


def scale_per_token(group):
    buffer = make_buffer(group)
    case = ll_case([M] * buffer.group_size)
    (rows, scales), count, handle, _, _ = dispatch(buffer, case, scale_per_token=True)
    assert rows.dtype == torch.float8_e4m3fn and scales.shape == (*rows.shape[:2], 1)
    check_rows(case, buffer, count, handle, rows.float() * scales)


def test_scale_per_token(ranks):
    ranks(2).run(scale_per_token)


def arrival_counters(group):
    """On the CPU a call has received when it returns; tests in C++ look while it still receives."""
    buffer = make_buffer(group)
    ranks = buffer.group_size
    case = ll_case([M] * ranks)
    for rows in (0, 4):
        words = torch.zeros(4, 1 if rows == 0 else (ranks * M + rows - 1) // rows, dtype=torch.int64)
        for call in range(1, 4):
            result = dispatch(
                buffer, case, arrival_counters=words, arrival_rows=rows, async_finish=call == 2, return_recv_hook=call == 3
            )
            if result[4] is not None:
                result[4]()
            if call == 2:
                result[3].current_stream_wait()
            assert (words == call << 24).all(), words
    with pytest.raises(ValueError, match="arrival_counters"):
        dispatch(buffer, case, arrival_counters=torch.zeros(4, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="arrival_rows is 3"):
        dispatch(buffer, case, arrival_counters=torch.zeros(4, 2, dtype=torch.int64), arrival_rows=3)


def test_arrival_counters(ranks):
    ranks(2).run(arrival_counters)


def endings(group):
    """Events and hooks; what they need is kept for them."""
    buffer = make_buffer(group)
    rank = buffer.rank
    case = ll_case([M] * buffer.group_size)
    outputs = outputs_of(case)
    wanted = reference.combined(case, rank, outputs)

    rows, count, handle, event, hook = dispatch(buffer, case, use_fp8=False, async_finish=True)
    assert hook is None
    event.current_stream_wait()
    reference.check_dispatched(case, rank, M, (rows, count, handle, event, hook))
    back, event, hook = combine(buffer, case, outputs[rank], handle, async_finish=True)
    del handle
    event.current_stream_wait()
    assert hook is None
    reference.close(back, wanted)
    assert any(tensor is back for tensor in event.extra_tensors)
    del event

    out = torch.empty_like(back)
    x, idx = case.x[rank].clone(), case.topk_idx[rank].clone()
    rows, count, handle, event, hook = buffer.low_latency_dispatch(
        x, idx, M, case.num_experts, use_fp8=False, return_recv_hook=True
    )
    assert event.event is None
    x.fill_(7)  # may be overwritten once the send part has run
    del rows, count, x, idx
    gc.collect()
    hook()
    idx, weights = case.topk_idx[rank].clone(), case.topk_weights[rank].clone()
    back, _, hook = buffer.low_latency_combine(
        outputs[rank], idx, weights, handle, return_recv_hook=True, out=out
    )
    assert back is out
    del idx, weights, handle, back
    gc.collect()
    hook()
    hook()  # a second time does nothing
    reference.close(out, wanted)
    with pytest.raises(ValueError, match="async_finish"):
        dispatch(buffer, case, async_finish=True, return_recv_hook=True)


def test_endings(ranks):
    ranks(3).run(endings)


def overlapping(group):
    """Two of a kind under way, hooks late and out of order, results that nobody uses."""
    buffer = make_buffer(group)
    rank = buffer.rank
    cases = [ll_case([M] * buffer.group_size, seed=seed) for seed in range(2)]
    outputs = [outputs_of(case, seed=seed) for seed, case in enumerate(cases)]
    wanted = [reference.combined(case, rank, output) for case, output in zip(cases, outputs)]
    for first_hook in (0, 1):
        sent = [dispatch(buffer, case, use_fp8=False, return_recv_hook=True) for case in cases]
        with pytest.raises(ValueError):
            dispatch(buffer, cases[0], return_recv_hook=True)
        for number in (first_hook, 1 - first_hook):
            sent[number][4]()
        for case, result in zip(cases, sent):
            reference.check_dispatched(case, rank, M, result)
        back = [combine(buffer, case, output[rank], result[2], return_recv_hook=True)
                for case, output, result in zip(cases, outputs, sent)]  # fmt: skip
        for number in (1 - first_hook, first_hook):
            back[number][2]()
        for (result, _, _), expected in zip(back, wanted):
            reference.close(result, expected)
    # One call of a kind waits while whole ones of the other kind go by.
    late = dispatch(buffer, cases[0], use_fp8=False, return_recv_hook=True)
    handle = sent[1][2]
    for _ in range(5):
        reference.close(combine(buffer, cases[1], outputs[1][rank], handle)[0], wanted[1])
    late[4]()
    reference.check_dispatched(cases[0], rank, M, late)
    for _ in range(3):  # dispatches without combine
        dispatch(buffer, cases[1])
    reference.close(combine(buffer, cases[0], outputs[0][rank], late[2])[0], wanted[0])


def test_overlapping(ranks):
    ranks(3).run(overlapping)


def removed_selections(group):
    buffer = make_buffer(group)
    rank = buffer.rank
    case = ll_case([M] * buffer.group_size)
    handle = dispatch(buffer, case)[2]
    outputs = outputs_of(case)
    now = case.topk_idx[rank].clone()
    now[:, 0] = -1
    now[1] = -1
    weights = torch.rand_like(case.topk_weights[rank])
    back, _, _ = buffer.low_latency_combine(outputs[rank], now, weights, handle)
    reference.close(back, reference.combined(case, rank, outputs, now, weights))
    assert (back[1] == 0).all()


def test_removed_selections(ranks):
    ranks(3).run(removed_selections)


def zero_copy(group):
    buffer = make_buffer(group)
    rank = buffer.rank
    case = ll_case([M, 3, 5][: buffer.group_size])
    handle = dispatch(buffer, case)[2]
    outputs = outputs_of(case)
    back, _, _ = combine(buffer, case, outputs[rank], handle)
    rows = buffer.get_next_low_latency_combine_buffer(handle)
    assert rows.shape == outputs[rank].shape and rows.dtype == torch.bfloat16
    rows[:, :, :] = outputs[rank]
    again, _, _ = combine(buffer, case, torch.empty_like(outputs[rank]), handle, zero_copy=True)
    assert torch.equal(back, again)
    with pytest.raises(ValueError, match="zero_copy"):
        combine(buffer, case, outputs[rank], handle, zero_copy=True, use_logfmt=True)
    with pytest.raises(ValueError, match="^x "):
        combine(buffer, case, outputs[rank][:, 1:], handle, zero_copy=True)


def test_zero_copy(ranks):
    ranks(3).run(zero_copy)


def logfmt(group):
    buffer = make_buffer(group, hidden=1536)
    rank = buffer.rank
    case = ll_case([M] * buffer.group_size, hidden=1536)
    for weights in case.topk_weights:
        weights.mul_(0.05).add_(0.05)
    handle = dispatch(buffer, case)[2]
    for scale in (0.5, 200.0):  # the latter leaves the range in every block of 128, and must pass unchanged
        outputs = [output * scale for output in outputs_of(case, hidden=1536)]
        plain, _, _ = combine(buffer, case, outputs[rank], handle)
        short, _, _ = combine(buffer, case, outputs[rank], handle, use_logfmt=True)
        if scale > 1:
            assert torch.equal(plain, short)
        else:
            a, b = plain.double() + 1, short.double() + 1
            assert 1 - 2 * (a * b).sum() / (a * a + b * b).sum() < 1e-5


def test_logfmt(ranks):
    ranks(2).run(logfmt)


def handles(group):
    """Tuples made of a handle's elements do; copies of src_info do not."""
    buffer = make_buffer(group)
    rank = buffer.rank
    case = ll_case([M] * buffer.group_size)
    handle = dispatch(buffer, case)[2]
    outputs = outputs_of(case)
    rebuilt = (handle[0], handle[1].clone(), handle[2], 256, handle[4])
    half = [output[:, :, :256].contiguous() for output in outputs]
    back, _, _ = combine(buffer, case, half[rank], rebuilt)
    reference.close(back, reference.combined(case, rank, half))
    old = handle
    for _ in range(70):  # more than are remembered without tidying up
        dispatch(buffer, case)
    reference.close(combine(buffer, case, outputs[rank], old)[0], reference.combined(case, rank, outputs))
    src_info, layout_range, *shape = handle
    for wrong, kind, text in (
        ((src_info.clone(), layout_range, *shape), ValueError, r"handle\[0\].*copy"),
        ((src_info, layout_range, M + 1, 512, 12), ValueError, r"handle\[2\]"),
        ((src_info, layout_range, M, 512, 24), ValueError, r"handle\[4\]"),
        ((src_info, layout_range, M, 512.0, 12), TypeError, r"handle\[3\]"),
        ((src_info, layout_range), ValueError, "handle has 2"),
        (([1], layout_range, *shape), TypeError, r"handle\[0\]"),
    ):
        with pytest.raises(kind, match=text):
            combine(buffer, case, outputs[rank], wrong)
    other = make_buffer(group)
    with pytest.raises(ValueError, match=r"handle\[0\]"):
        combine(other, case, outputs[rank], handle)


def test_handles(ranks):
    ranks(3).run(handles)


def rank_major(group):
    buffer = make_buffer(group)
    rank, ranks = buffer.rank, buffer.group_size
    case = ll_case([M, 2, 5][:ranks])
    local = case.local_experts
    for form in ({"use_fp8": False}, {}):
        rows, count, idx, weights, handle, event, hook = buffer.low_latency_dispatch_rank_major(
            case.x[rank], case.topk_idx[rank], M, case.num_experts, case.topk_weights[rank], **form
        )
        assert hook is None and event.event is None and count.shape == (ranks,)
        data = rows if form else rows[0]
        assert data.shape == (ranks, M, 512) and handle[0].shape == (ranks, M) and handle[1].shape == (ranks,)
        output = torch.full((ranks, M, 512), float("nan"), dtype=torch.bfloat16)
        for source in range(ranks):
            chosen = case.topk_idx[source]
            mine = (chosen >= 0) & (chosen // local == rank)
            tokens = mine.any(dim=1).nonzero().flatten()
            number = tokens.numel()
            assert count[source] == number and handle[0][source][:number].tolist() == tokens.tolist()
            assert handle[1][source] == number
            wanted = torch.where(mine, chosen - rank * local, -1)[tokens]
            assert torch.equal(idx[source][:number].long(), wanted)
            assert torch.equal(weights[source][:number], torch.where(mine, case.topk_weights[source], 0.0)[tokens])
            x = case.x[source][tokens]
            if form:
                assert torch.equal(rows[source][:number], x)
            else:
                values, scales = reference.cast_fp8(x)
                assert torch.equal(rows[0][source][:number].view(torch.uint8), values.view(torch.uint8))
                assert torch.equal(rows[1][source][:number], scales)
            output[source][:number] = x.float() * weights[source][:number].sum(dim=1, keepdim=True)
        back, _, _ = combine(buffer, case, output, handle)
        kept = case.topk_weights[rank].masked_fill(case.topk_idx[rank] < 0, 0).sum(dim=1, keepdim=True)
        reference.close(back, (case.x[rank].float() * kept).to(torch.bfloat16))


def test_rank_major(ranks):
    ranks(3).run(rank_major)


def shapes_and_modes(group):
    """One buffer: other shapes, the normal mode and cleaning in between."""
    buffer = make_buffer(group, hidden=1024, max_tokens=16)
    rank, ranks = buffer.rank, buffer.group_size
    for max_tokens, hidden, experts_per_rank in ((16, 128, 4), (3, 1024, 1), (16, 896, 2), (5, 512, 8)):
        case = ll_case([max_tokens] * ranks, hidden=hidden, experts_per_rank=experts_per_rank, num_topk=2, seed=hidden)
        result = dispatch(buffer, case, max_tokens)
        reference.check_dispatched(case, rank, max_tokens, result, use_fp8=True)
        outputs = outputs_of(case, max_tokens, hidden)
        reference.close(
            combine(buffer, case, outputs[rank], result[2])[0], reference.combined(case, rank, outputs)
        )
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(case.topk_idx[rank], case.num_experts)
        rows, _, _, _, handle, _ = buffer.dispatch(
            case.x[rank], num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
            config=deep_ep.Config(4),
        )  # fmt: skip
        back = buffer.combine(rows, handle, config=deep_ep.Config(4))[0]
        copies = in_rank.sum(dim=1, keepdim=True)
        reference.close(back, (case.x[rank].float() * copies).to(torch.bfloat16))
        buffer.clean_low_latency_buffer(max_tokens, hidden, case.num_experts)
        buffer.clean_low_latency_buffer(max_tokens, hidden, case.num_experts)


def test_shapes_and_modes(ranks):
    ranks(3).run(shapes_and_modes)


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


def zeroed(group):
    """Programs put zeros into the memory of low-latency calls to start again after a failure."""
    buffer = make_buffer(group)
    rank = buffer.rank
    case = ll_case([M] * buffer.group_size)
    outputs = outputs_of(case)
    for _ in range(4):
        result = dispatch(buffer, case, use_fp8=False)
        reference.check_dispatched(case, rank, M, result)
        reference.close(combine(buffer, case, outputs[rank], result[2])[0], reference.combined(case, rank, outputs))
        buffer.clean_low_latency_buffer(M, 512, case.num_experts)
        dist.barrier(group)
        memory = buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True)
        assert 0.9 * buffer.num_rdma_bytes < memory.numel() <= buffer.num_rdma_bytes
        memory.zero_()
        dist.barrier(group)


def test_zeroed_memory(ranks):
    ranks(3).run(zeroed)


def scratched(group, ranks_per_node, shrink):
    """LightLLM keeps values of its own there, from one cleaning to the next."""
    if ranks_per_node:
        os.environ["DEEP_EP_RANKS_PER_NODE"] = str(ranks_per_node)
    try:
        buffer = make_buffer(group, experts=16, enable_shrink=shrink)
    finally:
        os.environ.pop("DEEP_EP_RANKS_PER_NODE", None)
    rank = buffer.rank
    case = ll_case([M] * buffer.group_size)
    outputs = outputs_of(case)
    memory = buffer.get_local_buffer_tensor(torch.int64, use_rdma_buffer=True)
    for calls in range(1, 7):
        result = dispatch(buffer, case, use_fp8=False)
        reference.check_dispatched(case, rank, M, result)
        reference.close(combine(buffer, case, outputs[rank], result[2])[0], reference.combined(case, rank, outputs))
        buffer.clean_low_latency_buffer(M, 512, case.num_experts)
        if calls % 3 == 0:
            memory.zero_()
        elif calls % 3 == 1:
            memory.fill_(calls + 1)  # the number of the next call: what arrives there carries it
        else:
            memory.random_()
        buffer.clean_low_latency_buffer(M, 512, case.num_experts)


@pytest.mark.parametrize("shrink", [False, True])
@pytest.mark.parametrize("ranks_per_node", [0, 2])
def test_memory_with_anything(ranks, ranks_per_node, shrink):
    ranks(4).run(scratched, ranks_per_node, shrink)


def test_masking(ranks):
    ranks(3).run(masking)


def wrong_use(group):
    buffer = make_buffer(group)
    rank, ranks = buffer.rank, buffer.group_size
    case = ll_case([M] * ranks)
    x, idx, weights = case.x[rank], case.topk_idx[rank], case.topk_weights[rank]
    handle = dispatch(buffer, case)[2]
    rows = outputs_of(case)[rank]
    status = torch.zeros(ranks, dtype=torch.int32)
    plain = Buffer(group, 1 << 20)

    def send(x=x, idx=idx, max_tokens=M, experts=12, **options):
        return lambda: buffer.low_latency_dispatch(x, idx, max_tokens, experts, **options)

    def back(rows=rows, idx=idx, weights=weights, **options):
        return lambda: buffer.low_latency_combine(rows, idx, weights, handle, **options)

    calls = [
        (ValueError, "^x ", send(x=x.float())),
        (ValueError, "^x ", send(x=x[:, :64].contiguous())),
        (ValueError, "^x ", send(x=x.t())),
        (TypeError, "^x ", send(x=None)),
        (ValueError, "topk_idx", send(idx=idx[1:])),
        (ValueError, "topk_idx", send(idx=idx.float())),
        (ValueError, "topk_idx", send(idx=idx.t())),
        (ValueError, "tokens", send(max_tokens=M - 1)),
        (ValueError, "max_tokens", send(max_tokens=0)),
        (ValueError, "low_latency_bytes", send(max_tokens=2000)),
        (ValueError, "num_experts", send(experts=ranks + 1)),
        (ValueError, "round_scale", send(use_ue8m0=True)),
        (ValueError, "recv_stats", send(cumulative_local_expert_recv_stats=torch.zeros(5, dtype=torch.int32))),
        (ValueError, "^x ", back(rows=rows.float())),
        (ValueError, "^x ", back(rows=rows[:, :-1])),
        (ValueError, "topk_idx", back(idx=idx[:, :1])),
        (ValueError, "topk_weights", back(weights=weights.double())),
        (ValueError, "topk_weights", back(weights=weights[1:])),
        (ValueError, "^out ", back(out=torch.empty(M, 256, dtype=torch.bfloat16))),
        (ValueError, "hidden", lambda: buffer.clean_low_latency_buffer(M, 0, 12)),
        (ValueError, "enable_shrink", lambda: buffer.low_latency_update_mask_buffer(0, True)),
        (ValueError, "enable_shrink", lambda: buffer.low_latency_query_mask_buffer(status)),
        (ValueError, "enable_shrink", lambda: buffer.low_latency_clean_mask_buffer()),
        (ValueError, "low_latency_mode", lambda: plain.low_latency_dispatch(x, idx, M, 12)),
        (ValueError, "low_latency_mode", lambda: plain.clean_low_latency_buffer(M, 512, 12)),
        (ValueError, "low_latency_mode", lambda: plain.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True)),
        (ValueError, "enable_shrink", lambda: Buffer(group, enable_shrink=True)),
    ]
    for number, (kind, text, call) in enumerate(calls):
        with pytest.raises(kind, match=text):
            call()
            raise AssertionError(f"call {number}, about {text}, went through")
    reference.check_dispatched(case, rank, M, dispatch(buffer, case, use_fp8=False))
    gone = make_buffer(group, explicitly_destroy=True)
    hook = dispatch(gone, case, return_recv_hook=True)[4]
    gone.destroy()
    for call in (hook, lambda: dispatch(gone, case)):
        with pytest.raises(RuntimeError, match="destroy"):
            call()


def test_wrong_use(ranks):
    ranks(3).run(wrong_use)


def older_framework(group):
    """The way of PyTorch versions without DLPack's exchange functions."""
    before = deep_ep._native.use_exchange_api(False)
    try:
        buffer = make_buffer(group)
        rank = buffer.rank
        case = ll_case([M, 4][: buffer.group_size])
        result = dispatch(buffer, case)
        reference.check_dispatched(case, rank, M, result, use_fp8=True)
        outputs = outputs_of(case)
        back, _, _ = combine(buffer, case, outputs[rank], result[2])
        reference.close(back, reference.combined(case, rank, outputs))
    finally:
        deep_ep._native.use_exchange_api(before)


def test_older_framework(ranks):
    ranks(2).run(older_framework)


def many_calls(group):
    """Results that outlive the next calls, and the buffer."""
    buffer = make_buffer(group)
    rank = buffer.rank
    cases = [ll_case([M] * buffer.group_size, seed=seed) for seed in range(12)]
    kept = [dispatch(buffer, case, use_fp8=False) for case in cases]
    outputs = [outputs_of(case, seed=seed) for seed, case in enumerate(cases)]
    back = [combine(buffer, case, output[rank], result[2])[0] for case, output, result in zip(cases, outputs, kept)]
    del buffer
    gc.collect()
    for case, output, result, combined in zip(cases, outputs, kept, back):
        reference.check_dispatched(case, rank, M, result)
        reference.close(combined, reference.combined(case, rank, output))


def test_many_calls(ranks):
    ranks(3).run(many_calls)
