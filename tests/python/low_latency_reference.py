"""What the low-latency calls must return, computed rank by rank in plain PyTorch from data that every rank can make."""

import dataclasses

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


@dataclasses.dataclass
class Expert:
    """What one expert gets: a row for each of these, and of which source how many."""

    sources: list
    tokens: list
    positions: list  # k of the selection
    ranges: list  # (first row, rows) by source


def rows_of_expert(case, expert, without=()):
    """By source rank, then by token, then by selection. ``without``: ranks that send nothing."""
    result = Expert([], [], [], [])
    for source in range(case.num_ranks):
        begin = len(result.tokens)
        if source not in without:
            for token, k in (case.topk_idx[source] == expert).nonzero().tolist():
                result.sources.append(source)
                result.tokens.append(token)
                result.positions.append(k)
        result.ranges.append((begin, len(result.tokens) - begin))
    return result


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
    for local in range(local_experts):
        expected = rows_of_expert(case, rank * local_experts + local, without)
        count = len(expected.tokens)
        what = f"local expert {local} of rank {rank}"
        assert counts[local].item() == count, what
        assert stats is None or stats[local].item() == count, what
        assert [(r >> 32, r & 0xFFFFFFFF) for r in layout_range[local].tolist()] == expected.ranges, what
        assert src_info[local][:count].tolist() == expected.tokens, what
        if count == 0:
            continue
        x = torch.stack([case.x[source][token] for source, token in zip(expected.sources, expected.tokens)])
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
    for local in range(case.local_experts):
        output[local][len(rows_of_expert(case, rank * case.local_experts + local).tokens) :] = float("nan")
    return output


def combined(case, owner, outputs, topk_idx=None, topk_weights=None, without=()):
    """What ``owner`` gets back when rank d's experts put out ``outputs[d]``; two roundings, as documented.
    ``topk_idx``, ``topk_weights``: as they are now; ``without``: ranks that are left out."""
    dispatched, hidden = case.topk_idx[owner], outputs[0].size(-1)
    now = dispatched if topk_idx is None else topk_idx
    weights = case.topk_weights[owner] if topk_weights is None else topk_weights
    place = {}  # (token, k) -> rank, local expert, row
    for expert in range(case.num_experts):
        rows = rows_of_expert(case, expert)
        for row, (source, token, k) in enumerate(zip(rows.sources, rows.tokens, rows.positions)):
            if source == owner:
                place[token, k] = (*divmod(expert, case.local_experts), row)
    result = torch.zeros(now.size(0), hidden, dtype=torch.float32)
    for rank in range(case.num_ranks):
        if rank in without:
            continue
        part = torch.zeros_like(result)
        for token, k in (now >= 0).nonzero().tolist():
            assert now[token, k] == dispatched[token, k]
            where = place[token, k]
            if where[0] == rank:
                part[token] += weights[token, k] * outputs[rank][where[1], where[2]].float()
        result += part.to(torch.bfloat16).float()
    return result.to(torch.bfloat16)


def close(actual, expected, what="combined_x"):
    """Equal but for the order in which products and sums round: the last place of bfloat16."""
    assert actual.dtype == expected.dtype == torch.bfloat16 and actual.shape == expected.shape, what
    difference = (actual.float() - expected.float()).abs()
    allowed = expected.float().abs() * 2**-6 + 2**-7
    assert not actual.isnan().any() and (difference <= allowed).all(), f"{what}: differs by {difference.max().item()}"
