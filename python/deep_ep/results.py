"""Memory for what calls return.

Results are tensors of PyTorch: its allocator owns their memory, so that all it knows to do with memory holds for them, too
(``untyped_storage().resize_(0)``, ``record_stream``, pools of CUDA graphs, counts). On GPUs the memory lies in the buffer's
heap where possible, so that peers write rows straight into place: a pool of PyTorch's allocator takes its segments from
there.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
from typing import Any, DefaultDict, List, Optional, Sequence, Tuple

import torch

from . import _native

#: Shape, strides and dtype of a tensor.
Wanted = Sequence[Tuple[Tuple[int, ...], Tuple[int, ...], torch.dtype]]

# Of PyTorch's allocator: segments are multiples of this, and blocks of that.
_SEGMENT = 2 << 20
_ALIGNMENT = 512
_LEAST = 16 << 20  # of a segment for large blocks
_MOST_SKIPPED = 63


class _Stream:
    """What the pool has had for a stream."""

    segment = 0  # bytes of the largest one
    skip = 0  # calls that do not ask
    missed = 0  # what skip becomes when there is no room again

    def miss(self) -> None:
        """PyTorch has looked everywhere, which takes long, and tells those who observe it: so less and less often."""
        self.skip = self.missed
        self.missed = min(2 * self.missed + 1, _MOST_SKIPPED)


class Results:
    """Makes tensors. The native buffer makes them itself where PyTorch's pools are enough.

    PyTorch never gives the segments of a pool back while the pool is in use, cannot join them, and cuts blocks of any size from
    a large one. So the pool takes segments with room for two of the largest calls so far. What it leaves of the heap is for
    other streams, whose memory PyTorch keeps apart, for small tensors, and for memory of the library.
    """

    def __init__(self, device: torch.device, communication: Optional[torch.cuda.Stream]) -> None:
        #: Whether ``make_in_heap`` may have memory.
        self.in_heap: bool = device.type == "cuda" and _has_pools()
        self._device, self._communication = device, communication
        self._pool: Any = None
        self._streams: DefaultDict[int, _Stream] = collections.defaultdict(_Stream)
        self._last = _Stream()

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
        self, wanted: Wanted, stream: int, on_communication: bool, used_by_other: bool, largest: int
    ) -> Optional[List[torch.Tensor]]:
        """The same in the heap, of which ``largest`` bytes are free in one piece; ``None``: it has no room. ``stream``: the
        handle of that stream. The native buffer sees to it that the pool's segments come from the heap."""
        of_stream = self._streams[stream]
        if of_stream.skip > 0:
            of_stream.skip -= 1
            return None
        try:
            if self._pool is None:
                self._pool = torch.cuda.MemPool(_allocator().allocator())
            # Modes, as torch.set_default_device sets one, take longer than the calls.
            with torch._C.DisableTorchFunction(), torch.cuda.use_mem_pool(self._pool, self._device):
                made = self.make(wanted, on_communication, used_by_other, self._segment_for(of_stream, wanted, largest))
        except torch.cuda.OutOfMemoryError:
            of_stream.miss()
            return None
        except (RuntimeError, TypeError):  # this PyTorch, or what its allocator is set to, has no such pools
            self.in_heap = False
            return None
        self._last = of_stream
        return made

    def placed(self, in_heap: bool) -> None:
        """Tells where the tensors of the last ``make_in_heap`` lie. They lie outside of the heap if the program uses another
        pool, or if PyTorch's allocator is set to do without ours."""
        if in_heap:
            self._last.missed = 0
        else:
            self._last.miss()

    def _segment_for(self, of_stream: _Stream, wanted: Wanted, largest: int) -> int:
        """Bytes of a larger segment that the pool is to take for the stream, 0 if it has one with room for ``wanted``."""
        bytes = sum(math.prod(shape) * dtype.itemsize + _ALIGNMENT for shape, _, dtype in wanted)
        if bytes <= of_stream.segment:
            return 0
        of_stream.segment = max(2 * bytes, _LEAST) // _SEGMENT * _SEGMENT
        # Set so, the allocator does not cut large blocks.
        cuts = torch.cuda.memory_stats(self._device).get("max_split_size", -1) < 0
        return of_stream.segment if cuts and of_stream.segment <= largest else 0


def _has_pools() -> bool:
    """PyTorch 2.8 and later. Pools of older versions take what other threads allocate at the same time."""
    return hasattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool")


@functools.lru_cache(maxsize=None)
def _allocator() -> Any:
    """PyTorch's pools refer to it, for longer than they live."""
    return torch.cuda.memory.CUDAPluggableAllocator(_native.__file__, "deep_ep_allocate_segment", "deep_ep_free_segment")
