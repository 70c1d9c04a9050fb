"""A check of how GPUs are connected."""

from __future__ import annotations

import os
from typing import Any, Callable, Optional, Sequence

import torch
import torch.distributed as dist

__all__ = ["check_nvlink_connections"]


def check_nvlink_connections(group: Any, all_gather: Optional[Callable[[bytes], Sequence[bytes]]] = None) -> None:
    """Refuses PCIe GPUs that are not joined by NVLink bridges in pairs. Collective over ``group`` for such GPUs only, by
    ``all_gather`` if that is given."""
    if not torch.cuda.is_available() or "PCIE" not in torch.cuda.get_device_name(torch.cuda.current_device()).upper():
        return
    size = group.size()
    assert size <= 2, "PCIe GPUs have NVLink bridges in pairs only: at most 2 ranks"

    import pynvml  # type: ignore[import-not-found]

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip(",")
    mine = torch.cuda.current_device()
    ordinals = [int(entry) for entry in visible.split(",")] if visible else list(range(torch.cuda.device_count()))
    physical: list = [None] * size
    if all_gather is None:
        dist.all_gather_object(physical, ordinals[mine], group)
    else:
        physical = [int.from_bytes(theirs, "little") for theirs in all_gather(ordinals[mine].to_bytes(8, "little"))]
    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in physical]
        for i, first in enumerate(handles):
            for j, second in enumerate(handles[:i]):
                status = pynvml.nvmlDeviceGetP2PStatus(first, second, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
                assert status == pynvml.NVML_P2P_STATUS_OK, f"GPUs {physical[i]} and {physical[j]} have no NVLink between them"
    finally:
        pynvml.nvmlShutdown()
