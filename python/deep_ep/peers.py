"""How ranks find each other, and the native buffer that they share."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import warnings
import weakref
from typing import Any, Dict, Optional, Tuple

import torch
import torch.distributed as dist

from . import _native
from .arguments import type_name
from .errors import InvalidArgument, UseAfterDestroy, WrongUse
from .exchanges import bootstrap_of, bounded, is_group
from .ranges import with_ranges
from .results import Results
from .utils.event import EventHandle, EventOverlap
from .utils.nvlink import check_nvlink_connections

# The native buffers of this process in the order in which they were made.
_made: "weakref.WeakValueDictionary[int, _native.Buffer]" = weakref.WeakValueDictionary()
_numbers = itertools.count()


class Peers:
    """The ranks of a ``torch.distributed`` group, or of a communicator with mpi4py's methods."""

    def __init__(self, group: Optional[Any], comm: Optional[Any] = None) -> None:
        if group is not None and not is_group(group):
            if group is getattr(dist.GroupMember, "NON_GROUP_MEMBER", None):
                raise InvalidArgument(f"group is {group}, allowed: a group with this process")
            raise TypeError(f"group is of type {type_name(group)}, expected a torch.distributed process group")
        if group is None and comm is None:
            raise ValueError("neither group nor comm is given: the buffer needs one of them to find its peers")
        if group is None:
            for method in ("Get_rank", "Get_size", "allgather"):
                if not hasattr(comm, method):
                    raise TypeError(f"comm is of type {type_name(comm)}, expected an mpi4py communicator: {method} is missing")
        self.group: Any = comm if group is None else group
        self.rank: int = comm.Get_rank() if group is None else group.rank()
        self.size: int = comm.Get_size() if group is None else group.size()
        if not 0 <= self.rank < self.size:
            raise InvalidArgument(f"the rank of this process in group is {self.rank}, allowed: 0 to {self.size - 1}")
        #: The current CUDA device, or -1 where the program does not use CUDA.
        self.device: int = device_index(group)
        if self.device >= 0 and group is not None:
            check_nvlink_connections(group)
        #: Of the buffer that is being made: what goes through it carries the buffer's number.
        self.bootstrap: _native.Bootstrap = bootstrap_of(self.group, self.rank, self.size).for_buffer()


def device_index(group: Optional[Any]) -> int:
    """The current CUDA device, or -1 where the program does not use CUDA."""
    nccl = isinstance(group, dist.ProcessGroup) and "nccl" in str(dist.get_backend(group)) and torch.cuda.is_available()
    return torch.cuda.current_device() if nccl or torch.cuda.is_initialized() or torch.empty(0).is_cuda else -1


class NativeOwner:
    """What ``Buffer`` and ``ElasticBuffer`` have in common: they own a native buffer."""

    #: ``None`` after ``destroy``.
    runtime: Optional["_native.Buffer"]
    #: The same, also after ``destroy``, when its calls raise ``UseAfterDestroy``.
    _native: "_native.Buffer"
    group: Any
    explicitly_destroy: bool
    _comm_stream: Optional[torch.cuda.Stream]
    #: Whether EP_AVOID_RECORD_STREAM counts: programs of the first interface may drop the event.
    _events_may_keep: bool = False

    def _make(
        self,
        peers: Peers,
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
        self.group, device = peers.group, peers.device
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
        _made[next(_numbers)] = native
        self.runtime = self._native = native = with_ranges(native)
        # Also runs at interpreter exit, while everything it needs is still there.
        end = _let_go, native, peers.rank, type(self).__name__, self.explicitly_destroy, os.getpid()
        self._finalizer = weakref.finalize(self, *end)
        return native

    def destroy(self) -> None:
        """Collective: waits for this rank's work, then for all ranks, and frees the memory. Tensors that calls returned
        stay valid.

        It does not wait where a call of this buffer has failed here, or on a rank that has made another buffer since;
        and never longer than ``DEEP_EP_TIMEOUT_S`` seconds (``TimeoutError``; over a communicator of mpi4py for as long as
        that does). The buffer is gone in any case.

        A buffer made without ``explicitly_destroy=True`` refuses it, as upstream's does, by ``errors.WrongUse``, which is an
        ``AssertionError``, and stays usable: its memory goes with the object, without another rank. A second ``destroy`` of a ``Buffer`` raises
        ``UseAfterDestroy``; that of another buffer does nothing."""
        if not self.explicitly_destroy:
            raise WrongUse("destroy() needs a buffer made with explicitly_destroy=True")
        self._finalizer.detach()
        self.runtime = None
        with bounded(_native.default_timeout_s()):
            self._native.destroy()

    def suspend(self) -> None:
        """Collective, the host waits: gives the driver the GPU memory of the buffer's heap while an engine sleeps. The host
        keeps what the heap holds, which takes as much memory there. After ``resume`` tensors, handles and recorded graphs are
        as before; until then calls raise ``InvalidArgument``, and nothing may touch tensors that are in the heap. Raises
        ``Unsupported`` with ranks that RDMA reaches, ``OutOfMemory`` if a host has no room; the buffer is as before then."""
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
        if self.runtime is None:
            raise UseAfterDestroy("the buffer was used after destroy")
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


def _let_go(native: "_native.Buffer", rank: int, kind: str, explicitly_destroy: bool, process: int) -> None:
    """What happens to a buffer that nobody destroyed: its memory goes, no other rank is talked to."""
    native.drop()
    if explicitly_destroy and os.getpid() == process:  # a forked child leaves it to its parent
        text = f"deep_ep: rank {rank}: {kind} made with explicitly_destroy=True was never destroyed"
        warnings.warn(text, ResourceWarning, stacklevel=2)


def metrics() -> Dict[str, Any]:
    """Numbers of all buffers of this process, oldest first, for programs that export them. Calls do not wait for it, and
    another thread than theirs may ask.

    Returns:
        ``{"version": "0.2.0", "buffers": [...]}``; of each buffer ``rank``, ``ranks`` and ``nodes``; ``calls`` and ``bytes``, each a
        dict with ``dispatch``, ``combine``, ``low_latency_dispatch`` and ``low_latency_combine``: calls that have returned, and
        bytes of the rows of this rank's tokens, as dispatch reads and combine writes them; ``lost_ranks``, a list, until
        ``low_latency_resume``; ``handlers``, what tells NICs of work, such as ``["cpu"]``, empty inside a node.
        Calls that a CUDA graph replays are not counted.
    """
    buffers = []
    for native in [each() for each in _made.valuerefs()]:  # at once: another thread may be making a buffer
        if native is not None:
            with contextlib.suppress(UseAfterDestroy):
                found = native.metrics()
                found["handlers"] = sorted(set(re.findall(r"handler (\w+)", found.pop("description"))))
                buffers.append(found)
    return {"version": _native.version, "buffers": buffers}
