"""How ranks find each other, and the native buffer that they share."""

from __future__ import annotations

import itertools
import os
import warnings
import weakref
from typing import Any, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from . import _native
from .arguments import type_name
from .errors import InvalidArgument, UseAfterDestroy, WrongUse
from .exchanges import GroupExchanges
from .ranges import with_ranges
from .results import Results
from .utils.event import EventHandle, EventOverlap
from .utils.nvlink import check_nvlink_connections

_TEXT_BYTES = 500

#: The native buffers of this process in the order in which they were made, for ``metrics``.
made: "weakref.WeakValueDictionary[int, _native.Buffer]" = weakref.WeakValueDictionary()
_numbers = itertools.count()


def is_group(group: Any) -> bool:
    """Whether it has the methods of a ``torch.distributed`` group: ``rank`` and ``size`` of mpi4py's communicators are
    numbers."""
    return all(callable(getattr(group, name, None)) for name in ("rank", "size"))


class Peers:
    """The ranks of a ``torch.distributed`` group, or of a communicator with mpi4py's methods."""

    def __init__(self, group: Optional[Any], comm: Optional[Any] = None) -> None:
        if group is not None:
            if not is_group(group):
                if group is getattr(dist.GroupMember, "NON_GROUP_MEMBER", None):
                    raise InvalidArgument(f"group is {group}, allowed: a group with this process")
                raise TypeError(f"group is of type {type_name(group)}, expected a torch.distributed process group")
            self.group: Any = group
            self.rank: int = group.rank()
            self.size: int = group.size()
        elif comm is not None:
            for method in ("Get_rank", "Get_size", "allgather"):
                if not hasattr(comm, method):
                    raise TypeError(f"comm is of type {type_name(comm)}, expected an mpi4py communicator: {method} is missing")
            self.group = comm
            self.rank = comm.Get_rank()
            self.size = comm.Get_size()
        else:
            raise ValueError("neither group nor comm is given: the buffer needs one of them to find its peers")
        if not 0 <= self.rank < self.size:
            raise InvalidArgument(f"the rank of this process in group is {self.rank}, allowed: 0 to {self.size - 1}")
        self._exchanges = GroupExchanges.of(self.group, self.rank, self.size, by_torch=group is not None)
        #: Of the buffer that is being made: what goes through it carries the buffer's number.
        self.bootstrap: _native.Bootstrap = self._exchanges.bootstrap.for_buffer()

    def all_gather(self, mine: bytes) -> Sequence[bytes]:
        """Collective, while a buffer is being made. Texts of different lengths, of which the first 500 bytes arrive."""
        padded = mine[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")  # ranks bring equally many bytes
        try:
            return [theirs.rstrip(b"\0") for theirs in self.bootstrap.all_gather(padded)]
        except BaseException:
            self.bootstrap = None  # type: ignore[assignment]  # so this rank leaves the buffer, even while the exception is kept
            raise


def device_index(group: Optional[Any]) -> int:
    """The current CUDA device, or -1 where the program does not use CUDA."""
    backend = ""
    if isinstance(group, dist.ProcessGroup):
        backend = str(dist.get_backend(group))
    nccl = "nccl" in backend and torch.cuda.is_available()
    if nccl or torch.cuda.is_initialized() or torch.empty(0).is_cuda:
        return torch.cuda.current_device()
    return -1


class NativeOwner:
    """What ``Buffer`` and ``ElasticBuffer`` have in common: they own a native buffer."""

    #: ``None`` after ``destroy``.
    runtime: Optional["_native.Buffer"]
    group: Any
    explicitly_destroy: bool
    _comm_stream: Optional[torch.cuda.Stream]
    #: Whether EP_AVOID_RECORD_STREAM counts: programs of the first interface may drop the event.
    _events_may_keep: bool = False

    def _make(
        self,
        peers: Peers,
        device: int,
        memory: int,
        between_nodes: Tuple[int, int],
        low_latency: Tuple[int, bool, bool] = (0, False, True),
        timeout_s: float = -1.0,
        num_qps_per_rank: int = 0,
        window_bytes: int = 0,
        stream: Optional[torch.cuda.Stream] = None,
    ) -> "_native.Buffer":
        """Collective: makes the native buffer, with ``memory`` bytes for received tensors. ``between_nodes``: takes the place of
        ``memory`` and ``window_bytes`` with several nodes; ``low_latency``: bytes, masking, allow_nvlink; ``timeout_s`` below
        0: DEEP_EP_TIMEOUT_S; ``num_qps_per_rank`` 0: as many lanes as the library wants; ``window_bytes``: of the heap, for
        what comes in passes; 0: as the library wants; ``stream``: the communication stream, by default a new one."""
        self.group = peers.group
        if device >= 0 and is_group(peers.group):
            check_nvlink_connections(peers.group, peers.all_gather)
        # A stream of the framework: it is never destroyed, so tensors may be recorded on it for any time.
        if stream is None and device >= 0:
            stream = torch.cuda.Stream(device=device, priority=-1)
        self._comm_stream, handle = stream, 0 if stream is None else stream.cuda_stream
        memory_between, window_between = between_nodes
        low_latency_bytes, masking, allow_nvlink = low_latency
        native = _native.Buffer(
            peers.bootstrap, device, memory, window_bytes, memory_between, window_between, handle, low_latency_bytes, masking,
            allow_nvlink, timeout_s, num_qps_per_rank, Results(device, stream),
        )  # fmt: skip
        made[next(_numbers)] = native
        self.runtime = native = with_ranges(native)
        # Also runs at interpreter exit, while everything it needs is still there.
        end = let_go, native, peers.rank, type(self).__name__, self.explicitly_destroy, os.getpid()
        self._finalizer = weakref.finalize(self, *end)
        return native

    def _alive(self) -> "_native.Buffer":
        if self.runtime is None:
            raise UseAfterDestroy("the buffer was used after destroy()")
        return self.runtime

    def destroy(self) -> None:
        """Collective: waits for this rank's work, then for all ranks, and frees the memory. Tensors that calls returned
        stay valid.

        It does not wait where a call of this buffer has failed here, or on a rank that has made another buffer since;
        and never longer than ``DEEP_EP_TIMEOUT_S`` seconds (``TimeoutError``; over a communicator of mpi4py for as long as
        that does). The buffer is gone in any case.

        A buffer made without ``explicitly_destroy=True`` refuses it, as upstream's does, by ``errors.WrongUse``, which is an
        ``AssertionError``, and stays usable: drop the object instead. A second ``destroy`` of a ``Buffer`` raises
        ``UseAfterDestroy``; that of another buffer does nothing."""
        if not self.explicitly_destroy:
            raise WrongUse("destroy() needs a buffer made with explicitly_destroy=True")
        native = self._alive()
        self._finalizer.detach()
        self.runtime = None
        with GroupExchanges.known(self.group).bounded(_native.default_timeout_s()):
            native.destroy()

    def suspend(self) -> None:
        """Collective, the host waits: gives the driver the GPU memory of the buffer's heap while an engine sleeps. The host
        keeps what the heap holds, which takes as much memory there. After ``resume`` tensors, handles and recorded graphs are
        as before; until then calls raise ``InvalidArgument``, and nothing may touch tensors that are in the heap. Raises
        ``Unsupported`` with ranks that RDMA reaches, ``OutOfMemory`` if a host has no room; the buffer is as before then."""
        self._alive().suspend()

    def resume(self) -> None:
        """Collective: the end of ``suspend``. ``OutOfMemory`` if a GPU has no memory: the buffer is suspended still."""
        self._alive().resume()

    def describe(self) -> str:
        """A few lines for people to read: ranks and nodes, memory and its parts, how low-latency calls reach other ranks,
        and how many SMs calls use by default. The wording may change."""
        return self._alive().describe()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The communication stream. A buffer on the CPU has none."""
        self._alive()
        if self._comm_stream is None:
            raise RuntimeError("get_comm_stream: the buffer is on the CPU, where calls do not use a CUDA stream")
        return self._comm_stream

    def _event(self, event: Optional[EventHandle], *inputs: Any) -> EventOverlap:
        """Of a call with these inputs (tensors, tuples of such, ``None``), whose memory is not reused before the communication
        stream has read them."""
        if event is None or self._comm_stream is None:
            return EventOverlap(event)
        each_input = itertools.chain.from_iterable(given if isinstance(given, (tuple, list)) else (given,) for given in inputs)
        given = [tensor for tensor in each_input if tensor is not None and tensor.is_cuda]
        if self._events_may_keep and _native.environment_text("EP_AVOID_RECORD_STREAM") == "1":
            return EventOverlap(event, given)
        for tensor in given:
            tensor.record_stream(self._comm_stream)
        return EventOverlap(event)


def event_given(previous_event: Any) -> bool:
    """Whether there is something to wait for: an ``EventOverlap`` may be empty."""
    return getattr(previous_event, "event", previous_event) is not None


def let_go(runtime: "_native.Buffer", rank: int, kind: str, explicitly_destroy: bool, process: int) -> None:
    """What happens to a buffer that nobody destroyed: its memory goes, no other rank is talked to."""
    runtime.drop()
    if explicitly_destroy and os.getpid() == process:  # a forked child leaves it to its parent
        text = f"deep_ep: rank {rank}: {kind} made with explicitly_destroy=True was never destroyed"
        warnings.warn(text, ResourceWarning, stacklevel=2)
