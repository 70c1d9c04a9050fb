"""How many SMs calls of the second interface take."""

from __future__ import annotations

import functools
import math
from typing import Tuple

import torch

from ..utils import envs

_FEWEST_SMS = 4
_FEWEST_SMS_ALONE = 64
_HEADROOM = 1.25


def expected_ranks(num_ranks: int, num_experts: int, num_topk: int) -> float:
    """How many ranks a token goes to if its experts are chosen at random."""
    local = num_experts // num_ranks
    topk = min(num_topk, num_experts)
    return num_ranks * (1 - math.comb(num_experts - local, topk) / math.comb(num_experts, topk))


@functools.lru_cache(maxsize=None)
def num_sms(
    num_ranks: int,
    num_nodes: int,
    num_experts: int,
    num_topk: int,
    rates: Tuple[float, float, float, float],
    device: torch.device,
    overlaps: bool,
) -> int:
    """As many SMs as it takes to read each token once and write it to its ranks as fast as the links carry it."""
    if device.type != "cuda":
        return _FEWEST_SMS
    rdma, nvlink, sm_read, sm_write = rates
    ranks = expected_ranks(num_ranks, num_experts, num_topk)
    per_sm = 1 / (1 / sm_read + ranks / sm_write)  # tokens of a GB, each second
    share = ranks * (num_ranks - 1) / num_ranks  # of a token, over NVLink
    links = (nvlink or envs.get_nvlink_gbs()) / share if share else per_sm
    if num_nodes > 1:
        nodes = expected_ranks(num_nodes, num_experts, num_topk) * (num_nodes - 1) / num_nodes
        links = min(links, (rdma or envs.get_rdma_gbs()) / nodes)
    wanted = max(math.ceil(_HEADROOM * links / per_sm), _FEWEST_SMS if overlaps else _FEWEST_SMS_ALONE)
    most = torch.cuda.get_device_properties(device).multi_processor_count
    return max(min(wanted + wanted % 2, most - most % 2), _FEWEST_SMS)
