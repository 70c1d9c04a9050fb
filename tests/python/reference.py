"""What dispatch and combine must return, computed rank by rank in plain PyTorch from data that every rank can make."""

import dataclasses

import torch


@dataclasses.dataclass
class Case:
    """Everything all ranks send. ``x[s]`` is rank s's ``[T_s, H]``, and so on."""

    num_experts: int
    x: list
    topk_idx: list
    topk_weights: list

    @property
    def num_ranks(self):
        return len(self.x)

    @property
    def local_experts(self):
        return self.num_experts // self.num_ranks


def make_case(tokens, hidden=64, num_topk=3, experts_per_rank=4, seed=0, index_dtype=torch.int64, drop=0.1):
    """``tokens``: T of each rank. About ``drop`` of the selections are -1. The same on every device."""
    device = torch.get_default_device()
    generator = torch.Generator().manual_seed(seed)
    case = Case(experts_per_rank * len(tokens), [], [], [])
    with torch.device("cpu"):
        for count in tokens:
            case.x.append(torch.randn(count, hidden, generator=generator, dtype=torch.float32).to(device, torch.bfloat16))
            scores = torch.rand(count, case.num_experts, generator=generator, dtype=torch.float32)
            idx = scores.topk(num_topk, dim=1).indices if count else torch.zeros(0, num_topk, dtype=torch.int64)
            dropped = torch.rand(count, num_topk, generator=generator, dtype=torch.float32) < drop
            case.topk_idx.append(idx.masked_fill(dropped, -1).to(device, index_dtype))
            case.topk_weights.append(torch.rand(count, num_topk, generator=generator, dtype=torch.float32).to(device))
    return case


def layout(case, source):
    """num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank of one rank."""
    idx = case.topk_idx[source].long()
    valid = (idx >= 0) & (idx < case.num_experts)
    per_expert = torch.bincount(idx[valid], minlength=case.num_experts).to(torch.int32)
    in_rank = torch.zeros(idx.size(0), case.num_ranks, dtype=torch.bool)
    for rank in range(case.num_ranks):
        in_rank[:, rank] = (valid & (idx // case.local_experts == rank)).any(dim=1)
    return in_rank.sum(dim=0).to(torch.int32), per_expert, in_rank


@dataclasses.dataclass
class Received:
    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    source: torch.Tensor  # rank and token of each row
    token: torch.Tensor
    ends: list
    counts: list


def dispatched(case, destination, x=None):
    """What one rank receives; ``x``: other rows than the case's."""
    x = case.x if x is None else x
    parts, ends, end = [], [], 0
    counts = torch.zeros(case.num_experts, dtype=torch.int64)
    for source in range(case.num_ranks):
        _, per_expert, in_rank = layout(case, source)
        counts += per_expert
        tokens = in_rank[:, destination].nonzero().flatten()
        end += tokens.numel()
        ends.append(end)
        idx = case.topk_idx[source][tokens]
        local = idx - destination * case.local_experts
        here = (local >= 0) & (local < case.local_experts) & (idx >= 0)
        parts.append((
            x[source][tokens],
            torch.where(here, local, -1).to(idx.dtype),
            torch.where(here, case.topk_weights[source][tokens], 0.0),
            torch.full_like(tokens, source),
            tokens,
        ))
    mine = counts[destination * case.local_experts : (destination + 1) * case.local_experts]
    return Received(*(torch.cat(column) for column in zip(*parts)), ends=ends, counts=mine.tolist())


def combined(case, owner, rows, weights=None, bias=(), nodes=1):
    """What ``owner`` gets back when rank d holds ``rows[d]`` (and ``weights[d]``) for what it received. Other nodes' sums are rounded
    before they are added."""
    total = torch.zeros(case.x[owner].size(0), rows[0].size(1), dtype=torch.float32)
    for term in bias:
        total += term.float()
    total_weights = torch.zeros_like(case.topk_weights[owner])
    a_node = case.num_ranks // nodes
    for node in range(nodes):
        part = total if node == owner // a_node else torch.zeros_like(total)
        for rank in range(node * a_node, (node + 1) * a_node):
            received = dispatched(case, rank)
            mine = received.source == owner
            part.index_add_(0, received.token[mine], rows[rank][: mine.numel()][mine].float())
            if weights is not None:
                total_weights.index_add_(0, received.token[mine], weights[rank][: mine.numel()][mine])
        if part is not total:
            total += part.to(torch.bfloat16).float()
    return total.to(torch.bfloat16), total_weights
