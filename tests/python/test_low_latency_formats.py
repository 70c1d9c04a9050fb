"""What rows of low-latency calls look like: 8 and 4 bits, FP8 on the way back, a row for each rank."""

import low_latency_reference as reference
import pytest
import torch
from low_latency_calls import M, combine, dispatch, ll_case, make_buffer, outputs_of


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
    for scale in (None, torch.tensor([20.0]), torch.tensor(20.0)):
        (rows, scales), count, handle, event, _ = dispatch(
            buffer, case, use_nvfp4=True, x_global_scale=scale, async_finish=True
        )
        event.current_stream_wait()
        height, half, local = rows.shape
        rows = rows.permute(2, 0, 1)
        assert rows.is_contiguous() and (height, local) == (buffer.group_size * M, case.num_experts // buffer.group_size)
        assert rows.dtype == scales.dtype == torch.uint8
        assert scales.shape == (32, 4, (height + 127) // 128, 4, half // 32, local)
        codes = torch.stack((rows & 15, rows >> 4), dim=-1).reshape(local, height, 2 * half)
        r, c = torch.arange(height)[:, None], torch.arange(half // 8)[None, :]
        eight_bits = scales[r % 32, r // 32 % 4, r // 128, c % 4, c // 4].permute(2, 0, 1).contiguous()
        factors = eight_bits.view(torch.float8_e4m3fn).float() / (1 if scale is None else scale)
        assert scale is None or any(tensor is scale for tensor in event.extra_tensors)
        check_rows(case, buffer, count, handle, E2M1[codes.long()] * factors.repeat_interleave(16, dim=-1))
    rows = buffer.low_latency_dispatch_rank_major(
        case.x[buffer.rank], case.topk_idx[buffer.rank], M, case.num_experts, use_nvfp4=True
    )[0][0]
    assert rows.shape == (M, 256, buffer.group_size) and rows.permute(2, 0, 1).is_contiguous()
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


def edge_rows(generator):
    """``[6, 512]``: a block of each kind of number, then blocks of any magnitude."""
    blocks = torch.randint(-(2**15), 2**15, (24, 128), generator=generator, dtype=torch.int32).to(torch.int16)
    blocks = torch.where((blocks & 0x7F80) == 0x7F80, blocks & 0x3FFF, blocks).view(torch.bfloat16)
    scales = torch.logspace(-42, 38, 10).to(torch.bfloat16)
    blocks[:10] = torch.randn(10, 128, generator=generator).to(torch.bfloat16) * scales[:, None]
    blocks[10], blocks[11], blocks[12], blocks[13] = 0.0, -0.0, 1e-40, torch.finfo(torch.bfloat16).max
    blocks[14], blocks[15] = 1e-11, 5e-5  # below the floors, the new one and the usual one
    blocks[16, 3], blocks[17, 5] = float("inf"), float("nan")
    return blocks.view(6, 512)


def align_fp8_quantization(group):
    buffer = make_buffer(group)
    rank, ranks = buffer.rank, buffer.group_size
    case = ll_case([M] * ranks)
    x = [edge_rows(torch.Generator().manual_seed(source)) for source in range(ranks)]
    usual = reference.cast_fp8(x[rank])
    (rows, scales), count, handle, _, _ = buffer.low_latency_dispatch(
        x[rank], case.topk_idx[rank], M, case.num_experts, align_fp8_quantization=True
    )
    different = 0
    for local in range(case.local_experts):
        expected = reference.rows_of_expert(case, rank * case.local_experts + local)
        number = len(expected.tokens)
        assert count[local] == number and handle[0][local][:number].tolist() == expected.tokens
        for row, (source, token) in enumerate(zip(expected.sources, expected.tokens)):
            values, wanted = reference.cast_fp8_aligned(x[source][token])
            nan = values.float().isnan()
            assert torch.equal(rows[local, row].float().isnan(), nan)
            assert torch.equal(rows[local, row].view(torch.uint8)[~nan], values.view(torch.uint8)[~nan])
            torch.testing.assert_close(scales[local, row], wanted, rtol=0, atol=0, equal_nan=True)
            if source == rank:
                different += (values.view(torch.uint8) != usual[0][token].view(torch.uint8)).sum()
                different += (wanted != usual[1][token]).sum()
    assert different > 0
    for form in ({"use_fp8": False}, {"use_fp8": True, "round_scale": True},
                 {"use_fp8": True, "round_scale": True, "use_ue8m0": True}):  # fmt: skip
        result = dispatch(buffer, case, align_fp8_quantization=True, **form)
        reference.check_dispatched(case, rank, M, result, **form)


def test_align_fp8_quantization(ranks):
    ranks(2).run(align_fp8_quantization)


def logfmt(group):
    buffer = make_buffer(group)
    case = ll_case([M] * buffer.group_size)
    handle = dispatch(buffer, case)[2]
    rows = outputs_of(case)[buffer.rank]
    for options in ({}, {"use_fp8": True}):
        plain, _, _ = combine(buffer, case, rows, handle, **options)
        assert torch.equal(plain, combine(buffer, case, rows, handle, use_logfmt=True, **options)[0])


def test_logfmt_has_no_effect(ranks):
    ranks(2).run(logfmt)


def combine_in_fp8(group):
    buffer = make_buffer(group, hidden=1536)
    rank = buffer.rank
    case = ll_case([M] * buffer.group_size, hidden=1536)
    handle = dispatch(buffer, case)[2]
    outputs = outputs_of(case, hidden=1536)
    exact, _, _ = combine(buffer, case, outputs[rank], handle)
    short, _, _ = combine(buffer, case, outputs[rank], handle, use_fp8=True)
    again, _, _ = combine(buffer, case, outputs[rank], handle, use_fp8=True)
    assert torch.equal(short, again) and not torch.equal(short, exact)
    hooked, _, hook = combine(buffer, case, outputs[rank], handle, use_fp8=True, return_recv_hook=True)
    hook()
    for result in (short, hooked):
        a, b = exact.double(), result.double()
        assert 1 - 2 * (a * b).sum() / (a * a + b * b).sum() < 1e-3


def test_combine_in_fp8(ranks):
    ranks(2).run(combine_in_fp8)


def rank_major(group):
    buffer = make_buffer(group)
    rank, ranks = buffer.rank, buffer.group_size
    case = ll_case([M, 2, 5][:ranks])
    local = case.local_experts
    for form in ({"use_fp8": False}, {"async_finish": True}):
        fp8 = "use_fp8" not in form
        rows, count, idx, weights, handle, event, hook = buffer.low_latency_dispatch_rank_major(
            case.x[rank], case.topk_idx[rank], M, case.num_experts, case.topk_weights[rank], **form
        )
        assert hook is None and (event.event is not None) == fp8 and count.shape == (ranks,)
        assert not fp8 or any(tensor is case.x[rank] for tensor in event.extra_tensors)
        data = rows[0] if fp8 else rows
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
            if not fp8:
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
