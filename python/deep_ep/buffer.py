"""The first interface: what a rank sends with and receives in."""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence, Set, Tuple, Union

import torch

from . import _native
from .arguments import Bias, MaybeCounts, MaybeTensor, RowsLike, biases, check_dtype, integer, one_or_two, type_name
from .config import ALIGNMENT, Config
from .errors import InvalidArgument, WrongUse
from .exchanges import bootstrap_of, rank_and_size
from .meetings import StoreRanks
from .peers import SMALLEST_HEAP, NativeOwner, event_in
from .utils import EventHandle, EventOverlap
from .utils.math import align

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]

#: Opaque but for where rows of each source end, see ``Buffer.dispatch``.
Handle = Tuple[Any, ...]
#: (src_info, layout_range, M, H, E)
LowLatencyHandle = Tuple[torch.Tensor, torch.Tensor, int, int, int]
#: Enqueues the receive part. It is ``None`` without ``return_recv_hook``, as the program knows that asked for it.
Hook = Callable[[], None]

_LARGEST_SIZE = 1 << 56


class Buffer(NativeOwner):
    """Expert-parallel communication of one rank with the other ranks of its group.

    Symbols: R ranks, r this rank, P nodes, E experts of which rank q owns ``[q*E/R, (q+1)*E/R)``, T tokens on this rank (may
    differ between ranks, may be 0), K top-k, H hidden size, N rows that this rank receives.

    Streams. On GPUs a call runs behind ``previous_event`` if one is given, *else* behind the work of the current
    stream, and behind the buffer's calls before it. Later work of the current stream comes after it, or, with
    ``async_finish=True``, the returned event stands for the results: use them only on a stream that waited for it.
    The host waits in ``dispatch`` alone, and there only without a handle and without ``num_worst_tokens``; all other calls
    can be recorded into CUDA graphs. On the CPU calls are complete when they return. Other Python threads run while a call
    waits. All ranks make the same calls in the same order. One thread at a time per buffer.

    Low-latency calls need ``low_latency_mode=True`` and ``num_rdma_bytes``, and have further symbols: L = E / R local experts,
    M = ``num_max_dispatch_tokens_per_rank``, at least T on each rank. They run on the current stream, or with
    ``async_finish=True`` on the communication stream: keep the event until you have waited for it, as it keeps the call's
    tensors. With ``return_recv_hook=True`` a call only *sends*; ``hook()`` puts the *receive* part on that same stream, and
    results, counts and statistics are valid after that. In between no SM is used. Of each kind of call (dispatch, combine)
    two may wait for their hooks at once.

    Returned tensors are ordinary tensors of PyTorch, for the current stream and, where a call is asynchronous, for the
    communication stream. They may outlive the buffer. Tensors of handles belong to the library, but for ``handle[2]``.

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
            num_nvl_bytes: memory for received tensors, between nodes twice as much; rows that do not fit come through a
                window, more slowly. See ``Config.get_nvl_buffer_size_hint``.
            explicitly_destroy: memory is freed by ``destroy``; without it, when the object goes.
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
                written to (0: no bound); how many are taken says ``DEEP_EP_INTERNODE_LANES``.
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
            comm = StoreRanks(tcp_store_group, rank, size)
        if group is None and comm is None:
            raise ValueError("neither group nor comm is given: the buffer needs one of them to find its peers")
        self.group: Any = comm if group is None else group
        self.rank, self.group_size = rank_and_size(self.group)
        self._store: Optional[Any] = tcp_store_group
        self._disconnected: Set[int] = set()

        for name, value in (("num_nvl_bytes", num_nvl_bytes), ("num_rdma_bytes", num_rdma_bytes)):
            if not 0 <= integer(name, value) <= _LARGEST_SIZE or value % 128 != 0:
                raise InvalidArgument(f"{name} is {value}, allowed: multiples of 128 from 0 to 2**56")
        num_qps_per_rank = integer("num_qps_per_rank", num_qps_per_rank, 0)
        # Whatever may fail on this rank alone comes before the ranks wait for each other.
        depth = _native.environment_text("NVSHMEM_QP_DEPTH")
        qp_depth = int(depth, 16 if depth.startswith(("0x", "0X")) else 10)
        if enable_shrink and not (low_latency_mode and num_rdma_bytes > 0):
            raise InvalidArgument("enable_shrink is True: it needs low_latency_mode=True and num_rdma_bytes > 0")

        self.num_nvl_bytes: int = num_nvl_bytes
        self.num_rdma_bytes: int = num_rdma_bytes
        self.low_latency_mode: bool = low_latency_mode
        self.explicitly_destroy: bool = explicitly_destroy
        self.enable_shrink: bool = enable_shrink

        memory = max(num_nvl_bytes, SMALLEST_HEAP)
        self._make(
            memory=memory,
            # Between nodes combine copies rows into the heap.
            memory_between_nodes=2 * memory + (0 if low_latency_mode else num_rdma_bytes),
            low_latency_bytes=num_rdma_bytes if low_latency_mode else 0,
            low_latency_masking=enable_shrink,
            allow_nvlink_for_low_latency=allow_nvlink_for_low_latency_mode,
            num_qps_per_rank=min(num_qps_per_rank, 1 << 16),
        )
        self._num_nodes: int = self._native.num_nodes()
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
            self._native.low_latency_update_mask(remote, True)
            self._disconnected.add(remote)

    def connect_ranks(self, remote_ranks: Sequence[int], activate: bool = True) -> None:
        """Collective over all ranks that live, and over one new process for each rank to be replaced; the host waits.

        Replaces those of ``remote_ranks`` that all ranks have left out with ``disconnect_ranks``, or whose processes have ended,
        by new processes that make a ``Buffer`` with ``tcp_store_group`` meanwhile. All ranks are unmasked; without ``activate``
        the new ones stay masked here. Needs ``enable_shrink`` and ``set_tcp_store_group``; docs/how-to/replace-a-rank.md has
        all steps, what stays valid, and the errors."""
        remote_ranks = self._remote(remote_ranks)
        gone = self._disconnected | set(self._native.metrics()["lost_ranks"])
        replaced = [remote for remote in remote_ranks if remote in gone]
        if replaced:
            if self._store is None:
                raise InvalidArgument("connect_ranks: there is no store, allowed: after set_tcp_store_group(store)")
            ranks = StoreRanks(self._store, self.rank, self.group_size, replaced)
            self._native.replace_ranks(bootstrap_of(ranks), replaced)
            self.group = ranks
            self._disconnected.clear()
        for remote in replaced if not activate else remote_ranks:
            self._native.low_latency_update_mask(remote, not activate)

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
        """Bytes of ``num_rdma_bytes`` for all low-latency calls of these or smaller shapes. A multiple of 128."""
        sizes = [integer(name, given, 1) for name, given in locals().items()]
        return align(_native.low_latency_bytes_hint(*sizes), ALIGNMENT)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """What ``dispatch`` and ``combine`` use without ``config``: ``Buffer.num_sms``, for any number of ranks."""
        integer("num_ranks", num_ranks, 1)
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

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
            use_rdma_buffer: the memory of low-latency calls (``num_rdma_bytes``), or, without ``low_latency_mode`` between
                nodes, what those bytes have become. docs/reference/python.md says what may be done with it.
        """
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype is of type {type_name(dtype)}, expected a torch.dtype")
        offset = integer("offset", offset, 0)
        if use_rdma_buffer and self._num_nodes > 1 and not self.low_latency_mode:
            everything = self._native.local_memory()
            memory = everything[max(0, everything.numel() - self.num_rdma_bytes) :][offset:]
        elif use_rdma_buffer:
            memory = self._native.low_latency_memory()[offset:]
        else:
            memory = self._native.local_memory()[offset : self.num_nvl_bytes]
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
            topk_idx: as for ``dispatch``.

        Returns:
            ``num_tokens_per_rank`` ``[R]`` int32, tokens with at least one expert on that rank;
            ``num_tokens_per_rdma_rank`` ``[P]`` int32, tokens with at least one expert on that node, ``None`` where
            there is one node;
            ``num_tokens_per_expert`` ``[E]`` int32, entries that name the expert;
            ``is_token_in_rank`` ``[T, R]`` bool; the event.
        """
        order = _order(previous_event, async_finish, allocate_on_comm_stream)
        *counts, event = self._native.get_dispatch_layout(topk_idx, num_experts, *order)
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
                way; needed without a handle. The call reads the last two, and counts by itself.
            topk_idx, topk_weights: ``[T, K]``, contiguous, ``deep_ep.topk_idx_t`` (or int32; what is no expert selects
                nothing) and float32. Weights only with indices.
            expert_alignment: the counts in the returned list are rounded up to multiples of it.
            num_worst_tokens: if positive, results have this many rows and the host does not wait to learn N (CUDA
                graphs can hold the call). A safe value is the largest T times R. If more rows come, the next call
                raises ``OutOfMemory``.
            num_tokens_per_rdma_rank: ignored.
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
        order = _order(previous_event, async_finish, allocate_on_comm_stream)
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise WrongUse("topk_idx and topk_weights must be None with a handle")
        elif num_tokens_per_rank is None or is_token_in_rank is None or num_tokens_per_expert is None:
            layout = "num_tokens_per_rank, is_token_in_rank or num_tokens_per_expert"
            raise WrongUse(f"{layout} is missing: without a handle the layout is needed")
        *results, event = self._native.dispatch(
            *one_or_two("x", x, "(rows, scales)"), handle, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights, expert_alignment, num_worst_tokens,
            _sms_of(config), *order,
        )  # fmt: skip
        inputs = x, handle, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights
        return (*results, self._event(event, *inputs))  # type: ignore[return-value]

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
        order = _order(previous_event, async_finish, allocate_on_comm_stream)
        *results, event = self._native.combine(x, handle, topk_weights, *biases(bias), _sms_of(config), *order)
        return (*results, self._event(event, x, topk_weights, bias, handle))  # type: ignore[return-value]

    # Upstream's names for calls between nodes: the same as ``dispatch`` and ``combine``, which know where ranks are.
    internode_dispatch = dispatch
    internode_combine = combine

    # --------------------------------------------------------------------------------------------------- low latency

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Optional[torch.Tensor] = None,
        dispatch_wait_recv_cost_stats: Optional[torch.Tensor] = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        arrival_counters: Optional[torch.Tensor] = None,
        arrival_rows: int = 0,
        use_nvfp4: bool = False,
        x_global_scale: Optional[torch.Tensor] = None,
        align_fp8_quantization: bool = False,
        combine_weights: Optional[torch.Tensor] = None,
    ) -> Tuple[Any, torch.Tensor, LowLatencyHandle, EventOverlap, Hook]:
        """Sends every token to each of its experts.

        Args:
            x: ``[T, H]`` bfloat16 contiguous, H a multiple of 128 (of 512 with ``use_ue8m0``).
            topk_idx: as for ``dispatch``. An expert that a token names twice gets it twice.
            num_max_dispatch_tokens_per_rank, num_experts: M and E, equal on all ranks. M * K is at most 65535.
            cumulative_local_expert_recv_stats: ``[L]`` int32: rows received by each expert are added.
            dispatch_wait_recv_cost_stats: ``[R]`` int64: clock cycles spent waiting for each rank are added.
            use_fp8: cast each 128 channels to 8-bit floating point with a scale of their own.
            round_scale: scales are powers of two. Without ``use_fp8`` there are none, and it has no effect.
            use_ue8m0: scales are exponents, four in an int32, the first in the lowest byte. Needs ``round_scale``.
            arrival_counters: ``[L, W]`` int64, zeros at first: words by which a kernel on another stream sees which rows
                are there while the call still receives (docs/explanation/low-latency.md). Not with ``enable_shrink``.
            arrival_rows: how many rows a word stands for, a power of two (W = R * M / that, rounded up); 0: all of an
                expert (W = 1).
            use_nvfp4: cast each 16 channels to 4-bit floating point with an 8-bit scale of their own, as SGLang asks for
                it. It takes the place of ``use_fp8``, which may stay at its default.
            x_global_scale: one float32, ``[]`` or ``[1]``, with ``use_nvfp4``: a channel is about value * scale / this.
                ``None``: 1.
            align_fp8_quantization: cast as the per-token-group quantisers of SGLang and Megatron do, bit for bit: true
                divisions, amax at least 1e-10. Only with ``use_fp8`` and without ``round_scale``; else without effect.
            combine_weights: ``[T, K]`` float32: the ``topk_weights`` of all combines with this handle, whose ``topk_idx``
                is this one, too (otherwise their results are undefined). Combine may take less time then. It still
                needs them, for ranks that have one row of a token.

        Returns:
            The rows ``[L, R * M, H]``: bfloat16, or (``float8_e4m3fn``, scales), scales float32 ``[L, R * M, H / 128]``
            (int32 ``[L, R * M, H / 512]`` with ``use_ue8m0``), the last two dimensions column-major; with ``use_nvfp4`` uint8
            ``[R * M, H / 2, L]`` and uint8 scales ``[32, 4, R * M / 128 (rounded up), 4, H / 64, L]``, whose order
            docs/explanation/low-latency.md gives;
            ``recv_count`` ``[L]`` int32: rows ``0 .. recv_count[l] - 1`` of expert l are valid, by source rank, then by
            token; all others are undefined;
            the handle: ``src_info`` ``[L, R * M]`` int32, the token index at the source; ``layout_range`` ``[L, R]``
            int64, ``(first row << 32) | rows`` of each source; M; H; E. Tuples made of the same tensors work as well,
            copies of ``src_info`` do not; the event; the hook or ``None``.
        """
        scale = x_global_scale
        if use_nvfp4 and isinstance(scale, torch.Tensor) and scale.numel() == 1:
            scale = scale.reshape(1)  # it may have any shape
        rows, count, handle, event, hook = self._native.low_latency_dispatch(
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            num_experts,
            cumulative_local_expert_recv_stats,
            dispatch_wait_recv_cost_stats,
            use_fp8,
            round_scale,
            use_ue8m0,
            async_finish,
            return_recv_hook,
            arrival_counters,
            arrival_rows,
            use_nvfp4,
            scale,
            align_fp8_quantization,
            combine_weights,
        )
        if use_nvfp4:  # views, experts last, that show the insides of the scales' tiles
            values, scales = rows
            rows = values.permute(1, 2, 0), scales.view(*scales.shape[:3], 32, 4, 4).permute(3, 4, 1, 5, 2, 0)
        kept = None
        if async_finish:
            kept = (x, topk_idx, rows, count, handle, cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats,
                    arrival_counters, x_global_scale, combine_weights)
        return rows, count, handle, EventOverlap(event, kept), hook  # type: ignore[return-value]

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Optional[torch.Tensor] = None,
        combine_wait_recv_cost_stats: Optional[torch.Tensor] = None,
        *,
        overlap: bool = False,
        packed_recv_count: Optional[torch.Tensor] = None,
        comp_signal: Optional[torch.Tensor] = None,
        block_m: int = 64,
        threshold: int = 0,
        num_sms: int = 3,
        src_signals: Optional[torch.Tensor] = None,
        src_signal_expect_value: int = 0,
    ) -> Tuple[torch.Tensor, EventOverlap, Hook]:
        """Adds up, for each token, its experts' rows times its weights.

        Args:
            x: ``[L, R * M, H]`` bfloat16 contiguous, rows where dispatch put them. Only valid rows are read.
            topk_idx, topk_weights: ``[T, K]`` of this rank's tokens, contiguous; indices as dispatched, or -1 where a
                selection is to be left out now. Must stay unchanged until the hook has run.
            handle: of the dispatch; any number of combines may use it.
            use_logfmt: accepted for upstream's callers, without effect: rows travel as without it (docs/explanation/low-latency.md).
            zero_copy: the rows are already in the tensor that ``get_next_low_latency_combine_buffer`` gave for this handle,
                and ``x`` is that tensor, or one of the same shape, which stands for it. Not with ``use_logfmt``.
            out: ``[T, H]`` bfloat16 contiguous: written and returned.
            combine_wait_recv_cost_stats: ``[R]`` int64: clock cycles spent waiting for each rank are added.
            return_recv_hook: within a node equal on all ranks.
            overlap: single-batch overlap, as SGLang asks for it: the GEMM that writes ``x`` runs beside the send part and
                raises signals; combine sends each row once its signal is there. With ``return_recv_hook`` only, among ranks
                that reach each other by NVLink; ``NotImplementedError`` elsewhere. Without it the following have no effect.
            comp_signal, block_m, threshold, num_sms, packed_recv_count: SGLang's form on Hopper. int32, at least
                ``[L * ceil(R * M / block_m)]``: element ``l * ceil(R * M / block_m) + b`` reaches ``threshold`` when
                rows ``b * block_m`` and so on of expert l are there. The send part takes ``num_sms`` SMs at most.
                ``packed_recv_count`` is not read: the handle knows which rows came.
            src_signals, src_signal_expect_value: the form on Blackwell. uint32 or int32 ``[L]``: element l reaches
                ``src_signal_expect_value`` when all rows of expert l are there; ``None``: they are. The send part takes
                32 SMs at most.

        Returns:
            ``combined_x`` ``[T, H]`` bfloat16: each rank adds in float32, selections ascending; this rank adds those parts
            in float32, ranks ascending, and rounds (docs/reference/sums.md has the details). The same bits with and without
            hooks and ``combine_weights``, over every transport. The event; the hook or ``None``.
        """
        overlapping: Any = None
        if overlap:
            if comp_signal is not None and src_signals is not None:
                raise InvalidArgument("comp_signal and src_signals are both given, allowed: one of them")
            if comp_signal is None and packed_recv_count is not None:
                raise InvalidArgument("packed_recv_count is given, so comp_signal must be: it is None")
            if comp_signal is not None:
                each = integer("block_m", block_m, 1), integer("threshold", threshold, 1), integer("num_sms", num_sms, 1)
                overlapping = comp_signal, *each
            elif src_signals is not None:
                value = integer("src_signal_expect_value", src_signal_expect_value, 1)
                check_dtype("src_signals", src_signals, torch.int32, torch.uint32)
                overlapping = src_signals.view(torch.int32), 0, value, 32
            else:
                overlapping = None, 0, 1, 32
        if zero_copy:
            if use_logfmt:
                raise InvalidArgument("zero_copy and use_logfmt are both true, allowed: at most one of them")
            lent = getattr(handle[0], "combine_buffer", x)
            if (x.shape, x.dtype) != (lent.shape, lent.dtype):
                came, wanted = (f"{one.dtype} {list(one.shape)}" for one in (x, lent))
                raise InvalidArgument(f"x is {came}, expected {wanted}: with zero_copy it must look like the combine buffer")
            x = lent
        combined_x, event, hook = self._native.low_latency_combine(
            x,
            topk_idx,
            topk_weights,
            handle,
            out,
            combine_wait_recv_cost_stats,
            async_finish,
            return_recv_hook,
            overlapping,
        )
        kept = (x, topk_idx, topk_weights, handle, combined_x, combine_wait_recv_cost_stats) if async_finish else None
        return combined_x, EventOverlap(event, kept), hook  # type: ignore[return-value]

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """The tensor ``[L, R * M, H]`` bfloat16, contiguous, whose rows a combine with ``zero_copy=True`` sends. Fill
        it between dispatch and combine, on the combine's stream. It is E * M * H * 2 bytes of PyTorch's memory, and lives as
        long as the handle's ``src_info``, or until this is called for a tuple with another M, H or E."""
        self._check_alive()
        if not isinstance(handle, tuple):
            raise TypeError(f"handle is of type {type_name(handle)}, expected the tuple that low_latency_dispatch returned")
        if len(handle) != 5:
            raise InvalidArgument(f"handle has {len(handle)} elements, expected the tuple of 5 that low_latency_dispatch returned")
        src_info, _, tokens, hidden, experts = handle
        shape = experts // self.group_size, self.group_size * tokens, hidden
        if getattr(getattr(src_info, "combine_buffer", None), "shape", None) != shape:
            with torch.inference_mode(False):
                src_info.combine_buffer = src_info.new_empty(shape, dtype=torch.bfloat16)
        return src_info.combine_buffer

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Collective: waits, on the current stream, for all ranks that are not masked. Calls are numbered, so nothing needs
        cleaning; memory of low-latency calls that the program has asked for (``get_local_buffer_tensor``) is zeroed first."""
        self._native.low_latency_clean()

    # Ranks that died. Sends go to ranks that are not masked, and only those are waited for. If a call masks a rank, all ranks
    # that go on mask it; a program masks or unmasks for its own rank alone.

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Masks a rank, or, **by default, unmasks** it; on the current stream. Needs ``enable_shrink``."""
        self._native.low_latency_update_mask(integer("rank_to_mask", rank_to_mask), bool(mask))

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Writes 1 for masked ranks and 0 for others to ``mask_status`` ``[R]`` int32, on the current stream. Needs
        ``enable_shrink``."""
        self._native.low_latency_query_mask(mask_status)

    def low_latency_clean_mask_buffer(self) -> None:
        """Unmasks the ranks that this program has masked, on the current stream; ranks that all have found lost come back
        with ``low_latency_resume``. Needs ``enable_shrink``."""
        self._native.low_latency_clear_mask()

    def low_latency_resume(self) -> None:
        """Collective over **all** ranks, the host waits: brings every rank to the same number of calls and unmasks all,
        so that ranks that were away take part again. Receive parts whose hooks have not been called are dropped. Needs
        ``enable_shrink``. Not part of upstream's interface."""
        self._native.low_latency_resume()

def _order(previous_event: Any, async_finish: bool, allocate_on_comm_stream: bool) -> Tuple[Any, bool]:
    event = event_in(previous_event)
    if allocate_on_comm_stream and not (async_finish and event is not None):
        raise InvalidArgument("allocate_on_comm_stream needs previous_event and async_finish, one of which is missing")
    return event, async_finish


def _sms_of(config: Optional[Config]) -> int:
    if config is None:
        return Buffer.num_sms
    if not isinstance(config, Config):
        raise TypeError(f"config is of type {type_name(config)}, expected a deep_ep.Config or None")
    return config.num_sms
