"""What dispatch and combine of the second interface must return, in plain PyTorch and collectives of the default group."""

from __future__ import annotations

import math
from typing import Any, List, Optional, Tuple

import torch
import torch.distributed as dist

from .envs import get_global_seed


def _exchange(rows: torch.Tensor, sent: List[int], received: List[int]) -> torch.Tensor:
    """Rows for each rank in turn, against the rows that the ranks have for this one; as bytes, of any type. Gloo's come from the
    host: its threads would make the first GPU current, and every process have a second context there."""
    flat = rows.contiguous().view(rows.size(0), math.prod(rows.shape[1:]))  # not -1: there may be no row
    mine = flat.view(torch.uint8).to("cpu" if str(dist.get_backend()) == "gloo" else rows.device)
    theirs = mine.new_empty((sum(received), mine.size(1)))
    dist.all_to_all_single(theirs, mine, received, sent)
    return theirs.to(rows.device).view(rows.dtype).view(sum(received), *rows.shape[1:])


def dispatch(
    x: Any, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_max_tokens_per_rank: int, num_experts: int
) -> Tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Collective. Rows by source rank, then by token: ``x`` (tensor or tuple), indices among this rank's experts or -1,
    weights as they were sent, global token ids (int32), and how many rows each source sent (int32)."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    local_experts = num_experts // ranks
    owners = torch.where(topk_idx < 0, -1, topk_idx // local_experts)
    tokens = [(owners == peer).any(dim=1).nonzero().flatten() for peer in range(ranks)]
    order = torch.cat(tokens)
    counts = torch.tensor([len(each) for each in tokens], dtype=torch.int32, device=topk_idx.device)
    sources = _exchange(counts, [1] * ranks, [1] * ranks)
    sent, received = counts.tolist(), sources.tolist()

    def get(rows: torch.Tensor) -> torch.Tensor:
        return _exchange(rows[order], sent, received)

    ids = (rank * num_max_tokens_per_rank + torch.arange(topk_idx.size(0), device=topk_idx.device)).to(torch.int32)
    recv_x = tuple(map(get, x)) if isinstance(x, tuple) else get(x)
    named = get(topk_idx) - rank * local_experts
    local = torch.where((named >= 0) & (named < local_experts), named, -1)
    return recv_x, local, get(topk_weights), get(ids.unsqueeze(1)).squeeze(1), sources


def generate_pre_combine_data(
    src_token_global_idx: torch.Tensor, num_max_tokens_per_rank: int, num_topk: int, hidden: int
) -> torch.Tensor:
    """``[n, K, H]`` bfloat16: what the experts make of tokens; the same for a token wherever it is asked for."""
    device = src_token_global_idx.device
    number = src_token_global_idx.to(torch.int64).view(-1, 1, 1) * num_topk + torch.arange(num_topk, device=device).view(1, -1, 1)
    mixed = number * 2654435761 + torch.arange(hidden, device=device) * 40503 + get_global_seed() * 97
    return torch.sin((mixed % 65521).to(torch.float32)).to(torch.bfloat16)


def ordered_accumulate(data: torch.Tensor, initial_value: Optional[torch.Tensor] = None) -> torch.Tensor:
    """``data`` ``[n, K, H]`` added over K in order and in float32, to ``initial_value`` if given; rounded once."""
    total = torch.zeros_like(data[:, 0], dtype=torch.float32) if initial_value is None else initial_value.to(torch.float32)
    for slot in range(data.size(1)):
        total = total + data[:, slot].to(torch.float32)
    return total.to(data.dtype)


def _merge(values: torch.Tensor, owners: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """The rounded sum of each owner's slots at the last of them; owner -1 elsewhere."""
    merged, left = torch.zeros_like(values), torch.full_like(owners, -1)
    slots = owners.size(1)
    for last in range(slots):
        mine = owners == owners[:, last : last + 1]
        is_last = (owners[:, last] >= 0) & ~mine[:, last + 1 :].any(dim=1)
        merged[:, last] = ordered_accumulate(values * mine.unsqueeze(2))
        left[:, last] = torch.where(is_last, owners[:, last], -1)
    return merged, left


def combine(
    y: torch.Tensor,
    topk_idx: torch.Tensor,
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_experts: int,
    bias: Any,
    reduce_in_local: bool,
    reduce_in_scaleup: bool,
) -> torch.Tensor:
    """``[T, H]``: ``y`` ``[T, K, H]`` added up for each token, with a rounded sum on each rank and in each domain first if
    asked for. ``bias``: ``None``, a tensor, or a tuple."""
    local_experts = num_experts // (num_scaleout_ranks * num_scaleup_ranks)
    owners = torch.where(topk_idx < 0, -1, topk_idx // local_experts)
    if reduce_in_local:
        y, owners = _merge(y, owners)
    if reduce_in_scaleup:
        y, owners = _merge(y, torch.where(owners < 0, -1, owners // num_scaleup_ranks))
    initial = None
    for term in bias if isinstance(bias, (tuple, list)) else (bias,):
        if term is not None:
            initial = term.to(torch.float32) if initial is None else initial + term.to(torch.float32)
    return ordered_accumulate(torch.where((owners >= 0).unsqueeze(2), y, 0.0), initial)
