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
    for error, options in (
        ("x_global_scale", {"x_global_scale": torch.ones(1)}),
        ("x_global_scale", {"use_nvfp4": True, "x_global_scale": torch.ones(2)}),
        ("use_nvfp4", {"use_nvfp4": True, "round_scale": True}),
    ):
        with pytest.raises(ValueError, match=error):
            dispatch(buffer, case, **options)


def test_nvfp4(ranks):
    ranks(2).run(nvfp4)


def align_fp8_quantization(group):
    buffer = make_buffer(group)
    rank, ranks = buffer.rank, buffer.group_size
    case = ll_case([M] * ranks)
    x = case.x
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
            assert torch.equal(rows[local, row].view(torch.uint8), values.view(torch.uint8))
            assert torch.equal(scales[local, row], wanted)
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
    plain, _, _ = combine(buffer, case, rows, handle)
    assert torch.equal(plain, combine(buffer, case, rows, handle, use_logfmt=True)[0])


def test_logfmt_has_no_effect(ranks):
    ranks(2).run(logfmt)
