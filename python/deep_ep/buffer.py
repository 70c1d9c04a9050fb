"""The buffer: what a rank sends with and receives in."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Set, Tuple, Union

import torch

from . import _native
from .arguments import MaybeCounts, MaybeTensor, RowsLike, integer, type_name
from .config import Config, low_latency_size, sms_of
from .errors import InvalidArgument, WrongUse
from .low_latency import LowLatencyCalls
from .meetings import StoreRanks
from .peers import Peers, device_index, event_given
from .utils import EventHandle, EventOverlap

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

    Returned tensors are ordinary tensors of PyTorch, made for the current stream (with
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
        tcp_store_group: Optional[Any] = None,
        rank: Optional[int] = None,
        num_ranks: Optional[int] = None,
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
            num_qps_per_rank: the most queue pairs that rows of normal mode share to each rank of another node that is
                written to (0: no bound); how many are taken says ``DEEP_EP_INTERNODE_LANES``. Low-latency calls have a
                queue pair for each peer and kind of call, and for each of ``DEEP_EP_LOW_LATENCY_LANES``.
            tcp_store_group, rank, num_ranks: of a process that takes the place of ``rank``, which has died, instead of
                ``group``: a ``torch.distributed.Store`` in which the other ranks call ``connect_ranks([rank])`` meanwhile.
            allow_mnnvl, use_fabric: accepted without effect. GPU memory that other nodes can map is used wherever all
                ranks support it.
        """
        if tcp_store_group is not None:
            if group is not None or comm is not None or rank is None or num_ranks is None:
                raise InvalidArgument("tcp_store_group is given: it needs rank and num_ranks, and neither group nor comm")
            size = integer("num_ranks", num_ranks, 2)
            if not 0 <= integer("rank", rank) < size:
                raise InvalidArgument(f"rank is {rank}, allowed: 0 to {size - 1}")
            comm = StoreRanks.join(tcp_store_group, rank, size)
        peers = Peers(group, comm)
        self._store: Optional[Any] = tcp_store_group
        self._disconnected: Set[int] = set()
        self.rank: int = peers.rank
        self.group_size: int = peers.size

        for name, value in (("num_nvl_bytes", num_nvl_bytes), ("num_rdma_bytes", num_rdma_bytes)):
            if not 0 <= integer(name, value) <= _LARGEST_SIZE or value % 128 != 0:
                raise InvalidArgument(f"{name} is {value}, allowed: multiples of 128 from 0 to 2**56")
        num_qps_per_rank = integer("num_qps_per_rank", num_qps_per_rank, 0)
        # Whatever may fail on this rank alone comes before the ranks wait for each other.
        qp_depth = _native.environment_number("NVSHMEM_QP_DEPTH")
        if enable_shrink and not (low_latency_mode and num_rdma_bytes > 0):
            raise InvalidArgument("enable_shrink is True: it needs low_latency_mode=True and num_rdma_bytes > 0")

        self.num_nvl_bytes: int = num_nvl_bytes
        self.num_rdma_bytes: int = num_rdma_bytes
        self.low_latency_mode: bool = low_latency_mode
        self.explicitly_destroy: bool = explicitly_destroy
        self.enable_shrink: bool = enable_shrink

        memory = max(num_nvl_bytes, _SMALLEST_HEAP)
        native = self._make(
            peers,
            device_index(group),
            memory,
            # There combine copies rows into it.
            between_nodes=(2 * memory + (0 if low_latency_mode else num_rdma_bytes), 0),
            low_latency=(num_rdma_bytes if low_latency_mode else 0, enable_shrink, allow_nvlink_for_low_latency_mode),
            num_qps_per_rank=min(num_qps_per_rank, 1 << 16),
        )
        self._num_nodes: int = native.num_nodes()
        if low_latency_mode or self._num_nodes > 1:
            self.nvshmem_qp_depth: int = qp_depth

    # --------------------------------------------------------------------------------------------- replaced ranks
    # The names are those of nixl_ep, whose callers replace ranks.

    def set_tcp_store_group(self, store: Optional[Any]) -> None:
        """The ``torch.distributed.Store`` in which ``connect_ranks`` meets new processes."""
        self._store = store

    def disconnect_ranks(self, remote_ranks: Sequence[int]) -> None:
        """Masks ranks on the current stream, for this rank alone, until ``connect_ranks``. Needs ``enable_shrink``."""
        for remote in self._remote(remote_ranks):
            self._alive().low_latency_update_mask(remote, True)
            self._disconnected.add(remote)

    def connect_ranks(self, remote_ranks: Sequence[int], activate: bool = True) -> None:
        """Collective over all ranks that live, and over one new process for each rank to be replaced; the host waits.

        Replaces those of ``remote_ranks`` that ``disconnect_ranks`` has left out, or whose processes have ended, by the new
        processes that make a ``Buffer`` with ``tcp_store_group`` and the same sizes meanwhile; other ranks are connected, and
        stay so. All ranks leave the lost ones out with ``disconnect_ranks`` first: one that has not noticed an end connects
        nobody, and the others wait for it. This object, its addresses and recorded graphs stay valid; handles of dispatches before do not. Receive parts
        whose hooks have not been called are dropped. Afterwards there are low-latency calls only.

        All ranks are unmasked; without ``activate`` the new ones stay masked, here, until ``low_latency_update_mask_buffer``.
        Needs ``enable_shrink``, ``set_tcp_store_group`` and ranks of one node. Raises ``TimeoutError``, which names the rank for
        which no process has come in ``DEEP_EP_TIMEOUT_S`` seconds; ``ValueError`` for a rank whose process lives, once a new one has come for it;
        ``RankMismatch`` for a new process with other sizes. The buffer is as before then, without the lost ranks."""
        native = self._alive()
        remote_ranks = self._remote(remote_ranks)
        gone = self._disconnected | set(native.metrics()["lost_ranks"])
        replaced = [remote for remote in remote_ranks if remote in gone]
        if replaced:
            if self._store is None:
                raise InvalidArgument("connect_ranks: there is no store, allowed: after set_tcp_store_group(store)")
            peers = Peers(None, StoreRanks.replace(self._store, self.rank, self.group_size, replaced))
            native.replace_ranks(peers.bootstrap, replaced)
            self.group = peers.group
            self._disconnected.clear()
        for remote in replaced if not activate else remote_ranks:
            native.low_latency_update_mask(remote, not activate)

    def _remote(self, ranks: Sequence[int]) -> Sequence[int]:
        remote = [integer("remote_ranks", one, 0) for one in ranks]
        if not remote or any(one >= self.group_size for one in remote):
            raise InvalidArgument(f"remote_ranks is {list(ranks)}, allowed: ranks from 0 to {self.group_size - 1}, at least one")
        return [one for one in remote if one != self.rank]

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
        """What ``dispatch`` uses without ``config``: ``Buffer.num_sms``, for any number of ranks."""
        integer("num_ranks", num_ranks, 1)
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """What ``combine`` uses without ``config``, see ``get_dispatch_config``."""
        return Buffer.get_dispatch_config(num_ranks)

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
            memory = self._alive().low_latency_memory()[offset:]
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
        _check_allocation(previous_event, async_finish, allocate_on_comm_stream)
        *counts, event = self._alive().get_dispatch_layout(topk_idx, num_experts, previous_event, async_finish)
        return (*counts, self._event(event, topk_idx))

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
                rows ``[T, H]`` and their scales ``[T, S]`` of a 4-byte type, with any strides.
            handle: of an earlier dispatch with the same number of tokens: the rows go where they went then, and neither
                layout nor top-k may be given.
            num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert: from ``get_dispatch_layout`` or made the same
                way; needed without a handle.
            topk_idx, topk_weights: ``[T, K]``, contiguous, ``deep_ep.topk_idx_t`` (or int32) and float32. Weights only
                with indices.
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
            The handle is a tuple of seven. Its element 0 is ``[R, R]`` int32 with ``[i][r]`` the end of rank i's rows in
            ``recv_x``; between nodes its element -4 is ``[R]`` int32 with the ends of this rank's sources.
        """
        _check_allocation(previous_event, async_finish, allocate_on_comm_stream)
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise WrongUse("topk_idx and topk_weights must be None with a handle")
        elif num_tokens_per_rank is None or is_token_in_rank is None or num_tokens_per_expert is None:
            layout = {"num_tokens_per_rank": num_tokens_per_rank, "is_token_in_rank": is_token_in_rank,
                      "num_tokens_per_expert": num_tokens_per_expert}  # fmt: skip
            missing = next(name for name, given in layout.items() if given is None)
            raise WrongUse(f"{missing} is missing: without a handle the layout is needed")
        rows, recv_idx, recv_weights, counts, made, event = self._alive().dispatch(
            x, handle, num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights, expert_alignment,
            num_worst_tokens, sms_of(config, Buffer.num_sms), previous_event, async_finish,
        )  # fmt: skip
        done = self._event(
            event, x, handle, num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights
        )
        return rows, recv_idx, recv_weights, counts, made, done

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
        _check_allocation(previous_event, async_finish, allocate_on_comm_stream)
        combined_x, combined_weights, event = self._alive().combine(
            x, handle, topk_weights, bias, sms_of(config, Buffer.num_sms), previous_event, async_finish
        )
        return combined_x, combined_weights, self._event(event, x, topk_weights, bias, handle)

    # Upstream's names for calls between nodes: the same as ``dispatch`` and ``combine``, which know where ranks are.
    internode_dispatch = dispatch
    internode_combine = combine


def _check_allocation(previous_event: Any, async_finish: bool, allocate_on_comm_stream: bool) -> None:
    if allocate_on_comm_stream and not (async_finish and event_given(previous_event)):
        raise InvalidArgument("allocate_on_comm_stream needs previous_event and async_finish, one of which is missing")
