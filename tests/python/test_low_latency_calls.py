"""Low-latency dispatch and combine on CPU ranks, against the reference, in every format; and masks."""

import low_latency_reference as reference
import pytest
import torch
from cluster import on_ranks
from low_latency_calls import FORMS, M, check_round_trip, combine, dispatch, ll_case, make_buffer, outputs_of

def round_trip(group, tokens, options):
    buffer = make_buffer(group)
    for seed, form in enumerate(FORMS):
        check_round_trip(buffer, ll_case(tokens, seed=seed, **options), {"use_fp8": True, **form})


@pytest.mark.parametrize(
    "tokens, options",
    [([M, 1, 3], {}), ([0, 0, 0], {}), ([M, 2, 4], {"index_dtype": torch.int32, "num_topk": 5}), ([0, 4, 0], {"drop": 1.0}), ([5], {})],
)
def test_round_trip(ranks, tokens, options):
    ranks(len(tokens)).run(round_trip, tokens, options)


@on_ranks(2)
def test_channels_that_are_not_finite(group):
    """They change no finite neighbour under powers of two; under float scales the whole block says so."""
    buffer = make_buffer(group)
    case = ll_case([1] * 2, hidden=512)
    x = torch.linspace(-3, 3, 512).bfloat16()[None]
    clean = x.clone()
    for at, value in ((5, "nan"), (130, "inf"), (131, "-inf"), (260, "nan"), (261, "-inf")):
        x[0, at] = float(value)
        clean[0, at] = 0
    is_finite = x[0].isfinite()
    for form in ({}, {"align_fp8_quantization": True}, {"round_scale": True}, {"round_scale": True, "use_ue8m0": True}):
        (rows, scales), counts, *_ = buffer.low_latency_dispatch(x, torch.tensor([[buffer.rank * case.local_experts, -1]]), M, case.num_experts, **form)
        assert counts[0] == 1
        scales = scales[0, 0].clone(memory_format=torch.contiguous_format)
        if form.get("use_ue8m0"):
            scales = (scales.view(torch.uint8).int() << 23).view(torch.float32)
        got = (rows[0, 0].float().unflatten(0, (4, 128)) * scales[:, None]).flatten()
        if not form.get("round_scale"):
            assert got[:384].isnan().all() and not got[384:].isnan().any()
            continue
        values, wanted = reference.cast_fp8(clean, round_scale=True)
        assert torch.equal(scales, wanted[0])
        assert torch.equal(rows[0, 0].view(torch.uint8)[is_finite], values[0].view(torch.uint8)[is_finite])
        assert torch.equal(got.isnan(), x[0].isnan())
        largest = 448 * scales.repeat_interleave(128)
        assert torch.equal(got[x[0].isinf()], (largest * x[0].sign())[x[0].isinf()])


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@on_ranks(2)
def test_nvfp4(group):
    buffer = make_buffer(group)
    case = ll_case([M] * buffer.group_size)
    for scale in (None, torch.tensor([20.0]), torch.tensor(20.0)):
        (rows, scales), *_, event, _ = dispatch(buffer, case, use_nvfp4=True, x_global_scale=scale, async_finish=True)
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
        values = E2M1[codes.long()] * factors.repeat_interleave(16, dim=-1)
        sources, tokens, _, expert, row = reference.selections(case, buffer.rank)
        sent = torch.stack([case.x[source][token] for source, token in zip(sources, tokens)]).float()
        assert ((values[expert, row] - sent).abs() <= sent.abs().amax(dim=1, keepdim=True) * 0.2).all()


@on_ranks(3)
def test_masking(group):
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
    check_round_trip(buffer, case, {"use_fp8": False})
