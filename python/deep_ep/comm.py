"""What buffers of V2.5 share: domains, the communication stream, the barrier."""

from __future__ import annotations

import functools
from typing import Any, Optional

import torch

from .errors import InvalidArgument, _left_out
from .utils.envs import get_logical_domain_size as get_logical_domain_size, get_physical_domain_size as get_physical_domain_size


def barrier(
    buffer: Any,
    wait_comm_stream: bool = True,
    with_cpu_sync: bool = False,
    sequential: bool = True,
    context_idx: Optional[int] = None,
    use_comm_stream: Optional[bool] = None,
) -> None:
    """Collective: work behind it on the current stream begins when all ranks have reached it. ``wait_comm_stream``: it comes
    behind the communication stream's work, too, and that stream's later work behind it. ``with_cpu_sync``: the host waits for
    the device before and after. ``use_comm_stream``: what ``wait_comm_stream`` is called in V2."""
    if context_idx not in (None, 0):
        raise InvalidArgument(f"context_idx is {context_idx}, allowed: 0 or None")
    both = wait_comm_stream if use_comm_stream is None else use_comm_stream
    synchronize = with_cpu_sync and buffer._device.type == "cuda"
    if synchronize:
        torch.cuda.synchronize(buffer._device)
    event = buffer._native.barrier(bool(both) and buffer._comm_stream is not None)
    if event is not None:
        event.current_stream_wait()
    if synchronize:
        torch.cuda.synchronize(buffer._device)


def get_comm_stream(buffer: Any = None) -> torch.cuda.Stream:
    """The communication stream: one for all objects of ``EPBuffer`` on the current device."""
    return _comm_stream_of(torch.cuda.current_device()) if buffer is None else buffer.get_comm_stream()


@functools.lru_cache(maxsize=None)
def _comm_stream_of(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device=device, priority=-1)


NCCLCommHandle = _left_out("NCCLCommHandle")
get_nccl_comm_handle = _left_out("get_nccl_comm_handle")


def destroy_all_managed_nccl_comm() -> None:
    """Does nothing: there is no communicator of NCCL."""
