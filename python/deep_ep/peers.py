"""The native buffer that the ranks of a group share, as every interface's buffers have it."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import os
import re
import warnings
import weakref
from typing import Any, Dict, Optional

import torch

from . import _native
from .errors import Error, UseAfterDestroy, WrongUse
from .exchanges import bootstrap_of, device_of, is_communicator, rank_and_size, timeout_s as timeout_of_exchanges
from .ranges import with_ranges
from .results import Results
from .utils.event import EventHandle, EventOverlap
from .utils.nvlink import check_nvlink_connections

SMALLEST_HEAP = 64 << 20

# The native buffers of this process in the order in which they were made, by their addresses.
_made: "weakref.WeakValueDictionary[int, _native.Buffer]" = weakref.WeakValueDictionary()


class OfThisProcess:
    """What stands for memory of this process and for its peers."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        name = type(self).__name__
        raise TypeError(f"{name} cannot be copied or pickled: it has memory of this process; make one in each process")


class NativeOwner(OfThisProcess):
    """What ``Buffer`` and ``ElasticBuffer`` have in common: they own a native buffer."""

    #: ``None`` after ``destroy``.
    runtime: Optional["_native.Buffer"]
    #: The same, also after ``destroy``, when its calls raise ``UseAfterDestroy``.
    _native: "_native.Buffer"
    group: Any
    explicitly_destroy: bool
    _device: torch.device
    _comm_stream: Optional[torch.cuda.Stream]
    #: Whether EP_AVOID_RECORD_STREAM counts: programs of the first interface may drop the event.
    _events_may_keep: bool = False

    def _make(self, stream: Optional[torch.cuda.Stream] = None, **options: Any) -> None:
        """Collective: makes the native buffer of ``group``. ``stream``: the communication stream, by default a new one;
        ``options``: of the library that are not at their defaults, those ``..._between_nodes`` for several nodes."""
        device = device_of(self.group)
        if device.type == "cuda" and not is_communicator(self.group):
            check_nvlink_connections(self.group)
        # A stream of the framework: it is never destroyed, so tensors may be recorded on it for any time.
        if stream is None and device.type == "cuda":
            stream = torch.cuda.Stream(device=device, priority=-1)
        self._device, self._comm_stream, handle = device, stream, 0 if stream is None else stream.cuda_stream
        ordinal = -1 if device.index is None else device.index
        native = _native.Buffer(bootstrap_of(self.group), ordinal, handle, Results(device, stream), **options)
        _made[id(native)] = native
        self.runtime = self._native = native = with_ranges(native)
        # Also runs at interpreter exit, while everything it needs is still there.
        end = _let_go, native, rank_and_size(self.group)[0], type(self).__name__, self.explicitly_destroy, os.getpid()
        self._finalizer = weakref.finalize(self, *end)

    def destroy(self) -> None:
        """Collective: waits for this rank's work, then for all ranks, and frees the memory. Tensors that calls returned
        stay valid.

        It does not wait where a call of this buffer has failed here, or on a rank that has made another buffer since.
        It never waits longer than ``DEEP_EP_TIMEOUT_S`` seconds (``TimeoutError``; over a communicator of mpi4py for as long
        as that does). The buffer is gone in any case, unless another call of it is running: then it stays as it was. Without
        ``explicitly_destroy`` it raises ``errors.WrongUse``, an ``AssertionError``. A second ``destroy`` does nothing."""
        if not self.explicitly_destroy:
            raise WrongUse("destroy() needs a buffer made with explicitly_destroy=True")
        context = contextvars.copy_context()
        context.run(timeout_of_exchanges.set, _native.default_timeout_s())
        try:
            context.run(self._native.destroy)
        finally:
            if self._native.ended:
                self._finalizer.detach()
                self.runtime = None

    def suspend(self) -> None:
        """Collective, the host waits: gives the driver the GPU memory of the buffer's heap; the host keeps what the heap holds.
        After ``resume`` tensors, handles and graphs are as before; until then calls raise ``InvalidArgument``, and nothing may
        touch tensors in the heap. ``Unsupported`` with ranks that RDMA reaches, ``OutOfMemory`` if a host has no room."""
        self._native.suspend()

    def resume(self) -> None:
        """Collective: the end of ``suspend``. ``OutOfMemory`` if a GPU has no memory: the buffer is suspended still."""
        self._native.resume()

    def describe(self) -> str:
        """A few lines for people to read: ranks and nodes, memory and its parts, how low-latency calls reach other ranks,
        and how many SMs calls use by default. The wording may change."""
        return self._native.describe()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The communication stream. A buffer on the CPU has none."""
        self._check_alive()
        if self._comm_stream is None:
            raise RuntimeError("get_comm_stream: the buffer is on the CPU, where calls do not use a CUDA stream")
        return self._comm_stream

    def _check_alive(self) -> None:
        if self.runtime is None:
            raise UseAfterDestroy("the buffer was used after destroy")

    def _event(self, event: Optional[EventHandle], *inputs: Any) -> EventOverlap:
        """Of a call with these inputs (tensors, tuples of such, others), whose memory is not reused before the communication
        stream has read them."""
        if event is None or self._comm_stream is None:
            return EventOverlap(event)
        each_input = itertools.chain.from_iterable(given if isinstance(given, (tuple, list)) else (given,) for given in inputs)
        given = [tensor for tensor in each_input if isinstance(tensor, torch.Tensor) and tensor.is_cuda]
        if self._events_may_keep and _native.environment_text("EP_AVOID_RECORD_STREAM") == "1":
            return EventOverlap(event, given)
        for tensor in given:
            tensor.record_stream(self._comm_stream)
        return EventOverlap(event)


def event_in(given: Any) -> Any:
    """What there is to wait for: the event of an ``EventOverlap``, which may have none, or what is given."""
    return getattr(given, "event", given)


def _let_go(native: "_native.Buffer", rank: int, kind: str, explicitly_destroy: bool, process: int) -> None:
    """What happens to a buffer that was not destroyed: its memory goes, no other rank is talked to."""
    native.drop()
    if explicitly_destroy and os.getpid() == process:  # a forked child leaves it to its parent
        text = f"deep_ep: rank {rank}: {kind} made with explicitly_destroy=True was never destroyed"
        warnings.warn(text, ResourceWarning, stacklevel=2)


def metrics() -> Dict[str, Any]:
    """Numbers of all buffers of this process, oldest first, for programs that export them: docs/reference/python.md shows one.
    Calls do not wait for it, and another thread than theirs may ask. ``calls`` are those that have returned, without those that
    a CUDA graph replays, and ``bytes`` of the rows of this rank's tokens, as dispatch reads and combine writes them."""
    buffers = []
    for native in [each() for each in _made.valuerefs()]:  # at once: another thread may be making a buffer
        if native is not None:
            with contextlib.suppress(Error):  # it has ended, or is the parent's of this forked child
                found = native.metrics()
                found["handlers"] = sorted(set(re.findall(r"handler (\w+)", found.pop("description"))))
                buffers.append(found)
    return {"version": _native.version, "buffers": buffers}
