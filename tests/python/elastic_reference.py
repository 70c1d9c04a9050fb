"""What dispatch and combine of the second interface must return, row by row in plain PyTorch. Data as in reference.py."""

import dataclasses

import reference
import torch

from deep_ep.utils import refs
from deep_ep.utils.math import align


@dataclasses.dataclass
class Expected:
    """Of one rank. Lists have an entry for each received row, or for each local expert."""

    x: torch.Tensor
    local: torch.Tensor
    weights: torch.Tensor
    ids: list  # source * M + token
    last: list  # source * K + last selection of this rank
    ends: list
    counts: list
    starts: list  # of experts in the expanded layout
    selections: list  # (received row, slot) of each expanded row, None: padding
    slots: list  # expanded row of each slot


def expected(case, rank, most, alignment, x=None):
    got = reference.dispatched(case, rank, x)
    topk = got.topk_idx.size(1)
    starts, selections = [], []
    slots = [[-1] * topk for _ in range(got.x.size(0))]
    for expert in range(case.local_experts):
        starts.append(len(selections))
        for row, slot in (got.topk_idx == expert).nonzero().tolist():
            slots[row][slot] = len(selections)
            selections.append((row, slot))
        selections += [None] * (align(len(selections), alignment) - len(selections))
    last = [s * topk + max((k for k in range(topk) if named[k] >= 0), default=0)
            for s, named in zip(got.source.tolist(), got.topk_idx.tolist())]  # fmt: skip
    ids = (got.source * most + got.token).tolist()
    return Expected(got.x, got.topk_idx, got.topk_weights, ids, last, got.ends, got.counts, starts, selections, slots)


def selection_values(case, hidden, seed=11):
    """``[T, K, H]`` bfloat16 for each rank: what the experts make of each selection."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*idx.shape, hidden, generator=generator).to(torch.bfloat16) for idx in case.topk_idx]


def combined(case, owner, bias, values, expand, multiple=True):
    """What comes back of the experts' ``values``; without ``expand``, of a token's last selection on each rank."""
    idx, y = case.topk_idx[owner], values[owner]
    if not expand:
        owners = torch.where(idx >= 0, idx.long() // case.local_experts, -1)
        again = (owners.unsqueeze(2) == owners.unsqueeze(1)).triu(1).any(dim=2)  # a later selection is of the same rank
        y = torch.where(again.unsqueeze(2), 0.0, y)
    return refs.combine(y, idx, 1, case.num_ranks, case.num_experts, bias, expand and multiple, False)


def rows_of_ranks(want, values, most):
    """Non-expanded input of combine, where dispatch put the tokens."""
    topk, hidden = values[0].shape[1:]
    rows = [values[i // most][i % most, last % topk] for i, last in zip(want.ids, want.last)]
    return torch.stack(rows) if rows else torch.zeros(0, hidden, dtype=torch.bfloat16)


def rows_of_selections(want, values, most):
    """Expanded input of combine; padding is NaN, which nobody may read."""
    hidden = values[0].size(-1)
    rows = torch.full((len(want.selections), hidden), float("nan"), dtype=torch.bfloat16)
    for at, selection in enumerate(want.selections):
        if selection is not None:
            row, slot = selection
            rows[at] = values[want.ids[row] // most][want.ids[row] % most, slot]
    return rows


def padded(rows, size):
    """Behind them is NaN, which no call may read."""
    result = torch.full((size, rows.size(1)), float("nan"), dtype=rows.dtype)
    result[: rows.size(0)] = rows
    return result


def input_of_combine(case, want, most, expand, hidden, seed=11):
    """The rows, and what ``combined`` takes."""
    values = selection_values(case, hidden, seed)
    return (rows_of_selections if expand else rows_of_ranks)(want, values, most), {"values": values, "expand": expand}


def kept_weights(case, rank):
    return torch.where(case.topk_idx[rank] >= 0, case.topk_weights[rank], 0.0)
