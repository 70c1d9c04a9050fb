"""Expert-parallel communication for Mixture-of-Experts models: dispatch tokens to experts, combine their results.

On CUDA tensors everything runs on GPUs; on CPU tensors, with a process group of the ``gloo`` backend, the same kernels
run on the CPU. Importing starts neither CUDA nor a thread.
"""

import torch

from .utils import EventHandle, EventOverlap  # isort: skip  (buffer needs it)
from . import legacy
from .buffer import Buffer, Config
from .version import __version__

#: dtype of expert indices. Calls accept ``torch.int32`` as well.
topk_idx_t: torch.dtype = torch.int64

# Not here: deep_ep.buffers.elastic.ElasticBuffer. Engines take its presence in this module for the wish to use it, and it
# has not run on GPUs yet.
__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "__version__", "legacy", "topk_idx_t"]
