"""Where rows lie in the expanded layout: PyTorch operations only, none of which makes the host wait, so that all of it
can be recorded into CUDA graphs. The rows themselves are moved and added up by the library's kernels.

Symbols as in ``ElasticBuffer``: N received rows, K top-k, L local experts, A alignment of an expert's rows.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch

# What an index says where no row is wanted (see include/deep_ep/rows.hpp).
NO_ROW = -1
ZERO_ROW = -2


def align(value: int, step: int) -> int:
    return -(-value // step) * step


class Placement(NamedTuple):
    """Rows of the expanded layout: expert l has ``counts[l]`` of them from ``starts[l]`` on."""

    counts: torch.Tensor  # [L] int64
    starts: torch.Tensor  # [L] int64
    ends: torch.Tensor  # [L] int64: with the padding behind
    slots: torch.Tensor  # [N, K] int64: row of each selection, -1 where it is not of this rank


def count(local: torch.Tensor, num_local_experts: int) -> torch.Tensor:
    """``[L]`` int64: how often ``local`` ``[N, K]`` (-1: not here) names each expert."""
    named = torch.where(local < 0, num_local_experts, local.to(torch.int64)).flatten()
    counts = torch.zeros(num_local_experts + 1, dtype=torch.int64, device=local.device)
    return counts.scatter_add_(0, named, torch.ones_like(named))[:num_local_experts]


def place(local: torch.Tensor, num_local_experts: int, alignment: int) -> Placement:
    """A row for each selection of ``local``: by expert, then by received row, then by selection."""
    last = num_local_experts
    named = torch.where(local < 0, last, local.to(torch.int64)).flatten()
    ordered, order = torch.sort(named, stable=True)
    experts = torch.arange(last + 1, dtype=torch.int64, device=local.device)
    first = torch.searchsorted(ordered, experts)
    counts = first[1:] - first[:-1]
    padded = (counts + (alignment - 1)) // alignment * alignment
    ends = padded.cumsum(0)
    starts = ends - padded
    at = torch.arange(ordered.numel(), dtype=torch.int64, device=local.device)
    bounded = ordered.clamp(max=last - 1)
    rows = torch.where(ordered == last, -1, starts[bounded] + at - first[bounded])
    slots = torch.empty_like(rows).scatter_(0, order, rows)
    return Placement(counts, starts, ends, slots.view(local.shape))


def selection_of_rows(slots: torch.Tensor, num_rows: int) -> torch.Tensor:
    """``[num_rows]`` int64: which selection (row * K + slot) each expanded row holds, -1: none."""
    flat = slots.to(torch.int64).flatten()
    result = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=slots.device)
    selections = torch.arange(flat.numel(), dtype=torch.int64, device=slots.device)
    return result.scatter_(0, torch.where(flat < 0, num_rows, flat), selections)[:num_rows]


def gathered(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``rows[index]``, as bytes whatever the type; where ``index`` is negative, anything."""
    if rows.size(0) == 0:
        return torch.empty((index.numel(), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    row_bytes = rows.size(1) * rows.element_size() if rows.dim() == 2 else 0
    words = rows.view(torch.int64) if row_bytes and row_bytes % 8 == 0 and rows.is_contiguous() else rows
    return words.index_select(0, index.clamp(min=0)).view(rows.dtype)


def column_major(scales: torch.Tensor) -> torch.Tensor:
    """The same values with strides (1, rows rounded up to 4), as TMA loads want scales."""
    rows, width = scales.shape
    result = torch.empty_strided((rows, width), (1, align(rows, 4)), dtype=scales.dtype, device=scales.device)
    return result.copy_(scales)


def highest_local(local: torch.Tensor) -> torch.Tensor:
    """``[N]``: the last selection of each row that is an expert of this rank; 0 where there is none."""
    numbers = torch.arange(local.size(1), dtype=torch.int64, device=local.device)
    return torch.where(local >= 0, numbers, 0).amax(dim=1)


def last_of_owner(topk_idx: torch.Tensor, num_local_experts: int) -> torch.Tensor:
    """``[T, K]`` int64: the last selection of the same token on the same rank; where there is no selection, a number
    that means nothing."""
    idx = topk_idx.to(torch.int64)
    owner = torch.where(idx >= 0, idx // num_local_experts, -1)
    numbers = torch.arange(idx.size(1), dtype=torch.int64, device=idx.device)
    result = torch.zeros_like(owner)
    for k in range(idx.size(1)):  # K passes instead of [T, K, K] memory
        result = torch.where(owner == owner[:, k : k + 1], numbers[k], result)
    return result


def row_numbers(ids: torch.Tensor, num_valid: torch.Tensor, num_ids: int) -> torch.Tensor:
    """``[num_ids]`` int64: the row that carries each id; 0 for ids that no row carries. Rows from ``num_valid`` on do
    not count."""
    rows = torch.arange(ids.numel(), dtype=torch.int64, device=ids.device)
    at = torch.where(rows < num_valid, ids.to(torch.int64), num_ids)
    result = torch.zeros(num_ids + 1, dtype=torch.int64, device=ids.device)
    return result.scatter_(0, at.clamp(0, num_ids), rows)[:num_ids]


def as_bits(values: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """4-byte values as int32, for travelling beside others."""
    return None if values is None else values.view(torch.int32)
