"""The buffer: what a rank sends with and receives in."""

from __future__ import annotations

import os
import weakref
from typing import Any, Optional, Sequence, Tuple, Union

import torch

from . import _native
from .arguments import MaybeCounts, MaybeTensor, RowsLike, event_of, integer, type_name
from .config import COMBINE_CHUNKS, DISPATCH_CHUNKS, Config, default_config, low_latency_size, sms_of
from .errors import InvalidArgument, WrongUse
from .low_latency import LowLatencyCalls
from .peers import Peers, destroy_together, device_index, let_go, native_buffer
from .results import check_kind
from .utils import EventHandle, EventOverlap, check_nvlink_connections

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]

#: Opaque but for where rows of each source end, see ``Buffer.dispatch``.
Handle = Tuple[torch.Tensor, ...]
Bias = Union[None, torch.Tensor, Sequence[Optional[torch.Tensor]]]

_SMALLEST_HEAP = 64 << 20
_LARGEST_SIZE = 1 << 56


class Buffer(LowLatencyCalls):
    """Expert-parallel communication of one rank with the other ranks of its group.

    Symbols: R ranks, r this rank, P nodes, E experts of which rank q owns ``[q*E/R, (q+1)*E/R)``, T tokens on this rank (may
    differ between ranks, may be 0), K top-k, H hidden size, N rows that this rank receives.

    Streams. On GPUs a call runs behind ``previous_event`` if one is given, *else* behind the work of the current
    stream, and behind the buffer's calls before it. Later work of the current stream comes after it, or, with
    ``async_finish=True``, the returned event stands for the results: use them only on a stream that waited for it.
    Kernels run on the buffer's own communication stream, or, without ``async_finish`` and ``previous_event``, on the
    current stream itself: the order is the same, and a call is a few microseconds faster.
    The host waits in ``dispatch`` alone, and there only without a handle and without ``num_worst_tokens``. On the CPU
    calls are complete when they return. Other Python threads run while a call waits.

    All ranks make the same calls in the same order. One thread at a time per buffer.

    Returned tensors are ordinary tensors of PyTorch (see ``results``), made for the current stream (with
    ``previous_event`` for the communication stream) and, where a call is asynchronous, recorded on the other one of the
    two. Programs that use them on further streams call ``Tensor.record_stream``, as for all tensors. They may outlive the
    buffer. Tensors of handles belong to the library.

    Exceptions are those of ``deep_ep.errors``: ``ValueError`` for arguments, ``TimeoutError`` when a rank does not
    come within ``DEEP_EP_TIMEOUT_S`` seconds, ``MemoryError``; all are ``RuntimeError`` too.
    """

    #: SMs of the default configurations.
    num_sms: int = 20

    def __init__(
        self,
        group: Optional[Any],
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Optional[Any] = None,
        *,
        results: str = "auto",
    ) -> None:
        """Collective: every rank of the group calls it, with equal sizes and with its CUDA device current.

        Args:
            group: a ``torch.distributed`` group of any backend. The buffer is on the current CUDA device if the backend
                is NCCL, CUDA is in use in this process, or the default device is CUDA; otherwise on the CPU.
            num_nvl_bytes: memory for received tensors; rows that do not fit come through a window, more slowly. With
                several nodes the buffer takes twice as much, because combine copies rows into it there. See
                ``Config.get_nvl_buffer_size_hint``.
            explicitly_destroy: memory is freed by ``destroy``, which is collective. Without it ``destroy`` is refused, as
                upstream refuses it, and the memory is freed when the object goes, without another rank.
            comm: an mpi4py communicator (anything with ``Get_rank``, ``Get_size`` and ``allgather``) if ``group`` is
                ``None``.
            low_latency_mode: low-latency calls will be made; ``num_rdma_bytes`` is the memory for them, see
                ``get_low_latency_rdma_size_hint``. They and the calls of the normal mode do not disturb each other.
            enable_shrink: in low-latency calls, a rank that does not come within the time-out, or whose process has
                ended, is masked by all others; they raise no exception. Needs ``low_latency_mode``, and ``DEEP_EP_CONTROL``
                not to be ``off``.
            allow_nvlink_for_low_latency_mode: ``False``: low-latency calls reach all other ranks by RDMA, even those of
                its own node. Ranks of other nodes are reached by RDMA in any case.
            num_qps_per_rank: the most queue pairs that rows of normal mode take in turn to each rank of another node that
                is written to (0: no bound); how many are taken says ``DEEP_EP_INTERNODE_LANES``. Low-latency calls have a
                queue pair for each peer and kind of call, and for each of ``DEEP_EP_LOW_LATENCY_LANES``.
            results: the memory of what calls return; ranks may differ. Not part of upstream's interface.
                ``"auto"``: PyTorch's, which on GPUs lies in the buffer where it can, so that rows land in place.
                ``"ordinary"``: PyTorch's, outside the buffer: each received row is copied once more, from a window.
                ``"heap"``: the library's, in the buffer: rows land in place with any version of PyTorch and in CUDA
                graphs, too, but ``untyped_storage().resize_`` raises, and ``record_stream`` does nothing: let the stream
                that drops a result come after all that use it. docs/reference/python.md compares them.
            allow_mnnvl, use_fabric: accepted without effect. GPU memory that other nodes can map is used wherever all
                ranks support it.
        """
        peers = Peers(group, comm)
        self.rank: int = peers.rank
        self.group_size: int = peers.size
        self.group: Any = peers.group

        for name, value in (("num_nvl_bytes", num_nvl_bytes), ("num_rdma_bytes", num_rdma_bytes)):
            if not 0 <= integer(name, value) <= _LARGEST_SIZE or value % 128 != 0:
                raise InvalidArgument(f"{name} is {value}, allowed: multiples of 128 from 0 to 2**56")
        num_qps_per_rank = integer("num_qps_per_rank", num_qps_per_rank, 0)
        results = check_kind(results)
        # Whatever may fail on this rank alone comes before the ranks wait for each other.
        qp_depth = _native.environment_number("NVSHMEM_QP_DEPTH")
        if enable_shrink and not (low_latency_mode and num_rdma_bytes > 0):
            raise InvalidArgument("enable_shrink is True: it needs low_latency_mode=True and num_rdma_bytes > 0")

        self.num_nvl_bytes: int = num_nvl_bytes
        self.num_rdma_bytes: int = num_rdma_bytes
        self.low_latency_mode: bool = low_latency_mode
        self.explicitly_destroy: bool = explicitly_destroy
        self.enable_shrink: bool = enable_shrink

        device = device_index(group)
        self._on_gpu: bool = device >= 0
        if self._on_gpu and group is not None:
            check_nvlink_connections(group, peers.all_gather)
        memory = max(num_nvl_bytes, _SMALLEST_HEAP)
        self.runtime: Optional[_native.Buffer]
        self.runtime, self._comm_stream = native_buffer(
            peers,
            device,
            memory,
            low_latency_bytes=num_rdma_bytes if low_latency_mode else 0,
            masking=enable_shrink,
            # Without memory for such calls it says nothing, which the native buffer would call a mistake.
            allow_nvlink=allow_nvlink_for_low_latency_mode or not (low_latency_mode and num_rdma_bytes > 0),
            num_qps_per_rank=min(num_qps_per_rank, 1 << 16),
            results=results,
            # There combine copies rows into it.
            between_nodes=(2 * memory + (0 if low_latency_mode else num_rdma_bytes), 0),
        )
        self._num_nodes: int = self.runtime.num_nodes()
        if low_latency_mode or self._num_nodes > 1:
            self.nvshmem_qp_depth: int = qp_depth
        # Also runs at interpreter exit, while everything it needs is still there.
        self._finalizer = weakref.finalize(
            self, let_go, self.runtime, self.rank, "a Buffer", explicitly_destroy, os.getpid()
        )

    def destroy(self) -> None:
        """Collective: waits for this rank's work, then for all ranks, and frees the memory. Tensors that calls returned
        stay valid.

        It does not wait where a call of this buffer has failed here, or on a rank that has made another buffer since;
        and never longer than ``DEEP_EP_TIMEOUT_S`` seconds (``TimeoutError``; over a communicator of mpi4py for as long as
        that does). The buffer is gone in any case.

        A buffer made without ``explicitly_destroy=True`` refuses it, as upstream's does, by ``errors.WrongUse``, which is an
        ``AssertionError``, and stays usable: drop the object instead. A second ``destroy`` raises ``UseAfterDestroy``."""
        if not self.explicitly_destroy:
            raise WrongUse("destroy() needs a buffer made with explicitly_destroy=True")
        runtime = self._alive()
        self._finalizer.detach()
        self.runtime = None
        destroy_together(runtime, self.group)

    def trim(self) -> int:
        """Waits for this rank's calls, and gives the driver the memory of results that the program has dropped; otherwise the
        buffer keeps it for later calls. Returns how many bytes that were (0 on the CPU). Results that are PyTorch's memory
        and the heap itself are not counted. Not collective; refused while calls are being recorded into a CUDA graph. A call
        that finds no memory does the same by itself before it raises ``OutOfMemory``."""
        return self._alive().trim()

    def describe(self) -> str:
        """A few lines for people to read: ranks and nodes, memory and its parts, how low-latency calls reach other ranks,
        and how many SMs calls use by default. The wording may change."""
        return self._alive().describe()

    # ------------------------------------------------------------------------------------------- static helpers

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether 8-bit floating point rows can be dispatched. They always can."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Sets the number of SMs, an even one, that later default configurations use."""
        if integer("new_num_sms", new_num_sms) % 2:
            raise WrongUse(f"new_num_sms is {new_num_sms}, allowed: even numbers")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event behind all work that the current stream holds now."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes of ``num_rdma_bytes`` for all low-latency calls of these or smaller shapes. A multiple of 128; a tenth
        of what upstream wants, because a token takes one row per rank, not one per expert."""
        return low_latency_size(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """What ``dispatch`` uses without ``config``. A number of ranks that upstream does not list gets the values of the
        nearest smaller one."""
        return default_config(DISPATCH_CHUNKS, Buffer.num_sms, num_ranks)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """What ``combine`` uses without ``config``. A number of ranks that upstream does not list gets the values of the
        nearest smaller one."""
        return default_config(COMBINE_CHUNKS, Buffer.num_sms, num_ranks)

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The communication stream. A buffer on the CPU has none."""
        self._alive()
        if self._comm_stream is None:
            raise RuntimeError("get_comm_stream: the buffer is on the CPU, where calls do not use a CUDA stream")
        return self._comm_stream

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: Optional[torch.Size] = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> torch.Tensor:
        """A view of this rank's communication memory, for diagnosis. It is valid until the buffer ends.

        Args:
            offset: in **bytes**, as upstream does it; the view ends where the memory ends.
            size: the view's shape; by default everything, in one dimension.
            use_rdma_buffer: the memory of low-latency calls (``num_rdma_bytes``). It may be filled with zeros while no
                such call is under way on any rank, and hold anything from one ``clean_low_latency_buffer`` to the next.
                Without ``low_latency_mode``, between nodes, ``num_rdma_bytes`` have become memory for received tensors;
                that is what is shown then, only for looking.
        """
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype is of type {type_name(dtype)}, expected a torch.dtype")
        offset = integer("offset", offset, 0)
        if use_rdma_buffer and self._num_nodes > 1 and not self.low_latency_mode:
            everything = self._alive().local_memory()
            memory = everything[max(0, everything.numel() - self.num_rdma_bytes) :][offset:]
        elif use_rdma_buffer:
            memory = self._low_latency().low_latency_memory()[offset:]
        else:
            memory = self._alive().local_memory()[offset : self.num_nvl_bytes]
        view = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        if size is None:
            return view
        if not isinstance(size, torch.Size):
            raise TypeError(f"size is of type {type_name(size)}, expected a torch.Size or None")
        if view.numel() < size.numel():
            raise WrongUse(f"size is {tuple(size)}, but the buffer holds {view.numel()} elements")
        return view[: size.numel()].view(size)

    # ---------------------------------------------------------------------------------------------- normal mode

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: Union[None, EventOverlap, EventHandle] = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Tuple[torch.Tensor, MaybeTensor, torch.Tensor, torch.Tensor, EventOverlap]:
        """Counts where this rank's tokens go. Needs no peer.

        Args:
            topk_idx: ``[T, K]``, ``deep_ep.topk_idx_t`` (or int32), contiguous; what is not in ``[0, num_experts)``
                selects nothing.

        Returns:
            ``num_tokens_per_rank`` ``[R]`` int32, tokens with at least one expert on that rank;
            ``num_tokens_per_rdma_rank`` ``[P]`` int32, tokens with at least one expert on that node, ``None`` where
            there is one node;
            ``num_tokens_per_expert`` ``[E]`` int32, entries that name the expert;
            ``is_token_in_rank`` ``[T, R]`` bool; the event.
        """
        runtime = self._alive()
        previous = self._previous(previous_event, async_finish, allocate_on_comm_stream)
        *counts, event = runtime.get_dispatch_layout(topk_idx, num_experts, previous, async_finish)
        if async_finish:
            self._record(topk_idx)
        return (*counts, EventOverlap(event))

    def dispatch(
        self,
        x: RowsLike,
        handle: Optional[Handle] = None,
        num_tokens_per_rank: Optional[torch.Tensor] = None,
        num_tokens_per_rdma_rank: Optional[torch.Tensor] = None,
        is_token_in_rank: Optional[torch.Tensor] = None,
        num_tokens_per_expert: Optional[torch.Tensor] = None,
        topk_idx: Optional[torch.Tensor] = None,
        topk_weights: Optional[torch.Tensor] = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Optional[Config] = None,
        previous_event: Union[None, EventOverlap, EventHandle] = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Tuple[RowsLike, MaybeTensor, MaybeTensor, MaybeCounts, Union[Handle, Any], EventOverlap]:
        """Sends every token once to each rank that owns at least one of its experts.

        Args:
            x: ``[T, H]`` contiguous, bfloat16 or any type with rows of a multiple of 16 bytes; or a tuple of 8-bit
                rows ``[T, H]`` and their scales ``[T, S]``, float32 or int32, with any strides.
            handle: of an earlier dispatch with the same number of tokens: the rows go where they went then, and neither
                layout nor top-k may be given.
            num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert: from ``get_dispatch_layout`` or made the same
                way; needed without a handle.
            topk_idx, topk_weights: ``[T, K]``, contiguous, ``deep_ep.topk_idx_t`` (or int32) and float32. Both or
                neither.
            expert_alignment: the counts in the returned list are rounded up to multiples of it.
            num_worst_tokens: if positive, results have this many rows and the host does not wait to learn N (CUDA
                graphs can hold the call). A safe value is the largest T times R. If more rows come, the next call
                raises ``OutOfMemory``.
            num_tokens_per_rdma_rank: ignored; the library counts by ``is_token_in_rank``.
            allocate_on_comm_stream: needs ``previous_event`` and ``async_finish``. Changes nothing here: results never
                belong to the current stream alone.

        Returns:
            ``recv_x`` ``[N, H]`` in the form of ``x`` (scales ``[N, S]`` contiguous), ordered by source rank, then by
            token index; ``recv_topk_idx`` ``[N, K]``, indices among this rank's experts or -1; ``recv_topk_weights``
            ``[N, K]``, 0 where the index is -1; a list with this rank's counts per expert (empty with
            ``num_worst_tokens``); the handle; the event. With a handle, the four results in the middle are ``None``.
            The handle is a tuple. Within a node its element 0 is ``[R, R]`` int32 with ``[i][r]`` the end of rank i's
            rows in ``recv_x``; between nodes its element -4 is ``[R]`` int32 with the ends of this rank's sources.
        """
        runtime = self._alive()
        num_sms = sms_of(config, Buffer.num_sms)
        previous = self._previous(previous_event, async_finish, allocate_on_comm_stream)
        rows, scales = _split(x)

        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise WrongUse("topk_idx and topk_weights must be None with a handle")
            recv_x, recv_scales, event = runtime.cached_dispatch(
                rows, scales, _checked(handle), num_sms, previous, async_finish
            )
            if async_finish:
                self._record(rows, scales, *handle)
            cached: Any = recv_x if recv_scales is None else (recv_x, recv_scales)
            return cached, None, None, None, None, EventOverlap(event)

        if num_tokens_per_rank is None or is_token_in_rank is None or num_tokens_per_expert is None:
            layout = {"num_tokens_per_rank": num_tokens_per_rank, "is_token_in_rank": is_token_in_rank,
                      "num_tokens_per_expert": num_tokens_per_expert}  # fmt: skip
            missing = next(name for name, given in layout.items() if given is None)
            raise WrongUse(f"{missing} is missing: without a handle the layout is needed")
        if (topk_idx is None) != (topk_weights is None):
            missing = "topk_idx" if topk_idx is None else "topk_weights"
            raise InvalidArgument(f"topk_idx and topk_weights come together: {missing} is missing")
        recv_x, recv_scales, recv_topk_idx, recv_topk_weights, counts, new_handle, event = runtime.dispatch(
            rows,
            scales,
            num_tokens_per_rank,
            is_token_in_rank,
            num_tokens_per_expert,
            topk_idx,
            topk_weights,
            expert_alignment,
            num_worst_tokens,
            num_sms,
            previous,
            async_finish,
        )
        if self._num_nodes > 1:
            new_handle = (*new_handle[:6], new_handle[5][:, self.rank], *new_handle[7:])
        if async_finish:
            self._record(
                rows, scales, num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights
            )
        result: Any = recv_x if recv_scales is None else (recv_x, recv_scales)
        return result, recv_topk_idx, recv_topk_weights, counts, new_handle, EventOverlap(event)

    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: Optional[torch.Tensor] = None,
        bias: Bias = None,
        config: Optional[Config] = None,
        previous_event: Union[None, EventOverlap, EventHandle] = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Tuple[torch.Tensor, MaybeTensor, EventOverlap]:
        """Adds up, for each token of the original dispatch, the rows that its destination ranks hold.

        Args:
            x: ``[N, H]`` bfloat16, contiguous: one row for each received row. It may be the received tensor itself,
                written in place: rows in the buffer's memory travel fastest.
            handle: of the dispatch.
            topk_weights: ``[N, K]`` float32, contiguous; summed slot by slot.
            bias: ``[T, H]`` bfloat16, added once; or two such, each of which may be ``None``.

        Returns:
            ``combined_x`` ``[T, H]`` bfloat16, summed in float32 (biases, then ranks in order) and rounded once; what
            another node gives is summed there, rounded once, and added in the order of nodes;
            ``combined_topk_weights`` ``[T, K]`` float32 or ``None``; the event.
        """
        runtime = self._alive()
        num_sms = sms_of(config, Buffer.num_sms)
        previous = self._previous(previous_event, async_finish, allocate_on_comm_stream)
        bias_0, bias_1 = _biases(bias)
        combined_x, combined_weights, event = runtime.combine(
            x, _checked(handle), topk_weights, bias_0, bias_1, num_sms, previous, async_finish
        )
        if async_finish:
            self._record(x, topk_weights, bias_0, bias_1, *handle)
        return combined_x, combined_weights, EventOverlap(event)

    def _previous(self, previous_event: Any, async_finish: bool, allocate_on_comm_stream: bool) -> Optional[EventHandle]:
        event = event_of("previous_event", previous_event)
        if allocate_on_comm_stream and (event is None or not async_finish):
            missing = "previous_event" if event is None else "async_finish"
            raise InvalidArgument(f"allocate_on_comm_stream needs previous_event and async_finish: {missing} is missing")
        return event

    def _record(self, *tensors: Optional[torch.Tensor]) -> None:
        """The framework must not reuse the memory of these before the communication stream is done with them."""
        stream = self._comm_stream
        if stream is None:
            return
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(stream)

    # Upstream's names for calls between nodes: the same as ``dispatch`` and ``combine``, which know where ranks are.
    internode_dispatch = dispatch
    internode_combine = combine


def _split(x: Any) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    if isinstance(x, (tuple, list)):
        if len(x) != 2:
            raise InvalidArgument(f"x is a {type(x).__name__} of {len(x)}, expected a tensor or (rows, scales)")
        if not isinstance(x[1], torch.Tensor):
            raise TypeError(f"x_scales (x[1]) is of type {type(x[1]).__name__}, expected a torch.Tensor")
        return x[0], x[1]
    return x, None


def _biases(bias: Bias) -> Tuple[Optional[torch.Tensor], Optional[torch.Tensor]]:
    if bias is None or isinstance(bias, torch.Tensor):
        return bias, None
    if isinstance(bias, (tuple, list)):
        if len(bias) != 2:
            raise InvalidArgument(f"bias is a {type(bias).__name__} of {len(bias)}, expected a tensor or two")
        return bias[0], bias[1]
    raise TypeError(f"bias is of type {type(bias).__name__}, expected a torch.Tensor or a tuple of two")


def _checked(handle: Any) -> Handle:
    if not isinstance(handle, tuple):
        raise TypeError(f"handle is of type {type(handle).__name__}, expected the tuple that dispatch returned")
    return handle
