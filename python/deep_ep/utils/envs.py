"""What test scripts in the manner of upstream's start with: processes, seeds, and facts about the machine."""

from __future__ import annotations

import contextlib
import os
import random
from typing import Any, Dict, Iterator, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from .. import _native
from ..errors import WrongUse
from ..exchanges import bootstrap_of, device_of, rank_and_size
from .nvlink import check_nvlink_connections as check_nvlink_connections

_seeds = [0, 0]  # of all ranks, of this one
_local_rank = 0
# One direction, in GB/s, by the major number of the GPU's compute capability; of others as of 9.
_NVLINK_GBS = {8: 300.0, 9: 450.0, 10: 900.0}


def init_seed(global_seed: int) -> None:
    """Seeds of PyTorch and Python: ``global_seed`` plus the rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    _seeds[:] = global_seed, global_seed + rank
    torch.manual_seed(_seeds[1])
    random.seed(_seeds[1])


def get_global_seed() -> int:
    """The seed that all ranks share."""
    return _seeds[0]


def get_local_seed() -> int:
    """The seed of this rank."""
    return _seeds[1]


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> Tuple[int, int, Any]:
    """One process a rank: rank, number of ranks, group. ``WORLD_SIZE`` and ``RANK`` count nodes. With GPUs: NCCL, with
    bfloat16 and CUDA as defaults; without: gloo on the CPU. If ranks are more than GPUs (CUDA MPS), they take the GPUs in
    turn, and gloo, as NCCL wants a GPU for each. RDMA traffic is of service level 1 where NCCL_IB_SL and
    EP_OVERRIDE_RDMA_SL do not say otherwise, as upstream's scripts have it."""
    for name in ("NCCL_IB_SL", "EP_OVERRIDE_RDMA_SL"):
        os.environ.setdefault(name, "1")
    global _local_rank
    _local_rank = local_rank
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "8361")
    nodes, node = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    settings: Dict[str, Any] = {"backend": "gloo"}
    if gpus:
        device = torch.device("cuda", local_rank % gpus)
        torch.cuda.set_device(device)
        if num_local_ranks <= gpus:
            settings = {"backend": "nccl", "device_id": device}  # without it NCCL guesses, and warns
        elif local_rank == 0:
            print(f"deep_ep: {num_local_ranks} ranks share {gpus} GPUs: their group is of gloo, not NCCL", flush=True)
    dist.init_process_group(
        init_method=f"tcp://{address}:{port}",
        world_size=nodes * num_local_ranks,
        rank=node * num_local_ranks + local_rank,
        **settings,
    )
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda" if gpus else "cpu")
    if not gpus:
        torch.set_num_threads(1)
    init_seed(seed)
    return dist.get_rank(), dist.get_world_size(), dist.new_group(list(range(nodes * num_local_ranks)))


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Prints (``once_in_node``: on the first rank of each node only), and waits for all ranks."""
    if not once_in_node or _local_rank == 0:
        print(s, flush=True)
    dist.barrier()


def get_physical_domain_size(group: Any) -> Tuple[int, int]:
    """Of a group, which is collective, or of a buffer: (nodes, ranks of each), where ranks of a node reach each other's memory."""
    if hasattr(group, "get_physical_domain_size"):
        return group.get_physical_domain_size()
    device = device_of(group)
    nodes = _native.count_nodes(bootstrap_of(group), -1 if device.index is None else device.index)
    return nodes, rank_and_size(group)[1] // nodes


def get_logical_domain_size(group: Any, allow_hybrid_mode: Optional[bool] = True) -> Tuple[int, int]:
    """Of a group or a buffer: (1, R), as this library gives the results of one domain, also between nodes."""
    return group.get_logical_domain_size() if hasattr(group, "get_logical_domain_size") else (1, group.size())


def check_torch_deterministic() -> None:
    """AssertionError where PyTorch fills every new tensor, which makes benchmarks meaningless."""
    filling = torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory
    if filling:
        raise WrongUse("PyTorch fills new tensors: set torch.utils.deterministic.fill_uninitialized_memory to False")


def get_nvlink_gbs(factor: float = 0.9) -> float:
    """GB/s of a GPU's NVLinks in one direction, times what of it can be used."""
    major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 9
    return factor * _NVLINK_GBS.get(major, _NVLINK_GBS[9])


def get_sm_read_gbs() -> float:
    """GB/s at which an SM reads; what sizes of kernels are reckoned with."""
    return 180


def get_sm_write_gbs() -> float:
    """GB/s at which an SM writes."""
    return 45


#: EP_NIC_NAME as it was when the package was imported, or mlx5_0.
_NIC = _native.environment_text("EP_NIC_NAME")


def get_rdma_gbs(nic_name: str = _NIC) -> float:
    """GB/s of a NIC's first port, by default of EP_NIC_NAME or mlx5_0; 0 where the system knows none."""
    try:
        with open(f"/sys/class/infiniband/{nic_name}/ports/1/rate") as file:
            return float(file.read().split()[0]) / 8
    except (OSError, ValueError, IndexError):
        return 0.0


def check_fast_rdma_atomic_support(nic_name: str = _NIC) -> bool:
    """Whether the NIC is there: this library's signals are atomics of 8 bytes, which every mlx5 NIC has."""
    return get_rdma_gbs(nic_name) > 0


@contextlib.contextmanager
def EnvOverride(envs: Sequence[Tuple[str, Any, bool]]) -> Iterator[None]:
    """Sets environment variables for a block: ``(name, value, enable)`` each, of which those that are not enabled stay as
    they are. A value of ``None`` removes the variable. At the end of the block all are what they were."""
    with contextlib.ExitStack() as before:
        for name, value, enable in envs:
            if enable:
                before.callback(_set_variable, name, os.environ.get(name))
                _set_variable(name, value)
        yield


def _set_variable(name: str, value: Any) -> None:
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = str(value)
