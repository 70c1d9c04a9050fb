"""Numbers: rounding, comparing, 8-bit rows."""

from __future__ import annotations

from functools import reduce
from operator import xor
from typing import Any, List, Tuple

import torch
from torch.utils._pytree import tree_leaves

_CHANNELS = 128  # of a scale
_LARGEST_FP8 = 448.0
_SMALLEST_AMAX = 1e-4


def ceil_div(x: int, y: int) -> int:
    return -(-x // y)


def align(x: int, y: int) -> int:
    """``x`` rounded up to a multiple of ``y``."""
    return ceil_div(x, y) * y


def safe_div(a: float, b: float) -> float:
    """0 where both are 0, otherwise ``a / b``: ``ZeroDivisionError`` where ``b`` is 0."""
    return 0.0 if a == 0 and b == 0 else a / b


def _tensors_in(given: Any) -> List[torch.Tensor]:
    return [each for each in tree_leaves(given) if isinstance(each, torch.Tensor)]


def count_bytes(*tensors: Any) -> int:
    """Bytes of all tensors that are given, also in tuples and lists, however deep. ``None`` has none."""
    return sum(each.numel() * each.element_size() for each in _tensors_in(tensors))


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """Relative squared difference of the values shifted by one; 0 for equal tensors."""
    if x.numel() == 0:
        return 0.0
    a, b = x.double() + 1, y.double() + 1
    return (1 - 2 * (a * b).sum() / (a * a + b * b).sum()).item()


def per_token_cast_to_fp8(x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """8-bit rows, and a float32 scale for each 128 channels (the last may be fewer)."""
    tokens, hidden = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, align(hidden, _CHANNELS) - hidden))
    blocks = padded.view(tokens, padded.size(1) // _CHANNELS, _CHANNELS)  # not -1: there may be no row
    amax = blocks.abs().amax(dim=2).clamp(min=_SMALLEST_AMAX)
    rows = (blocks * (_LARGEST_FP8 / amax).unsqueeze(2)).to(torch.float8_e4m3fn)
    return rows.view(tokens, padded.size(1))[:, :hidden].contiguous(), amax / _LARGEST_FP8


def _bytes_of(t: torch.Tensor) -> torch.Tensor:
    """All bytes in a row. A dimension of one element may have any stride, by which ``view`` would refuse it."""
    dense = t.contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def per_token_cast_back(x_fp8: torch.Tensor, x_scales: torch.Tensor) -> torch.Tensor:
    """bfloat16 rows from 8-bit ones; scales of any strides, each of 128 channels (the last may be fewer): float32, or int32
    with an exponent in each byte."""
    tokens, hidden = x_fp8.shape
    if x_fp8.numel() == 0:
        return x_fp8.to(torch.bfloat16)
    if x_scales.dtype == torch.int32:
        exponents = _bytes_of(x_scales).to(torch.int32).view(tokens, -1)
        x_scales = (exponents << 23).view(torch.float32)
    factors = x_scales.float().repeat_interleave(_CHANNELS, dim=1)[:, :hidden]
    return (x_fp8.float() * factors).to(torch.bfloat16)


def hash_tensor(t: torch.Tensor) -> int:
    """The sum of the tensor's 32-bit words, or of its bytes where they do not make such words: the order of rows does not
    matter."""
    bytes = _bytes_of(t)
    words = bytes if bytes.numel() % 4 else bytes.view(torch.int32)
    return words.to(torch.int64).sum().item()  # type: ignore[return-value]


def hash_tensors(*tensors: Any) -> int:
    """The exclusive or of the hashes of all tensors, also in tuples and lists."""
    return reduce(xor, map(hash_tensor, _tensors_in(tensors)), 0)


def inplace_unique(x: torch.Tensor, num_slots: int) -> None:
    """Each row of ``x``: its different values that are not negative, most frequent first, then -1."""
    counts = torch.zeros((x.size(0), num_slots + 1), dtype=torch.int64, device=x.device)
    counts.scatter_add_(1, torch.where(x < 0, num_slots, x).to(torch.int64), torch.ones_like(x, dtype=torch.int64))
    best, values = counts[:, :num_slots].sort(dim=1, descending=True, stable=True)
    width = min(x.size(1), num_slots)
    x.fill_(-1)
    x[:, :width] = torch.where(best > 0, values, -1)[:, :width].to(x.dtype)


def create_grouped_scores(scores: torch.Tensor, group_idx: torch.Tensor, num_groups: int) -> torch.Tensor:
    """``scores`` with 0 for experts of groups that the row of ``group_idx`` does not name."""
    tokens, experts = scores.shape
    chosen = torch.zeros((tokens, num_groups), dtype=torch.bool, device=scores.device)
    chosen.scatter_(1, group_idx.to(torch.int64), True)
    return scores * chosen.repeat_interleave(experts // num_groups, dim=1)
