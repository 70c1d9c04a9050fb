# SPDX-License-Identifier: MIT
"""Expert-parallel communication for Mixture-of-Experts models: dispatch tokens to experts, combine their results.

On CUDA tensors everything runs on GPUs; on CPU tensors, with a process group of the ``gloo`` backend, the same kernels
run on the CPU. Importing starts neither CUDA nor a thread.
"""

try:
    import torch as _torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "deep_ep needs PyTorch 2.4 or later, which is not installed here: install the build of it that fits your "
        "GPUs first, as pip does not do that for deep_ep (the command deep_ep works without)",
        name="torch",
    ) from None

from .utils import EventHandle, EventOverlap  # isort: skip  (buffer needs it)
from . import comm, legacy
from .buffer import Buffer, Config
from .buffers.allocator import ALIGNMENT as _ALLOCATION_ALIGNMENT
from .buffers.allocator import BufferAllocator
from .buffers.base import BufferBase
from .buffers.bucket import BucketBuffer, BucketSession
from .buffers.elastic import ElasticBuffer
from .buffers.engram import EngramBuffer
from .buffers.ep import EPBuffer, EPHandle
from .buffers.pp import PPBuffer
from .hybrid_ep_buffer import HybridEPBuffer, HybridEpConfigInstance
from .peers import metrics
from .comm import destroy_all_managed_nccl_comm, get_logical_domain_size, get_physical_domain_size
from .version import __version__, warn_of_several

#: dtype of expert indices. Calls accept ``torch.int32`` as well.
topk_idx_t: _torch.dtype = _torch.int64


def get_num_allocation_alignment() -> int:
    """Sizes of buffers, and of planned tensors in them, are multiples of this."""
    return _ALLOCATION_ALIGNMENT


def get_num_tma_alignment() -> int:
    """Bytes of an expert that the load-balance calls move are a multiple of this."""
    return 32


def get_num_rdma_alignment() -> int:
    """Upstream's rows between nodes are multiples of this; here they need not be."""
    return 64


# Engines take the presence of ElasticBuffer here for the second interface.
__all__ = [
    "BucketBuffer", "BucketSession", "Buffer", "BufferAllocator", "BufferBase", "Config", "EPBuffer", "EPHandle",
    "ElasticBuffer", "EngramBuffer", "EventHandle", "EventOverlap", "HybridEPBuffer",
    "HybridEpConfigInstance", "PPBuffer", "__version__", "comm",
    "destroy_all_managed_nccl_comm", "get_logical_domain_size", "get_num_allocation_alignment",
    "get_num_rdma_alignment", "get_num_tma_alignment", "get_physical_domain_size", "legacy", "metrics",
    "topk_idx_t",
]  # fmt: skip

warn_of_several()
del warn_of_several
