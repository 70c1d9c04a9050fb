"""Events, and a check of how GPUs are connected."""

from __future__ import annotations

import os
from typing import Any, Optional, Sequence

import torch
import torch.distributed as dist

from ._native import EventHandle

__all__ = ["EventHandle", "EventOverlap", "check_nvlink_connections"]


class EventOverlap:
    """A point in the communication stream's work, as calls return it.

    As a context manager it waits at the end of the block, so that what runs inside overlaps with communication::

        with buffer.dispatch(..., async_finish=True)[-1]:
            independent_computation()

    Attributes:
        event: an ``EventHandle``, or ``None`` when there is nothing to wait for (the call was synchronous).
        extra_tensors: tensors that must live as long as the event.
    """

    __slots__ = ("event", "extra_tensors", "__weakref__")

    def __init__(self, event: Optional[EventHandle] = None, extra_tensors: Optional[Sequence[torch.Tensor]] = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """The stream that is current now waits for the event; the host does not."""
        assert self.event is not None, "there is no event: the call was made without async_finish"
        self.event.current_stream_wait()

    def __enter__(self) -> "EventOverlap":
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        if self.event is not None:
            self.event.current_stream_wait()


def check_nvlink_connections(group: Any) -> None:
    """Refuses PCIe GPUs that are not joined by NVLink bridges in pairs. Collective over ``group`` for such GPUs only."""
    if not torch.cuda.is_available() or "PCIE" not in torch.cuda.get_device_name(torch.cuda.current_device()).upper():
        return
    size = group.size()
    assert size <= 2, "PCIe GPUs have NVLink bridges in pairs only: at most 2 ranks"

    import pynvml  # type: ignore[import-not-found]

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip(",")
    mine = torch.cuda.current_device()
    ordinals = [int(entry) for entry in visible.split(",")] if visible else list(range(torch.cuda.device_count()))
    physical: list = [None] * size
    dist.all_gather_object(physical, ordinals[mine], group)
    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in physical]
        for i, first in enumerate(handles):
            for j, second in enumerate(handles[:i]):
                status = pynvml.nvmlDeviceGetP2PStatus(first, second, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
                assert status == pynvml.NVML_P2P_STATUS_OK, f"GPUs {physical[i]} and {physical[j]} have no NVLink between them"
    finally:
        pynvml.nvmlShutdown()
