"""Scores for routing that gives one rank more tokens than the others."""

from __future__ import annotations

import torch

_ROUNDS = 300


def _tokens_of_ranks(scores: torch.Tensor, num_ranks: int, num_topk: int) -> torch.Tensor:
    """``[R]`` float32: how many tokens the ranks get if each takes its best experts."""
    owners = scores.topk(num_topk, dim=1).indices // (scores.size(1) // num_ranks)
    reached = torch.zeros((scores.size(0), num_ranks), dtype=torch.float32, device=scores.device)
    return reached.scatter_(1, owners, 1.0).sum(dim=0)


def get_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float, precise: bool
) -> torch.Tensor:
    """``[T, E]`` float32. Rank 0 gets about ``ratio`` times as many tokens as the others do on average; ``precise``: the
    others get nearly equally many. A ratio of 1 leaves it to chance."""
    scores = torch.rand((num_tokens, num_experts), dtype=torch.float32)
    if ratio == 1 or num_ranks == 1 or num_tokens == 0:
        return scores
    bonus = torch.zeros(num_ranks, dtype=torch.float32, device=scores.device)
    for number in range(_ROUNDS):
        result = scores + bonus.repeat_interleave(num_experts // num_ranks)
        counts = _tokens_of_ranks(result, num_ranks, num_topk)
        wanted = counts[1:].mean().clamp(min=1.0).expand(num_ranks).clone()
        wanted[0] = (ratio * wanted[0]).clamp(max=num_tokens)
        missing = (wanted - counts) / num_tokens
        if not precise:
            missing[1:] = 0
        if missing.abs().max() * num_tokens < 1:
            break
        bonus += missing * (6 / (20 + number))
    return result
