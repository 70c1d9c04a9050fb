"""The second interface: one dispatch and one combine for training, prefill and decoding."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any, List, Optional, Tuple, Union

import torch

from .. import _native, comm
from ..arguments import Bias, MaybeTensor, RowsLike, biases, integer, one_or_two, type_name
from ..errors import InvalidArgument, WrongUse, _left_out
from ..exchanges import rank_and_size
from ..peers import SMALLEST_HEAP, NativeOwner, event_in
from ..utils import envs
from ..utils.event import EventHandle, EventOverlap
from ..utils.math import align, ceil_div
from .allocator import ALIGNMENT
from .base import Domains

AnyEvent = Union[None, EventHandle, EventOverlap]

__all__ = ["ElasticBuffer", "EPHandle"]

_FEWEST_SMS = 4
_FEWEST_SMS_ALONE = 64
_HEADROOM = 1.25
_DEFAULT_TIMEOUT_S = 100


@dataclass(eq=False, repr=False)
class EPHandle:
    """The handle of a dispatch: it says to which places rows went. All attributes may be written; calls use what they find.

    Symbols as in ``ElasticBuffer``. Without a host wait, sizes are the largest possible ones, and rows of
    ``recv_src_metadata`` after the last valid one are undefined.

    Attributes:
        do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: of the dispatch.
        topk_idx: ``[T, K]``, the dispatched selections: a copy, or with ``do_handle_copy=False`` the very tensor. Handles of
            ``EPBuffer`` refuse (``errors.WrongUse``, an ``AssertionError``) to give a tensor that was written to since.
        num_recv_tokens, num_expanded_tokens: received rows N, and rows of the expanded layout with their padding.
        num_recv_tokens_per_expert_list: rows of each local expert, rounded up to the alignment; empty without host wait.
        psum_num_recv_tokens_per_scaleup_rank: ``[R]`` int32, where the rows of each source end; the last one is N.
        psum_num_recv_tokens_per_expert: ``[L]`` int32. Non-expanded: inclusive sums of the rounded counts. Expanded:
            where each expert's rows end, without its padding.
        num_unaligned_recv_tokens_per_expert: ``[L]`` int32, counts as they are.
        recv_src_metadata: ``[N, K + 2]`` int32. Column 0: source rank * M + token; column 1: source rank * K + the last
            selection with an expert of this rank; others: the expanded row of each selection, -1 for none.
        dst_buffer_slot_idx: ``[T, K]`` int32: in all K columns the row that this rank received of its token, or -1; between nodes -1.
        token_metadata_at_forward, channel_linked_list, cached_recv_src_metadata_before_sort: ``None``.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: torch.Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: List[int]
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor
    psum_num_recv_tokens_per_expert: torch.Tensor
    num_unaligned_recv_tokens_per_expert: torch.Tensor
    recv_src_metadata: torch.Tensor
    dst_buffer_slot_idx: torch.Tensor
    token_metadata_at_forward: Optional[torch.Tensor] = None
    channel_linked_list: Optional[torch.Tensor] = None
    cached_recv_src_metadata_before_sort: Optional[torch.Tensor] = field(default=None, init=False)
    # For cached dispatches: the native handle, and [N, K] int32, the local expert of each selection or -1, because
    # programs write into what dispatch returned. Functions of the inputs alone, so that the other attributes may be
    # replaced by those of another dispatch of the same inputs.
    _route: Any = field(default=None, init=False)
    _local: Optional[torch.Tensor] = field(default=None, init=False)

    #: Whether later writes to the tensor in ``topk_idx`` are found out, but for tensors of inference mode, which count none.
    _watched: bool = field(default=False, init=False)

    def _get_topk_idx(self) -> torch.Tensor:
        if self._watched and _writes_to(self._topk_idx) != self._writes:
            raise WrongUse("handle.topk_idx was written to after dispatch: the handle refers to it, so give dispatch a copy")
        return self._topk_idx

    def _set_topk_idx(self, given: torch.Tensor) -> None:
        self._topk_idx, self._writes = given, _writes_to(given)

    def _cut(self, counts: List[int], received: int) -> None:
        """Of a dispatch without host wait: sizes become exact, now that the host knows them."""
        step = self.expert_alignment
        self.num_recv_tokens_per_expert_list = [-(-count // step) * step for count in counts]
        self.num_recv_tokens = received
        self.num_expanded_tokens = sum(self.num_recv_tokens_per_expert_list)
        self.recv_src_metadata = self.recv_src_metadata[:received].clone()
        if self._local is not None:
            self._local = self._local[:received].clone()

    def _tensors(self) -> List[torch.Tensor]:
        return [value for value in vars(self).values() if isinstance(value, torch.Tensor)]


def _writes_to(given: Any) -> Optional[int]:
    return given._version if isinstance(given, torch.Tensor) and not given.is_inference() else None


# Not in the class, where it would be the field's default.
EPHandle.topk_idx = property(EPHandle._get_topk_idx, EPHandle._set_topk_idx)  # type: ignore[assignment]


class ElasticBuffer(NativeOwner, Domains):
    """Expert-parallel communication of one rank with the other ranks of its group.

    Symbols as of ``Buffer``, and L = E / R, M = ``num_max_tokens_per_rank`` of the call, A = ``expert_alignment``.

    Two layouts of received rows. *Non-expanded*: a token once for each rank, by source rank, then by token. *Expanded*:
    a row for each (token, local expert), by expert, then by source rank and token; each expert's rows begin at a multiple
    of A. The order is the same every time.

    Streams, results and exceptions are as of ``Buffer``, with ``async_with_compute_stream`` for ``async_finish``. The host waits
    in ``dispatch`` with ``do_cpu_sync`` only. Ranks agree on all arguments but tensors, T, statistics and streams.
    """

    _events_may_keep = True

    # Of EPBuffer: memory beside that of dispatch and combine, and the communication stream that all its objects share.
    num_lb_bytes: int = 0
    _shared_stream: Optional[torch.cuda.Stream] = None

    def __init__(
        self,
        group: Any,
        num_bytes: Optional[int] = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = _DEFAULT_TIMEOUT_S,
        explicitly_destroy: bool = False,
    ) -> None:
        """Collective: every rank of the group calls it, with equal arguments and with its CUDA device current.

        Args:
            group: a ``torch.distributed`` group of any backend, or an mpi4py communicator. GPU or CPU: as ``Buffer``.
            num_bytes: size of the buffer, a multiple of 2 MiB, with ``num_cpu_bytes``. Without it ``hidden`` and
                ``num_max_tokens_per_rank`` give the size, see ``get_buffer_size_hint``.
            num_max_tokens_per_rank: also what ``dispatch`` uses without its own.
            allow_multiple_reduction: ``combine`` from the expanded layout adds up on the experts' rank first, and rounds
                there; ``False``: all rows travel, and there is one rounding.
            num_gpu_timeout_secs: for how long this buffer's calls wait for a rank. With the default DEEP_EP_TIMEOUT_S says it.
            explicitly_destroy: memory is freed by ``destroy``; without it, when the object goes.
            deterministic, sl_idx, num_cpu_timeout_secs: accepted without effect. DEEP_EP_RDMA_TRAFFIC_CLASS sets the traffic class.
        """
        self.group: Any = group
        self.rank_idx, self.num_ranks = rank_and_size(group)
        num_cpu_bytes = integer("num_cpu_bytes", num_cpu_bytes, 0)
        self.num_max_tokens_per_rank: int = integer("num_max_tokens_per_rank", num_max_tokens_per_rank, 0)
        hidden = integer("hidden", hidden, 0)
        if num_bytes is None:
            if not (self.num_max_tokens_per_rank and hidden):
                raise InvalidArgument(
                    f"num_bytes is None, allowed: a size, or num_max_tokens_per_rank and hidden above 0 (they are "
                    f"{self.num_max_tokens_per_rank} and {hidden})"
                )
            if num_cpu_bytes:
                raise InvalidArgument(f"num_cpu_bytes is {num_cpu_bytes}, allowed: 0 where num_bytes is not given")
            num_bytes = self.get_buffer_size_hint(
                group, self.num_max_tokens_per_rank, hidden, num_topk, allow_multiple_reduction=allow_multiple_reduction
            )
        num_bytes = integer("num_bytes", num_bytes, 1)
        for name, value in (("num_bytes", num_bytes), ("num_cpu_bytes", num_cpu_bytes)):
            if value % ALIGNMENT or value > num_bytes:
                raise InvalidArgument(f"{name} is {value}, allowed: multiples of 2 MiB up to num_bytes, which is {num_bytes}")

        self.num_bytes: int = num_bytes
        self.num_cpu_bytes: int = num_cpu_bytes
        self.deterministic: bool = bool(deterministic)
        self.allow_hybrid_mode: bool = bool(allow_hybrid_mode)
        self.allow_multiple_reduction: bool = bool(allow_multiple_reduction)
        self.prefer_overlap_with_compute: bool = bool(prefer_overlap_with_compute)
        self.explicitly_destroy: bool = bool(explicitly_destroy)
        # By default as many as upstream allocates.
        default_qps = 129 if self.allow_hybrid_mode else 17
        self.num_allocated_qps: int = integer("num_allocated_qps", num_allocated_qps, 0) or default_qps
        timeout = integer("num_gpu_timeout_secs", num_gpu_timeout_secs, 1)
        integer("num_cpu_timeout_secs", num_cpu_timeout_secs, 1)
        memory = max(num_bytes - num_cpu_bytes, SMALLEST_HEAP)
        self._make(
            stream=self._shared_stream,
            timeout_s=None if timeout == _DEFAULT_TIMEOUT_S else float(timeout),
            # Inside a node rows travel through the window alone, and results are the framework's. Between nodes combine
            # copies rows into the heap. The library takes a quarter of it for the window, so memory for replicas counts
            # four thirds.
            memory=memory // 2 + ALIGNMENT + self.num_lb_bytes,
            window_bytes=memory // 2,
            memory_between_nodes=2 * memory + ceil_div(4 * self.num_lb_bytes, 3),
        )
        self.num_rdma_ranks: int = self._native.num_nodes()
        self.num_nvlink_ranks: int = self.num_ranks // self.num_rdma_ranks
        self._domains = self.num_rdma_ranks, self.num_nvlink_ranks
        least = _FEWEST_SMS if self.prefer_overlap_with_compute else _FEWEST_SMS_ALONE
        self._count_sms = functools.lru_cache(maxsize=None)(functools.partial(_count_sms, self._device, self._domains, least))
        self.num_scaleout_ranks: int = 1
        self.num_scaleup_ranks: int = self.num_ranks
        self.scaleout_rank_idx: int = 0
        self.scaleup_rank_idx: int = self.rank_idx
        self.nccl_comm_handle: Any = None

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """The ``num_bytes`` of a buffer made with these settings: equal on all ranks, a multiple of 2 MiB."""
        # Room for the largest dispatch, or its combine, at full speed: R * M rows come, and for each of M tokens a row from
        # each rank that has one, or from each selection. 8-bit rows may be sent in any case: bfloat16 ones are larger.
        _, ranks = rank_and_size(group)
        most, hidden = integer("num_max_tokens_per_rank", num_max_tokens_per_rank, 1), integer("hidden", hidden, 1)
        topk = integer("num_topk", num_topk, 0) or _native.max_topk
        back = most * (min(ranks, topk) if allow_multiple_reduction else topk)
        # One call has the window at a time, which is half of the memory. The hint below adds a third.
        tokens = ceil_div(3 * max(most, ceil_div(back, ranks)), 2)
        size = _native.heap_bytes_hint(ranks, tokens, 2 * hidden, topk, 4 * ceil_div(hidden, 32) + 4 * topk)
        return align(size, ALIGNMENT)

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """An even number of SMs that should keep the links busy; what calls use with ``num_sms=0``. Results do not depend
        on it. Rates are in GB/s; 0 stands for those of this machine."""
        if num_scaleout_topk != 0:
            raise WrongUse(f"num_scaleout_topk is {num_scaleout_topk}, allowed: 0")
        asked = integer("num_experts", num_experts, 1), integer("num_topk", num_topk, 1)
        read, write = sm_read_gbs or envs.get_sm_read_gbs(), sm_write_gbs or envs.get_sm_write_gbs()
        return self._count_sms(*asked, rdma_gbs, nvlink_gbs, read, write)

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Queue pairs that a call with this many SMs would use upstream. Here calls choose by themselves."""
        wanted = 16 * num_sms + 1 if self.allow_hybrid_mode else min(num_sms, 9)
        return min(wanted, self.num_allocated_qps)

    @staticmethod
    def capture() -> EventHandle:
        """An event behind all work that the current stream holds now."""
        return EventHandle()

    barrier = comm.barrier

    def dispatch(
        self,
        x: RowsLike,
        topk_idx: Optional[torch.Tensor] = None,
        topk_weights: Optional[torch.Tensor] = None,
        cumulative_local_expert_recv_stats: Optional[torch.Tensor] = None,
        num_experts: Optional[int] = None,
        num_max_tokens_per_rank: Optional[int] = None,
        expert_alignment: Optional[int] = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: AnyEvent = None,
        previous_event_before_epilogue: AnyEvent = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: Optional[EPHandle] = None,
        do_handle_copy: bool = True,
        do_cpu_sync: Optional[bool] = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> Tuple[RowsLike, MaybeTensor, MaybeTensor, EPHandle, EventOverlap]:
        """Sends every token to the ranks that own its experts.

        Args:
            x: as for ``Buffer.dispatch``.
            topk_idx: as for ``Buffer.dispatch``. An expert that a token names twice gets two rows in the expanded layout.
            topk_weights: ``[T, K]`` float32 contiguous, also with ``handle``; of all ranks, or of none.
            cumulative_local_expert_recv_stats: ``[L]`` int32: this call's counts are added. Not with ``handle``.
            num_experts: E; needed without ``handle``.
            num_max_tokens_per_rank: M, at least T, equal on all ranks; by default the handle's, or the buffer's.
            expert_alignment: A; by default the handle's, or 1.
            num_sms: at most that many SMs for the rows' journey; 0: the handle's, or ``get_theoretical_num_sms``.
            previous_event: an ``EventHandle`` or ``EventOverlap``; needs ``allocate_on_comm_stream``.
            previous_event_before_epilogue: what must be done before results are written; the call waits for it at its start.
            handle: of an earlier dispatch of as many tokens: rows go where they went then. ``topk_idx`` must not be given.
            do_handle_copy: ``False``: the handle holds ``topk_idx`` itself.
            do_cpu_sync: the host waits and results have exact sizes; by default so without ``handle``. ``False``: results
                have ``M * R`` rows, or as many as the expanded layout may need, and hold nothing behind their end.
            do_expand: the expanded layout.
            do_zero_padding: rows between the experts' are zero instead of undefined. Needs ``do_expand``.
            use_tma_aligned_col_major_sf: received scales have strides ``(1, rows rounded up to 4)``.

        Returns:
            ``recv_x`` in the form of ``x``; ``recv_topk_idx`` ``[N, K]``, indices among this rank's experts or -1
            (expanded: ``None``); ``recv_topk_weights`` ``[N, K]``, 0 where the index is -1 (expanded: one for each row),
            or ``None``; the handle; the event.
        """
        order = self._order(
            num_qps, previous_event, previous_event_before_epilogue, async_with_compute_stream, allocate_on_comm_stream
        )
        if do_zero_padding and not do_expand:
            raise InvalidArgument("do_zero_padding is True, allowed: only with do_expand")
        expand, column_major = bool(do_expand), bool(use_tma_aligned_col_major_sf)
        stats = cumulative_local_expert_recv_stats
        given: Optional[Tuple[Any, ...]] = None
        if handle is None:
            if topk_idx is None:
                raise InvalidArgument("topk_idx is None, allowed: a tensor, or a handle instead")
            if num_experts is None:
                raise InvalidArgument("num_experts is None, allowed: a multiple of the number of ranks, or a handle instead")
            alignment = 1 if expert_alignment is None else expert_alignment
            most = self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
            topk = topk_idx.size(1) if isinstance(topk_idx, torch.Tensor) and topk_idx.dim() == 2 else 1  # else refused below
            sms = num_sms or self.get_theoretical_num_sms(num_experts, topk)
        else:
            _check_handle(handle)
            if topk_idx is not None:
                raise WrongUse("topk_idx is given: with a handle the selections are the handle's")
            if do_cpu_sync:
                raise WrongUse("do_cpu_sync is True: with a handle sizes are known")
            for name, value in (
                ("num_experts", num_experts),
                ("expert_alignment", expert_alignment),
                ("num_max_tokens_per_rank", num_max_tokens_per_rank),
            ):
                known = getattr(handle, name)
                if value is not None and value != known:
                    raise WrongUse(f"{name} is {value}, allowed: the handle's, which is {known}")
            if stats is not None:
                raise InvalidArgument("cumulative_local_expert_recv_stats is given, allowed: only without handle")
            if handle._route is None or handle._local is None:
                raise InvalidArgument("handle is one that no dispatch returned, allowed: those that did")
            if expand and not handle.do_expand:
                raise InvalidArgument("do_expand is True, allowed: only with the handle of a dispatch with do_expand")
            num_experts, alignment, most = handle.num_experts, handle.expert_alignment, handle.num_max_tokens_per_rank
            sms = num_sms or handle.num_sms
            topk_idx = handle.topk_idx
            given = (
                handle._route, handle.recv_src_metadata, handle.psum_num_recv_tokens_per_scaleup_rank, handle._local,
                handle.psum_num_recv_tokens_per_expert if do_zero_padding else None, handle.num_expanded_tokens,
            )  # fmt: skip
        recv_x, recv_idx, recv_weights, made, event = self._native.dispatch_elastic(
            *one_or_two("x", x, "(rows, scales)"), given, topk_idx, topk_weights, stats, num_experts, most, alignment, do_cpu_sync is None or bool(do_cpu_sync), expand,
            bool(do_zero_padding), column_major, bool(do_handle_copy), sms, *order,
        )  # fmt: skip
        if handle is not None:
            return recv_x, recv_idx, recv_weights, handle, self._event(event, x, topk_weights, event and handle._tensors())
        selections, *attributes, route, local = made
        handle = EPHandle(
            expand, num_experts, alignment, most, sms, topk_idx if selections is None else selections, *attributes
        )
        handle._route, handle._local = route, local
        return recv_x, recv_idx, recv_weights, handle, self._event(event, x, topk_idx, topk_weights, stats)

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: Optional[torch.Tensor] = None,
        bias: Bias = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: AnyEvent = None,
        previous_event_before_epilogue: AnyEvent = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Tuple[torch.Tensor, MaybeTensor, EventOverlap]:
        """Brings the experts' rows back and adds them up for each token.

        Args:
            x: bfloat16 contiguous. Non-expanded: ``[N, H]``, a row for each received one. Expanded (by
                ``handle.do_expand``): rows where ``handle.recv_src_metadata`` says; no other is read, and one that ``x`` does not
                have counts as none.
            topk_weights: float32 contiguous; ``[N, K]``, or, expanded, one for each row of ``x``.
            bias: ``[T, H]`` bfloat16, or a tuple of two such, each of which may be ``None``.
            num_sms: at most that many SMs send rows; 0: the handle's. Inside a node up to twice as many others only add up.

        Returns:
            ``combined_x`` ``[T, H]`` bfloat16; ``combined_topk_weights`` ``[T, K]`` float32 or ``None``: for each
            selection the weight that its expert's rank holds, 0 where there is none; the event.

            Sums are made in float32. Expanded with ``allow_multiple_reduction``: each rank adds the rows of a token,
            selections ascending, and rounds. The token's rank adds biases, then the ranks' rows in the order of their
            last selections (without ``allow_multiple_reduction``: all rows, selections ascending), and rounds.
        """
        combined, event = self._call_combine(
            False, x, handle, topk_weights, bias, num_sms, num_qps, previous_event,
            previous_event_before_epilogue, async_with_compute_stream, allocate_on_comm_stream,
        )  # fmt: skip
        return (*combined, event)

    def _call_combine(
        self, deferred, x, handle, topk_weights, bias, num_sms, num_qps, previous_event, before_epilogue, asynchronous,
        allocate_on_comm_stream,
    ):  # fmt: skip
        """Results of the native call, and its event."""
        _check_handle(handle)
        order = self._order(num_qps, previous_event, before_epilogue, asynchronous, allocate_on_comm_stream)
        single = bool(handle.do_expand) and not self.allow_multiple_reduction
        *results, event = self._native.combine_elastic(
            deferred, x, handle.recv_src_metadata, handle.psum_num_recv_tokens_per_scaleup_rank, handle.topk_idx,
            handle.dst_buffer_slot_idx, handle.num_experts, handle.num_max_tokens_per_rank, bool(handle.do_expand), single,
            topk_weights, *biases(bias), num_sms or handle.num_sms, *order,
        )  # fmt: skip
        return results, self._event(event, x, topk_weights, bias, event and handle._tensors())

    def _order(
        self, num_qps: int, previous: AnyEvent, before_epilogue: AnyEvent, asynchronous: bool, allocate_on_comm_stream: bool
    ):
        """The events that a native call waits for, and whether it records one. Peers write rows straight into the results."""
        if integer("num_qps", num_qps, 0) > self.num_allocated_qps:
            raise WrongUse(f"num_qps is {num_qps}, allowed: at most {self.num_allocated_qps}")
        event = event_in(previous)
        if event is not None and not allocate_on_comm_stream:
            raise InvalidArgument("previous_event needs allocate_on_comm_stream, which is False")
        return event, event_in(before_epilogue), bool(asynchronous)


def _count_sms(device, domains, least, experts, topk, rdma, nvlink, sm_read, sm_write):
    """As many SMs as it takes to read each token once and write it to its ranks as fast as the links carry it."""
    if device.type != "cuda":
        return _FEWEST_SMS

    def expected(owners: int) -> float:  # how many of them a token goes to if its experts are chosen at random
        most = min(topk, experts)
        return owners * (1 - math.comb(experts - experts // owners, most) / math.comb(experts, most))

    nodes, ranks = domains[0], domains[0] * domains[1]
    per_sm = 1 / (1 / sm_read + expected(ranks) / sm_write)  # tokens of a GB, each second
    share = expected(ranks) * (ranks - 1) / ranks  # of a token, over NVLink
    links = (nvlink or envs.get_nvlink_gbs()) / share if share else per_sm
    if nodes > 1:
        links = min(links, (rdma or envs.get_rdma_gbs()) / (expected(nodes) * (nodes - 1) / nodes))
    most = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = align(max(math.ceil(_HEADROOM * links / per_sm), least), 2)
    return max(min(wanted, most - most % 2), _FEWEST_SMS)


# Calls of upstream's second generation that have nothing to do with experts.
LEFT_OUT = (
    "get_engram_storage_size_hint", "engram_write", "engram_fetch", "get_pp_buffer_size_hint", "pp_set_config", "pp_send", "pp_recv",
    "get_agrs_num_max_session_bytes", "get_agrs_buffer_size_hint", "agrs_set_config", "create_agrs_session", "destroy_agrs_session",
    "agrs_new_session", "agrs_get_inplace_tensor", "all_gather",
)  # fmt: skip
for _name in LEFT_OUT:
    setattr(ElasticBuffer, _name, staticmethod(_left_out(_name)))


def _check_handle(handle: Any) -> None:
    if not isinstance(handle, EPHandle):
        raise TypeError(f"handle is of type {type_name(handle)}, expected the EPHandle that dispatch returned")
