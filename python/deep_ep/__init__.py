"""Expert-parallel communication for Mixture-of-Experts models: dispatch tokens to experts, combine their results.

On CUDA tensors everything runs on GPUs; on CPU tensors, with a process group of the ``gloo`` backend, the same kernels
run on the CPU. Importing starts neither CUDA nor a thread.
"""

import torch

from .utils import EventOverlap  # isort: skip  (buffer needs it)
from .buffer import Buffer, Config

#: dtype of expert indices. Calls accept ``torch.int32`` as well.
topk_idx_t: torch.dtype = torch.int64

__all__ = ["Buffer", "EventOverlap", "Config", "topk_idx_t"]
