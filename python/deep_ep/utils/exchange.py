"""Collectives of tests and references, where a group may be of gloo with tensors on GPUs, because ranks share these.

Gloo would take such tensors, too, but its threads make the first GPU current: every process gets a second context there, with
connections to it that CUDA MPS has few of.
"""

from __future__ import annotations

from typing import Any, List, Optional

import torch
import torch.distributed as dist

__all__ = ["all_reduce", "all_to_all"]


def _by_host(tensor: torch.Tensor, group: Optional[Any]) -> bool:
    return tensor.is_cuda and str(dist.get_backend(group)) == "gloo"


def all_reduce(tensor: torch.Tensor, group: Optional[Any] = None) -> None:
    """Sums of all ranks, in place."""
    host = tensor.cpu() if _by_host(tensor, group) else tensor
    dist.all_reduce(host, group=group)
    if host is not tensor:
        tensor.copy_(host)


def all_to_all(received: torch.Tensor, sent: torch.Tensor, rows_received: List[int], rows_sent: List[int]) -> None:
    """Rows for each rank in turn, against those that the ranks have for this one, in the default group."""
    if not _by_host(sent, None):
        dist.all_to_all_single(received, sent, rows_received, rows_sent)
        return
    host = torch.empty(received.shape, dtype=received.dtype, device="cpu")
    dist.all_to_all_single(host, sent.cpu(), rows_received, rows_sent)
    received.copy_(host)
