"""Experts that are easy to check: expert e multiplies its input by ``factor(e)``."""

from __future__ import annotations

# Not all functions of PyTorch have annotations.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from typing import Callable, Tuple

import torch

from deep_ep import Buffer


def factor(experts: torch.Tensor) -> torch.Tensor:
    """For any tensor of expert numbers: 1, 1.25, 1.5, 1.75, 2, 1, ... exact in bfloat16."""
    return 1 + 0.25 * (experts % 5)


def expected(x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """The layer's output for one rank's tokens, in float32."""
    share = torch.where(topk_idx >= 0, topk_weights * factor(topk_idx), 0.0)
    return x.float() * share.sum(dim=1, keepdim=True)


def random_numbers(
    function: Callable[..., torch.Tensor], rows: int, columns: int, generator: torch.Generator
) -> torch.Tensor:
    """The same on GPUs as on the CPU, where the generator is; they lie on the default device."""
    numbers = function(rows, columns, generator=generator, dtype=torch.float32, device="cpu")
    return numbers.to(torch.get_default_device())


def random_tokens(
    buffer: Buffer, tokens: int, hidden: int, num_experts: int, num_topk: int, seed: int
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x ``[tokens, hidden]`` bfloat16, topk_idx ``[tokens, num_topk]``, topk_weights float32; the last selection is left out."""
    generator = torch.Generator().manual_seed(1000 * seed + buffer.rank)
    x = random_numbers(torch.randn, tokens, hidden, generator).to(torch.bfloat16)
    scores = random_numbers(torch.rand, tokens, num_experts, generator)
    topk_weights, topk_idx = scores.topk(num_topk, dim=1)
    topk_idx = topk_idx.clone()
    topk_idx[:, -1] = -1
    return x, topk_idx, topk_weights.contiguous()


def require_close(actual: torch.Tensor, wanted: torch.Tensor, tolerance: float = 0.02) -> float:
    """Sums are rounded to bfloat16 once a rank, and once at the end."""
    difference = float((actual.float() - wanted).norm() / wanted.norm().clamp(min=1e-6))
    assert difference < tolerance, f"relative difference {difference}, allowed: {tolerance}"
    return difference
