"""Memory for what calls return.

Results are tensors of PyTorch: its allocator owns their memory, so that all it knows to do with memory holds for them, too
(``untyped_storage().resize_(0)``, ``record_stream``, pools of CUDA graphs, counts). On GPUs the memory lies in the buffer's
heap where possible, so that peers write rows straight into place: a pool of PyTorch's allocator takes its segments from
there.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, List, Optional, Sequence, Tuple

import torch

from . import _native

#: Shape, strides and dtype of a tensor.
Wanted = Sequence[Tuple[Tuple[int, ...], Tuple[int, ...], torch.dtype]]


class Results:
    """Makes tensors. The native buffer makes them itself where PyTorch's pools are enough.

    PyTorch never gives the segments of a pool back while the pool is in use, cannot join them, and cuts blocks of any size from
    a large one. So the native buffer has the pool take segments with room for two of the largest calls so far. What it leaves
    of the heap is for other streams, whose memory PyTorch keeps apart, for small tensors, and for memory of the library.
    """

    def __init__(self, device: torch.device, communication: Optional[torch.cuda.Stream]) -> None:
        self._device, self._communication = device, communication
        self._pool: Any = None

    def make(self, wanted: Wanted, on_communication: bool, used_by_other: bool, segment: int = 0) -> List[torch.Tensor]:
        """In PyTorch's ordinary memory. ``on_communication``: for the communication stream instead of the current one;
        ``used_by_other``: the other one of the two uses it, too. ``segment``: bytes of one to take first, if there is room."""
        # torch.cuda.stream(None) takes ten times as long.
        with torch.cuda.stream(self._communication) if on_communication else contextlib.nullcontext():
            if segment > 0:
                with contextlib.suppress(torch.cuda.OutOfMemoryError):
                    torch.empty(segment, dtype=torch.uint8, device=self._device)
            made = [torch.empty_strided(shape, strides, dtype=dtype, device=self._device) for shape, strides, dtype in wanted]
        if used_by_other:
            other = torch.cuda.current_stream(self._device) if on_communication else self._communication
            for tensor in made:
                tensor.record_stream(other)  # type: ignore[arg-type]
        return made

    def make_in_heap(
        self, wanted: Wanted, on_communication: bool, used_by_other: bool, segment: int
    ) -> Optional[List[torch.Tensor]]:
        """The same in the heap; ``None``: it has no room, or this PyTorch, as it is set, has no pools. The native buffer sees to
        it that the pool's segments come from the heap."""
        if self._device.type != "cuda" or not _has_pools():
            return None
        try:
            if self._pool is None:
                self._pool = torch.cuda.MemPool(_allocator().allocator())
            if segment > 0 and torch.cuda.memory_stats(self._device).get("max_split_size", -1) >= 0:
                segment = 0  # set so, the allocator does not cut large blocks
            # Modes, as torch.set_default_device sets one, take longer than the calls.
            with torch._C.DisableTorchFunction(), torch.cuda.use_mem_pool(self._pool, self._device):
                return self.make(wanted, on_communication, used_by_other, segment)
        except (RuntimeError, TypeError):  # among them OutOfMemoryError
            return None


def _has_pools() -> bool:
    """PyTorch 2.8 and later. Pools of older versions take what other threads allocate at the same time."""
    return hasattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool")


@functools.lru_cache(maxsize=None)
def _allocator() -> Any:
    """PyTorch's pools refer to it, for longer than they live."""
    return torch.cuda.memory.CUDAPluggableAllocator(_native.__file__, "deep_ep_allocate_segment", "deep_ep_free_segment")
