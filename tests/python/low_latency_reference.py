"""What the low-latency calls must return, computed rank by rank in plain PyTorch from data that every rank can make."""

import torch


def cast_fp8(x, round_scale=False):
    """float8_e4m3fn rows and float32 scales of 128 channels each, bit for bit."""
    blocks = x.float().view(*x.shape[:-1], -1, 128)
    amax = blocks.abs().amax(dim=-1).clamp(min=1e-4)
    inverse = torch.tensor(1 / 448, dtype=torch.float32)
    scales, multiplier = amax * inverse, torch.tensor(448.0, dtype=torch.float32) / amax
    if round_scale:
        bits = scales.view(torch.int32)
        exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).to(torch.int32)
        scales, multiplier = torch.ldexp(torch.ones_like(amax), exponent), torch.ldexp(torch.ones_like(amax), -exponent)
    values = (blocks * multiplier.unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values.view(x.shape), scales


def cast_fp8_aligned(x):
    """The same as quantisers for training do it. Divisors are tensors: some devices multiply by a scalar's inverse."""
    blocks = x.float().view(*x.shape[:-1], -1, 128)
    scales = blocks.abs().amax(dim=-1).clamp(min=1e-10) / torch.full((1,), 448.0)
    values = (blocks / scales.unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values.view(x.shape), scales


def pack_ue8m0(scales):
    """Four exponents in an int32, the first in the lowest byte."""
    exponents = (scales.view(torch.int32) >> 23).to(torch.int64).unflatten(-1, (-1, 4))
    packed = sum(exponents[..., i] << (8 * i) for i in range(4))
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def selections(case, rank, without=()):
    """Of each selection of this rank's experts, as columns: source, token, k, local expert and its row there. By expert, source, token
    and k. ``without``: ranks that send nothing."""
    found = []
    for source, idx in enumerate(case.topk_idx):
        local = idx.cpu().long() - rank * case.local_experts
        token, k = ((local >= 0) & (local < case.local_experts) & (source not in without)).nonzero(as_tuple=True)
        found.append(torch.stack([torch.full_like(token, source), token, k, local[token, k]], dim=1))
    table = torch.cat(found)
    source, token, k, local = table[table[:, 3].argsort(stable=True)].unbind(dim=1)
    return source, token, k, local, torch.arange(local.numel(), device="cpu") - torch.searchsorted(local, local)


def check_dispatched(case, rank, max_tokens, result, stats=None, use_fp8=False, round_scale=False, use_ue8m0=False,
                     align_fp8_quantization=False, without=()):  # fmt: skip
    """Everything that ``low_latency_dispatch`` returned, bit for bit."""
    rows, counts, handle, event, hook = result
    local_experts, ranks = case.local_experts, case.num_ranks
    hidden = case.x[rank].size(1)
    rows, scales = rows if use_fp8 else (rows, None)
    assert rows.shape == (local_experts, ranks * max_tokens, hidden) and rows.is_contiguous()
    assert rows.dtype == (torch.float8_e4m3fn if use_fp8 else torch.bfloat16)
    assert counts.shape == (local_experts,) and counts.dtype == torch.int32
    if use_fp8:
        width, dtype = (hidden // 512, torch.int32) if use_ue8m0 else (hidden // 128, torch.float32)
        assert scales.shape == (local_experts, ranks * max_tokens, width) and scales.dtype == dtype
        assert scales.stride() == (ranks * max_tokens * width, 1, ranks * max_tokens)
        assert scales.transpose(1, 2).is_contiguous()
    assert type(handle) is tuple and len(handle) == 5 and handle[2:] == (max_tokens, hidden, case.num_experts)
    assert all(type(number) is int for number in handle[2:])
    src_info, layout_range = handle[:2]
    assert src_info.dtype == torch.int32 and src_info.shape == (local_experts, ranks * max_tokens)
    assert layout_range.dtype == torch.int64 and layout_range.shape == (local_experts, ranks)
    of_rank = selections(case, rank, without)
    for local in range(local_experts):
        sources, tokens = (column[of_rank[3] == local].tolist() for column in of_rank[:2])
        count = len(tokens)
        what = f"local expert {local} of rank {rank}"
        assert counts[local].item() == count, what
        assert stats is None or stats[local].item() == count, what
        ranges = [(sum(other < source for other in sources), sources.count(source)) for source in range(ranks)]
        assert [(r >> 32, r & 0xFFFFFFFF) for r in layout_range[local].tolist()] == ranges, what
        assert src_info[local][:count].tolist() == tokens, what
        if count == 0:
            continue
        x = torch.stack([case.x[source][token] for source, token in zip(sources, tokens)])
        if not use_fp8:
            assert torch.equal(rows[local][:count], x), what
            continue
        values, inverse = cast_fp8_aligned(x) if align_fp8_quantization and not round_scale else cast_fp8(x, round_scale)
        assert torch.equal(rows[local][:count].view(torch.uint8), values.view(torch.uint8)), what
        wanted = pack_ue8m0(inverse) if use_ue8m0 else inverse
        assert torch.equal(scales[local][:count], wanted), what


def expert_output(case, rank, max_tokens, hidden, seed=0):
    """``[L, R * M, H]``: random rows where dispatch put some, NaN everywhere else."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    shape = (case.local_experts, case.num_ranks * max_tokens, hidden)
    output = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(case.x[rank].device, torch.bfloat16)
    for local, count in enumerate(selections(case, rank)[3].bincount(minlength=case.local_experts)):
        output[local][count:] = float("nan")
    return output


def combined(case, owner, outputs, without=()):
    """What ``owner`` gets back when rank d's experts put out ``outputs[d]``; one rounding, as documented. ``without``: ranks that
    are left out."""
    weights = case.topk_weights[owner]
    result = torch.zeros(weights.size(0), outputs[0].size(-1), dtype=torch.float32)
    for rank in range(case.num_ranks):
        if rank in without:
            continue
        sources, *places = selections(case, rank)
        tokens, k, local, row = (each[sources == owner].to(weights.device) for each in places)
        terms = weights[tokens, k].unsqueeze(1) * outputs[rank][local, row].float()
        result += torch.zeros_like(result).index_add_(0, tokens, terms)
    return result.to(torch.bfloat16)


def close(actual, expected, what="combined_x"):
    """Equal but for the order in which products and sums round: the last place of bfloat16."""
    assert actual.dtype == expected.dtype == torch.bfloat16 and actual.shape == expected.shape, what
    difference = (actual.float() - expected.float()).abs()
    allowed = expected.float().abs() * 2**-7 + 2**-14
    assert not actual.isnan().any() and (difference <= allowed).all(), f"{what}: differs by {difference.max().item()}"
