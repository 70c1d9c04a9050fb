"""What dispatch and combine of the second interface must return, row by row in plain PyTorch. Data as in reference.py."""

import dataclasses

import reference
import torch

from deep_ep.utils import refs


def align(value, step):
    return -(-value // step) * step


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
        for row, named in enumerate(got.topk_idx.tolist()):
            for slot in range(topk):
                if named[slot] == expert:
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


def rank_values(case, hidden, seed=12):
    """``[T, R, H]`` bfloat16 for each rank: one row for each rank that has the token."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(idx.size(0), case.num_ranks, hidden, generator=generator).to(torch.bfloat16) for idx in case.topk_idx]


def combined(case, owner, bias, per_rank=None, per_selection=None, multiple=True):
    """``per_rank``: rows as the ranks have them (non-expanded). ``per_selection``: expanded."""
    idx = case.topk_idx[owner]
    if per_rank is None:
        return refs.combine(per_selection[owner], idx, 1, case.num_ranks, case.num_experts, bias, multiple, False)
    owners = torch.where(idx >= 0, idx.long() // case.local_experts, -1)
    rows = per_rank[owner].gather(1, owners.clamp(min=0).unsqueeze(2).expand(-1, -1, per_rank[owner].size(2)))
    again = (owners.unsqueeze(2) == owners.unsqueeze(1)).triu(1).any(dim=2)  # a later selection is of the same rank
    rows = torch.where(again.unsqueeze(2), 0.0, rows)
    return refs.combine(rows, idx, 1, case.num_ranks, case.num_experts, bias, False, False)


def rows_of_rank(case, want, values, rank, most):
    """Non-expanded input of combine: ``values`` of rank_values, where dispatch put the tokens."""
    rows = [values[i // most][i % most, rank] for i in want.ids]
    return torch.stack(rows) if rows else torch.zeros(0, values[0].size(-1), dtype=torch.bfloat16)


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


def input_of_combine(case, want, rank, most, expand, hidden, seed=11):
    """The rows, and the values that they are, as ``combined`` takes them."""
    if expand:
        values = selection_values(case, hidden, seed)
        return rows_of_selections(want, values, most), {"per_selection": values}
    values = rank_values(case, hidden, seed)
    return rows_of_rank(case, want, values, rank, most), {"per_rank": values}


def kept_weights(case, rank):
    return torch.where(case.topk_idx[rank] >= 0, case.topk_weights[rank], 0.0)
