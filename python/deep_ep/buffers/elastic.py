"""The second interface: one dispatch and one combine for training, prefill and decoding."""

from __future__ import annotations

import os
import weakref
from typing import Any, List, Optional, Sequence, Tuple, Union

import torch

from .. import _native
from .._native import EventHandle
from ..arguments import event_of, integer, type_name
from ..errors import InvalidArgument, UseAfterDestroy
from ..peers import Peers, device_index, let_go, native_buffer
from ..utils.event import EventOverlap
from ..utils.nvlink import check_nvlink_connections
from . import model
from .handle import EPHandle
from .optional import OptionalCalls
from .streams import CallStream

__all__ = ["ElasticBuffer", "EPHandle"]

#: A tensor of rows, or (8-bit rows, their scales).
Rows = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
Bias = Union[None, torch.Tensor, Sequence[Optional[torch.Tensor]]]
AnyEvent = Union[None, EventHandle, EventOverlap]

_PAGE = 2 << 20
_SMALLEST_HEAP = 64 << 20
_DEFAULT_GPU_TIMEOUT = 100
_KNOWN_DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float32, torch.uint8)


class ElasticBuffer(OptionalCalls):
    """Expert-parallel communication of one rank with the other ranks of its group.

    Symbols: R ranks, r this rank, E experts of which rank q owns ``[q*E/R, (q+1)*E/R)``, L = E / R; T tokens on this rank
    (may differ between ranks, may be 0), K top-k, H hidden size, M = ``num_max_tokens_per_rank`` of the call, N rows that
    this rank receives, A = ``expert_alignment``.

    Two layouts of received rows. *Non-expanded*: a token once for each rank, by source rank, then by token. *Expanded*:
    a row for each (token, local expert), by expert, then by source rank and token; each expert's rows begin at a multiple
    of A. The order is the same every time.

    Streams. A call runs behind the work of the current stream, or behind ``previous_event`` instead if that is given. It
    runs on the communication stream if it is asynchronous or has events to come after, otherwise on the current stream.
    Later work of the current stream comes after it, or, with ``async_with_compute_stream=True``, the returned event
    stands for the results. The host waits in ``dispatch`` with ``do_cpu_sync`` only; all other calls can be recorded into
    CUDA graphs. On the CPU calls are complete when they return.

    All ranks make the same calls in the same order, and agree on all arguments but tensors, T, statistics and streams.
    """

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
        num_gpu_timeout_secs: int = 100,
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
            num_gpu_timeout_secs: for how long this buffer's calls wait for a rank; 100 leaves it to DEEP_EP_TIMEOUT_S.
            explicitly_destroy: memory is freed by ``destroy``, which is collective.
            deterministic, sl_idx, num_cpu_timeout_secs: accepted; order is always fixed, the traffic class is set by
                DEEP_EP_TRAFFIC_CLASS, and the host's wait ends with the kernels'.
        """
        peers = Peers(group) if hasattr(group, "rank") or not hasattr(group, "Get_rank") else Peers(None, group)
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
            num_bytes = model.buffer_bytes(
                peers.size, self.num_max_tokens_per_rank, hidden, num_topk, bool(use_fp8_dispatch), bool(allow_multiple_reduction)
            )
        num_bytes = integer("num_bytes", num_bytes, 1)
        for name, value in (("num_bytes", num_bytes), ("num_cpu_bytes", num_cpu_bytes)):
            if value % _PAGE or value > num_bytes:
                raise InvalidArgument(f"{name} is {value}, allowed: multiples of 2 MiB up to num_bytes, which is {num_bytes}")

        device = device_index(group)
        if device >= 0 and peers.group is group and hasattr(group, "rank"):
            check_nvlink_connections(group)
        self.group: Any = peers.group
        self.rank_idx: int = peers.rank
        self.num_ranks: int = peers.size
        self.num_bytes: int = num_bytes
        self.num_cpu_bytes: int = num_cpu_bytes
        self.deterministic: bool = bool(deterministic)
        self.allow_hybrid_mode: bool = bool(allow_hybrid_mode)
        self.allow_multiple_reduction: bool = bool(allow_multiple_reduction)
        self.prefer_overlap_with_compute: bool = bool(prefer_overlap_with_compute)
        self.explicitly_destroy: bool = bool(explicitly_destroy)
        self.num_allocated_qps: int = integer("num_allocated_qps", num_allocated_qps, 0) or model.default_qps(
            self.allow_hybrid_mode
        )
        timeout = integer("num_gpu_timeout_secs", num_gpu_timeout_secs, 1)
        integer("num_cpu_timeout_secs", num_cpu_timeout_secs, 1)
        memory = max(num_bytes - num_cpu_bytes, _SMALLEST_HEAP)
        if peers.num_nodes(device) > 1:  # between nodes combine copies rows into it
            memory *= 2
        self.runtime: Optional[_native.Buffer]
        self.runtime, self._comm_stream = native_buffer(
            peers, device, memory, timeout_s=-1.0 if timeout == _DEFAULT_GPU_TIMEOUT else float(timeout)
        )
        self._device = torch.device("cuda", device) if device >= 0 else torch.device("cpu")
        # What a barrier sends: counts that are all 0, and no rows.
        self._nothing_to_send = (
            torch.zeros(self.num_ranks, dtype=torch.int32, device=self._device),
            torch.zeros((0, self.num_ranks), dtype=torch.bool, device=self._device),
            torch.empty((0, 16), dtype=torch.uint8, device=self._device),
        )
        self.num_rdma_ranks: int = self.runtime.num_nodes()
        self.num_nvlink_ranks: int = self.num_ranks // self.num_rdma_ranks
        # What lies between nodes is the library's business: results are those of one domain.
        self.num_scaleout_ranks: int = 1
        self.num_scaleup_ranks: int = self.num_ranks
        self.scaleout_rank_idx: int = 0
        self.scaleup_rank_idx: int = self.rank_idx
        self.nccl_comm_handle: Any = None
        self._finalizer = weakref.finalize(
            self, let_go, self.runtime, self.rank_idx, "an ElasticBuffer", self.explicitly_destroy, os.getpid()
        )

    def destroy(self) -> None:
        """Collective: waits for this rank's work, then for all ranks, and frees the memory. Needs
        ``explicitly_destroy=True``; a second call does nothing. Tensors that calls returned stay valid."""
        assert self.explicitly_destroy, "destroy() needs a buffer made with explicitly_destroy=True"
        if self.runtime is None:
            return
        runtime, self.runtime = self.runtime, None
        self._finalizer.detach()
        runtime.destroy()

    # ------------------------------------------------------------------------------------------- sizes and helpers

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
        size = group.size() if hasattr(group, "size") else group.Get_size()
        return model.buffer_bytes(
            size,
            integer("num_max_tokens_per_rank", num_max_tokens_per_rank, 1),
            integer("hidden", hidden, 1),
            num_topk,
            bool(use_fp8_dispatch),
            bool(allow_multiple_reduction),
        )

    @staticmethod
    def capture() -> EventHandle:
        """An event behind all work that the current stream holds now."""
        return EventHandle()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The communication stream. A buffer on the CPU has none."""
        self._alive()
        if self._comm_stream is None:
            raise RuntimeError("get_comm_stream: the buffer is on the CPU, where calls do not use a CUDA stream")
        return self._comm_stream

    def get_physical_domain_size(self) -> Tuple[int, int]:
        """(nodes, ranks of each)."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_logical_domain_size(self) -> Tuple[int, int]:
        """(1, R): results are those of one domain, also between nodes."""
        return self.num_scaleout_ranks, self.num_scaleup_ranks

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
        assert num_scaleout_topk == 0, f"num_scaleout_topk is {num_scaleout_topk}, allowed: 0"
        return model.num_sms(
            self.num_ranks,
            self.num_rdma_ranks,
            integer("num_experts", num_experts, 1),
            integer("num_topk", num_topk, 1),
            (rdma_gbs, nvlink_gbs, sm_read_gbs, sm_write_gbs),
            self._device,
            self.prefer_overlap_with_compute,
        )

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Queue pairs that a call with this many SMs would use upstream. Here calls choose by themselves."""
        wanted = 16 * num_sms + 1 if self.allow_hybrid_mode else min(num_sms, 9)
        return min(wanted, self.num_allocated_qps)

    @torch.no_grad()
    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Collective: work behind it begins when all ranks have reached it, on the communication stream (which the
        current one waits for) or on the current one. ``with_cpu_sync``: the host waits for the device before and after.
        """
        runtime = self._alive()
        self._synchronize(with_cpu_sync)
        stream = CallStream(self._comm_stream if use_comm_stream else None, None, None, bool(use_comm_stream))
        with stream:
            # Counts of all ranks are exchanged, even where all are 0.
            nothing, nowhere, rows = self._nothing_to_send
            sent = runtime.dispatch(
                rows, None, nothing, nowhere, nothing, None, None, 1, 1, 0, None, stream.switched
            )
            stream.part(sent[-1])
        event = stream.finish((), ())
        if event.event is not None:
            event.current_stream_wait()
        self._synchronize(with_cpu_sync)

    # ------------------------------------------------------------------------------------------------------ calls

    @torch.no_grad()
    def dispatch(
        self,
        x: Rows,
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
    ) -> Tuple[Rows, Optional[torch.Tensor], Optional[torch.Tensor], EPHandle, EventOverlap]:
        """Sends every token to the ranks that own its experts.

        Args:
            x: ``[T, H]`` contiguous, any type with rows of a multiple of 16 bytes; or a tuple of rows and their scales
                ``[T, S]`` of a 4-byte type, with any strides.
            topk_idx: ``[T, K]``, ``deep_ep.topk_idx_t`` (or int32), contiguous; negative = no selection. An expert that a
                token names twice gets two rows in the expanded layout.
            topk_weights: ``[T, K]`` float32 contiguous, also with ``handle``.
            cumulative_local_expert_recv_stats: ``[L]`` int32: this call's counts are added. Not with ``handle``.
            num_experts: E; needed without ``handle``.
            num_max_tokens_per_rank: M, at least T, equal on all ranks; by default the handle's, or the buffer's.
            expert_alignment: A; by default the handle's, or 1.
            num_sms: at most that many SMs for the rows' journey; 0: the handle's, or ``get_theoretical_num_sms``.
            previous_event: an ``EventHandle`` or ``EventOverlap``; needs ``allocate_on_comm_stream``.
            previous_event_before_epilogue: what must be done before results are written. Rows travel straight into them
                here, so the call waits for it at its start.
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
        self._alive()
        rows, scales = _split(x)
        self._check_qps(num_qps)
        previous, before = self._events(previous_event, previous_event_before_epilogue, allocate_on_comm_stream)
        stream = CallStream(self._comm_stream, previous, before, bool(async_with_compute_stream))
        if do_zero_padding and not do_expand:
            raise InvalidArgument("do_zero_padding is True, allowed: only with do_expand")
        num_sms = integer("num_sms", num_sms, 0)
        if handle is None:
            with stream:
                result = self._fresh_dispatch(
                    stream, rows, scales, topk_idx, topk_weights, cumulative_local_expert_recv_stats, num_experts,
                    num_max_tokens_per_rank, expert_alignment, num_sms, bool(do_handle_copy),
                    True if do_cpu_sync is None else bool(do_cpu_sync), bool(do_expand), bool(do_zero_padding),
                    bool(use_tma_aligned_col_major_sf),
                )  # fmt: skip
        else:
            handle = _checked(handle)
            assert topk_idx is None, "topk_idx is given: with a handle the selections are the handle's"
            assert not do_cpu_sync, "do_cpu_sync is True: with a handle sizes are known"
            for name, given in (
                ("num_experts", num_experts),
                ("expert_alignment", expert_alignment),
                ("num_max_tokens_per_rank", num_max_tokens_per_rank),
            ):
                known = getattr(handle, name)
                assert given is None or given == known, f"{name} is {given}, allowed: the handle's, which is {known}"
            if cumulative_local_expert_recv_stats is not None:
                raise InvalidArgument("cumulative_local_expert_recv_stats is given, allowed: only without handle")
            with stream:
                result = self._cached_dispatch(
                    stream, rows, scales, topk_weights, handle, num_sms, bool(do_expand), bool(do_zero_padding),
                    bool(use_tma_aligned_col_major_sf),
                )  # fmt: skip
        recv_x, recv_scales, recv_topk_idx, recv_topk_weights, handle = result
        kept = handle._tensors()  # with a handle that was given, the call reads them, too
        event = stream.finish(
            (rows, scales, topk_idx, topk_weights, cumulative_local_expert_recv_stats, *kept),
            (recv_x, recv_scales, recv_topk_idx, recv_topk_weights, *kept),
        )
        received: Rows = recv_x if recv_scales is None else (recv_x, recv_scales)
        return received, recv_topk_idx, recv_topk_weights, handle, event

    @torch.no_grad()
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
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor], EventOverlap]:
        """Brings the experts' rows back and adds them up for each token.

        Args:
            x: bfloat16 contiguous. Non-expanded: ``[N, H]``, a row for each received one. Expanded (by
                ``handle.do_expand``): rows where ``handle.recv_src_metadata`` says; no other is read, and one that ``x`` does not
                have counts as none.
            topk_weights: float32 contiguous; ``[N, K]``, or, expanded, one for each row of ``x``.
            bias: ``[T, H]`` bfloat16, or a tuple of two such, each of which may be ``None``.

        Returns:
            ``combined_x`` ``[T, H]`` bfloat16; ``combined_topk_weights`` ``[T, K]`` float32 or ``None``: for each
            selection the weight that its expert's rank holds, 0 where there is none; the event.

            Sums are made in float32. Expanded with ``allow_multiple_reduction``: each rank adds the rows of a token,
            selections ascending, and rounds. The token's rank adds biases, then the ranks' rows in the order of their
            last selections (without ``allow_multiple_reduction``: all rows, selections ascending), and rounds.
        """
        self._alive()
        handle = _checked(handle)
        self._check_qps(num_qps)
        previous, before = self._events(previous_event, previous_event_before_epilogue, allocate_on_comm_stream)
        metadata = handle.recv_src_metadata
        _check_tensor("x", x, (torch.bfloat16,), 2)
        if not handle.do_expand and x.size(0) != metadata.size(0):
            raise InvalidArgument(f"x has {x.size(0)} rows, allowed: the {metadata.size(0)} of handle.recv_src_metadata")
        topk = handle.topk_idx.size(1)
        if topk_weights is not None:
            if handle.do_expand and not self.allow_multiple_reduction:
                raise InvalidArgument("topk_weights is given, allowed: None for expanded rows without allow_multiple_reduction")
            _check_tensor("topk_weights", topk_weights, (torch.float32,), 1 if handle.do_expand else 2)
            wanted = (x.size(0),) if handle.do_expand else (metadata.size(0), topk)
            if tuple(topk_weights.shape) != wanted:
                raise InvalidArgument(f"topk_weights is of shape {tuple(topk_weights.shape)}, allowed: {wanted}")
        biases = _biases(bias, (handle.topk_idx.size(0), x.size(1)))
        stream = CallStream(self._comm_stream, previous, before, bool(async_with_compute_stream))
        sms = integer("num_sms", num_sms, 0) or handle.num_sms
        with stream:
            combined_x, combined_weights = self._combine(stream, x, handle, topk_weights, biases, sms)
        event = stream.finish((x, topk_weights, *biases, *handle._tensors()), (combined_x, combined_weights))
        return combined_x, combined_weights, event

    # --------------------------------------------------------------------------------------------------- the work

    def _fresh_dispatch(
        self, stream, rows, scales, topk_idx, topk_weights, stats, num_experts, num_max_tokens, alignment, num_sms,
        copy_selections, cpu_sync, expand, zero_padding, column_major,
    ):  # fmt: skip
        """A dispatch without handle."""
        runtime = self._alive()
        if topk_idx is None:
            raise InvalidArgument("topk_idx is None, allowed: a tensor, or a handle instead")
        if num_experts is None:
            raise InvalidArgument("num_experts is None, allowed: a multiple of the number of ranks, or a handle instead")
        num_experts = integer("num_experts", num_experts, 1)
        if num_experts % self.num_ranks:
            raise InvalidArgument(f"num_experts is {num_experts}, allowed: multiples of the {self.num_ranks} ranks")
        alignment = integer("expert_alignment", 1 if alignment is None else alignment, 1)
        most = self.num_max_tokens_per_rank if num_max_tokens is None else num_max_tokens
        most = integer("num_max_tokens_per_rank", most, 1)
        _check_tensor("topk_idx", topk_idx, (torch.int64, torch.int32), 2)
        tokens, topk = topk_idx.shape
        _check_rows(rows, tokens)
        if tokens > most:
            raise InvalidArgument(f"topk_idx has {tokens} tokens, allowed: at most num_max_tokens_per_rank, which is {most}")
        local_experts = num_experts // self.num_ranks
        if stats is not None:
            _check_tensor("cumulative_local_expert_recv_stats", stats, (torch.int32,), 1)
            if stats.numel() != local_experts:
                raise InvalidArgument(f"cumulative_local_expert_recv_stats has {stats.numel()} elements, allowed: {local_experts}")
        sms = num_sms or self.get_theoretical_num_sms(num_experts, topk)
        worst = 0 if cpu_sync else most * self.num_ranks
        weights = topk_weights if topk_weights is not None else self._new(topk_idx.shape, torch.float32)

        per_rank, _, per_expert, in_rank, event = runtime.get_dispatch_layout(topk_idx, num_experts, None, stream.switched)
        stream.part(event)
        recv_x, recv_scales, recv_idx, recv_weights, counts, route, event = runtime.dispatch(
            rows, _native_scales(scales), per_rank, in_rank, per_expert, topk_idx, weights, alignment, worst, sms, None,
            stream.switched,
        )  # fmt: skip
        stream.part(event)
        if cpu_sync:
            num_expanded = sum(counts)
        else:
            most_named = self.num_ranks * most * min(topk, local_experts)
            num_expanded = _align(most_named + (alignment - 1) * local_experts, alignment)
        received = recv_x.size(0)
        handle = EPHandle(
            expand, num_experts, alignment, most, sms, self._new(topk_idx.shape, topk_idx.dtype) if copy_selections else topk_idx,
            received, num_expanded, counts, self._new(self.num_ranks), self._new(local_experts), self._new(local_experts),
            self._new((received, topk + 2)), self._new(topk_idx.shape),
        )  # fmt: skip
        handle._route = route
        handle._local = self._new((received, topk))
        matrix, src_idx, destination_row = self._tables(route)
        runtime.number_rows(
            recv_idx, src_idx, matrix, destination_row, topk_idx, self.rank_idx, local_experts, most, alignment, expand,
            handle.psum_num_recv_tokens_per_scaleup_rank, handle.psum_num_recv_tokens_per_expert,
            handle.num_unaligned_recv_tokens_per_expert, stats, handle.recv_src_metadata, handle._local,
            handle.dst_buffer_slot_idx, handle.topk_idx if copy_selections else None,
            self._new(runtime.number_rows_scratch(local_experts)),
        )  # fmt: skip
        if topk_weights is None:
            recv_weights = None
        if expand:
            return self._expanded(recv_x, recv_scales, recv_weights, scales, handle, zero_padding, column_major)
        if self.num_rdma_ranks > 1:
            # Between nodes what does not fit into the buffer takes a slower way: what programs hold must not fill it.
            return self._copied(recv_x, recv_scales, recv_weights, scales, handle, column_major)
        if column_major and recv_scales is not None:
            recv_scales = self._copied(None, recv_scales, None, scales, handle, True, with_indices=False)[1]
        return recv_x, _typed(recv_scales, scales), recv_idx, recv_weights, handle

    def _cached_dispatch(
        self, stream, rows, scales, topk_weights, handle, num_sms, expand, zero_padding, column_major
    ):  # fmt: skip
        """A dispatch with handle: what travels beside the rows goes as scales."""
        runtime = self._alive()
        if handle._route is None or handle._local is None:
            raise InvalidArgument("handle is one that no dispatch returned, allowed: those that did")
        if expand and not handle.do_expand:
            raise InvalidArgument("do_expand is True, allowed: only with the handle of a dispatch with do_expand")
        tokens, topk = handle.topk_idx.shape
        _check_rows(rows, tokens)
        beside = None if scales is None else _native_scales(scales)
        if topk_weights is not None:
            _check_tensor("topk_weights", topk_weights, (torch.float32,), 2)
            if tuple(topk_weights.shape) != (tokens, topk):
                raise InvalidArgument(f"topk_weights is of shape {tuple(topk_weights.shape)}, allowed: {(tokens, topk)}")
            # As bits: a copy of numbers need not keep those of a NaN.
            bits = topk_weights.view(torch.int32)
            beside = bits if beside is None else torch.cat([beside.view(torch.int32), bits], dim=1)
        recv_x, together, event = runtime.cached_dispatch(
            rows, beside, handle._route, num_sms or handle.num_sms, None, stream.switched
        )
        stream.part(event)
        recv_scales, recv_weights = (together, None) if topk_weights is None else (None, together)
        if scales is not None and topk_weights is not None:
            recv_scales, recv_weights = together[:, : scales.size(1)], together[:, scales.size(1) :]
        if expand:
            return self._expanded(recv_x, recv_scales, recv_weights, scales, handle, zero_padding, column_major)
        kept = (None, None)
        if self.num_rdma_ranks == 1:  # what arrived as it is wanted stays where it is
            kept = recv_x, None if column_major or topk_weights is not None else recv_scales
        moved = [None if stays is not None else each for each, stays in zip((recv_x, recv_scales), kept)]
        recv_rows, new_scales, local, recv_weights, handle = self._copied(*moved, recv_weights, scales, handle, column_major)
        new_scales = new_scales if kept[1] is None else _typed(kept[1], scales)
        return recv_rows if kept[0] is None else kept[0], new_scales, local, recv_weights, handle

    def _expanded(self, recv_x, recv_scales, recv_weights, scales, handle, zero_padding, column_major):
        """What ``dispatch`` returns but for the event, in the expanded layout."""
        size = handle.num_expanded_tokens
        rows = self._new((size, recv_x.size(1)), recv_x.dtype)
        spread_scales = self._scales_like(recv_scales, size, column_major)
        weights = None if recv_weights is None else self._new(size, torch.float32)
        self._alive().spread_rows(
            handle.psum_num_recv_tokens_per_scaleup_rank, handle.recv_src_metadata, None, *_known(recv_x, rows), recv_scales,
            spread_scales, recv_weights, weights, None,
            handle.num_unaligned_recv_tokens_per_expert if zero_padding else None, handle.expert_alignment,
        )  # fmt: skip
        return rows, _typed(spread_scales, scales), None, weights, handle

    def _copied(self, recv_x, recv_scales, recv_weights, scales, handle, column_major, with_indices=True):
        """What ``dispatch`` returns but for the event, not expanded: each row where it is, in new memory."""
        received, topk = handle._local.shape
        rows = None if recv_x is None else torch.empty_like(recv_x)
        new_scales = self._scales_like(recv_scales, received, column_major)
        weights = None if recv_weights is None else self._new((received, topk), torch.float32)
        indices = self._new((received, topk), handle.topk_idx.dtype) if with_indices else None
        self._alive().spread_rows(
            handle.psum_num_recv_tokens_per_scaleup_rank, None, handle._local, *_known(recv_x, rows), recv_scales,
            new_scales, recv_weights, weights, indices, None, 1,
        )  # fmt: skip
        return rows, _typed(new_scales, scales), indices, weights, handle

    def _combine(self, stream, x, handle, topk_weights, biases, sms):
        runtime = self._alive()
        metadata, topk_idx, ends = handle.recv_src_metadata, handle.topk_idx, handle.psum_num_recv_tokens_per_scaleup_rank
        tokens, topk = topk_idx.shape
        local_experts, most = handle.num_experts // self.num_ranks, handle.num_max_tokens_per_rank
        single = bool(handle.do_expand) and not self.allow_multiple_reduction
        if handle.do_expand and not single:
            sums = self._new((metadata.size(0), x.size(1)), torch.bfloat16)
            runtime.sum_expanded_rows(x, metadata, ends, sums)
            x = sums
        new_table = torch.zeros if single else torch.empty
        in_rank = new_table((x.size(0), self.num_ranks), dtype=torch.bool, device=self._device)
        beside = self._new((x.size(0), 1 if topk_weights is None else 1 + topk))
        per_rank = self._new(self.num_ranks)
        size = runtime.address_rows_scratch(metadata.size(0), self.num_ranks)
        scratch = self._new(size) if size else None
        runtime.address_rows(metadata, ends, most, single, topk_weights, beside, in_rank, per_rank, scratch)
        most_rows = most * (topk if single else min(topk, self.num_ranks))
        recv, recv_beside, _, _, _, route, event = runtime.dispatch(
            x, beside, per_rank, in_rank, per_rank, None, None, 1, max(most_rows, 1), sms, None, stream.switched
        )
        stream.part(event)
        combined_x = self._new((tokens, x.size(1)), torch.bfloat16)
        combined_weights = None if topk_weights is None else self._new((tokens, topk), torch.float32)
        runtime.sum_returned_rows(
            recv, recv_beside, self._tables(route)[0], topk_idx, self.rank_idx, local_experts, single, *(*biases, None, None)[:2],
            combined_x, combined_weights, self._new((tokens, topk)),
        )  # fmt: skip
        return combined_x, combined_weights

    def _new(self, shape: Union[int, Sequence[int]], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _scales_like(self, scales: Optional[torch.Tensor], rows: int, column_major: bool) -> Optional[torch.Tensor]:
        """Memory for scales; ``column_major``: with strides (1, rows rounded up to 4), as TMA loads want them."""
        if scales is None:
            return None
        width = scales.size(1)
        strides = (1, _align(rows, 4)) if column_major else (width, 1)
        return torch.empty_strided((rows, width), strides, dtype=scales.dtype, device=self._device)

    def _tables(self, route: Tuple[torch.Tensor, ...]) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of a native handle: where each source's rows end on each rank, tokens of the received rows at their sources,
        rows of this rank's tokens at their destinations."""
        return (route[0], route[3], route[5]) if self.num_rdma_ranks == 1 else (route[5], route[7], route[2])

    def _alive(self) -> "_native.Buffer":
        if self.runtime is None:
            raise UseAfterDestroy("the buffer was used after destroy()")
        return self.runtime

    def _synchronize(self, wanted: bool) -> None:
        if wanted and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _check_qps(self, num_qps: int) -> None:
        allocated = self.num_allocated_qps
        assert integer("num_qps", num_qps, 0) <= allocated, f"num_qps is {num_qps}, allowed: at most {allocated}"

    def _events(self, previous: AnyEvent, before_epilogue: AnyEvent, allocate_on_comm_stream: bool):
        event = event_of("previous_event", previous)
        if event is not None and not allocate_on_comm_stream:
            raise InvalidArgument("previous_event needs allocate_on_comm_stream, which is False")
        return event, event_of("previous_event_before_epilogue", before_epilogue)


def _check_rows(rows: Any, tokens: int) -> None:
    if not isinstance(rows, torch.Tensor):
        raise TypeError(f"x is of type {type_name(rows)}, expected a torch.Tensor")
    if rows.dim() != 2 or rows.size(0) != tokens:
        raise InvalidArgument(f"x is of shape {tuple(rows.shape)}, allowed: [{tokens}, hidden], a row for each token")


def _split(x: Any) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    if isinstance(x, (tuple, list)):
        if len(x) != 2:
            raise InvalidArgument(f"x is a {type_name(x)} of {len(x)}, expected a tensor or (rows, scales)")
        scales = x[1]
        if not isinstance(scales, torch.Tensor):
            raise TypeError(f"x_scales (x[1]) is of type {type_name(scales)}, expected a torch.Tensor")
        if scales.dim() != 2 or scales.element_size() != 4 or scales.shape[:1] != getattr(x[0], "shape", scales.shape)[:1]:
            raise InvalidArgument(
                f"x_scales (x[1]) is {scales.dtype} of shape {tuple(scales.shape)}, allowed: a 4-byte type of two "
                "dimensions, with as many rows as x[0]"
            )
        return x[0], scales
    return x, None


def _align(value: int, step: int) -> int:
    return -(-value // step) * step


def _typed(scales: Optional[torch.Tensor], given: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """Received scales, with the type of those that were given."""
    return scales if scales is None or given is None or scales.dtype == given.dtype else scales.view(given.dtype)


def _known(*rows: Optional[torch.Tensor]) -> Tuple[Optional[torch.Tensor], ...]:
    """The same with a type that the library knows: it only moves them."""
    return tuple(each if each is None or each.dtype in _KNOWN_DTYPES else each.view(torch.uint8) for each in rows)


def _native_scales(scales: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    if scales is None or scales.dtype in (torch.float32, torch.int32):
        return scales
    return scales.view(torch.int32)


def _check_tensor(name: str, tensor: Any, dtypes: Sequence[torch.dtype], dims: int) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is of type {type_name(tensor)}, expected a torch.Tensor")
    if tensor.dtype not in dtypes or tensor.dim() != dims or not tensor.is_contiguous():
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        raise InvalidArgument(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())}, "
            f"allowed: {allowed} of {dims} dimensions, contiguous"
        )


def _biases(bias: Bias, shape: Tuple[int, int]) -> List[torch.Tensor]:
    if bias is None or isinstance(bias, torch.Tensor):
        given: Sequence[Optional[torch.Tensor]] = (bias,)
    elif isinstance(bias, (tuple, list)) and len(bias) == 2:
        given = bias
    else:
        raise TypeError(f"bias is of type {type_name(bias)}, expected a torch.Tensor or a tuple of two")
    biases = [each for each in given if each is not None]
    for number, each in enumerate(biases):
        _check_tensor(f"bias_{number}", each, (torch.bfloat16,), 2)
        if tuple(each.shape) != shape:
            raise InvalidArgument(f"bias_{number} is of shape {tuple(each.shape)}, allowed: {shape}")
    return biases


def _checked(handle: Any) -> EPHandle:
    if not isinstance(handle, EPHandle):
        raise TypeError(f"handle is of type {type_name(handle)}, expected the EPHandle that dispatch returned")
    return handle
