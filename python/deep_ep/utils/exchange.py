"""Collectives of the default group for timing and references. It may be of gloo with tensors on GPUs, because ranks share these.

Gloo would take such tensors, too, but its threads make the first GPU current: every process gets a second context there, with
connections to it that CUDA MPS has few of.
"""

from __future__ import annotations

from typing import List

import torch
import torch.distributed as dist


def _by_host(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and str(dist.get_backend()) == "gloo"


def all_reduce(tensor: torch.Tensor) -> None:
    """Sums of all ranks, in place."""
    host = tensor.cpu() if _by_host(tensor) else tensor
    dist.all_reduce(host)
    if host is not tensor:
        tensor.copy_(host)


def all_to_all(received: torch.Tensor, sent: torch.Tensor, rows_received: List[int], rows_sent: List[int]) -> None:
    """Rows for each rank in turn, against those that the ranks have for this one."""
    host = torch.empty(received.shape, dtype=received.dtype, device="cpu") if _by_host(sent) else received
    dist.all_to_all_single(host, sent.to(host.device), rows_received, rows_sent)
    if host is not received:
        received.copy_(host)
