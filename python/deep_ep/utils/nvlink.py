"""A check of how GPUs are connected."""

from __future__ import annotations

import ctypes
import socket
import warnings
from typing import Any, List

import torch
import torch.distributed as dist

from .. import _native
from ..errors import WrongUse

_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK


def joined_by_nvlink(first: str, second: str) -> bool:
    """What NVML, the driver's management library, says of the GPUs at these PCI addresses: numbers depend on CUDA_VISIBLE_DEVICES,
    where UUIDs may stand, too, and on CUDA_DEVICE_ORDER. OSError where it does not tell."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")

    def call(name: str, *arguments: Any) -> None:
        error = getattr(nvml, name)(*arguments)
        if error != 0:
            raise OSError(f"{name} returned {error}")

    call("nvmlInit_v2")
    try:
        handles = [ctypes.c_void_p(), ctypes.c_void_p()]
        for address, handle in zip((first, second), handles):
            call("nvmlDeviceGetHandleByPciBusId_v2", address.encode(), ctypes.byref(handle))
        status = ctypes.c_uint(1)
        call("nvmlDeviceGetP2PStatus", *handles, _NVLINK, ctypes.byref(status))
        return status.value == 0
    finally:
        nvml.nvmlShutdown()


def check_nvlink_connections(group: Any) -> None:
    """Refuses PCIe GPUs that are not joined by NVLink bridges in pairs. Collective over ``group`` for such GPUs only. Warns where
    the driver's library does not tell; ranks may differ if NVML fails on one of them."""
    if not torch.cuda.is_available() or "PCIE" not in torch.cuda.get_device_name(torch.cuda.current_device()).upper():
        return
    if group.size() > 2:
        raise WrongUse(f"group has {group.size()} ranks with PCIe GPUs, allowed: at most 2, as NVLink bridges join pairs")
    places: List[Any] = [None] * group.size()
    dist.all_gather_object(places, (socket.gethostname(), _native.gpu_address(torch.cuda.current_device())), group)
    if len(places) < 2 or places[0][0] != places[1][0]:
        return  # not one machine: ranks reach each other by RDMA
    first, second = (address for _, address in places)
    try:
        joined = joined_by_nvlink(first, second)
    except (OSError, AttributeError) as error:
        warnings.warn(f"deep_ep: NVML does not say whether GPUs {first} and {second} are joined by NVLink: {error}", stacklevel=2)
        return
    if not joined:
        raise WrongUse(f"GPUs {first} and {second} have no NVLink between them, allowed: PCIe GPUs with an NVLink bridge")
