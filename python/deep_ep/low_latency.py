"""The low-latency calls of a buffer: dispatch and combine for decoding."""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import torch

from .arguments import integer, type_name
from .errors import InvalidArgument, WrongUse
from .peers import NativeOwner
from .utils.event import EventOverlap

__all__ = ["LowLatencyCalls"]

#: (src_info, layout_range, M, H, E)
LowLatencyHandle = Tuple[torch.Tensor, torch.Tensor, int, int, int]
#: Enqueues the receive part. It is ``None`` without ``return_recv_hook``, as the program knows that asked for it.
Hook = Callable[[], None]


def _as_grouped_gemm(rows: Any) -> Any:
    """Views of NVFP4 rows and scales, experts last, that show the insides of the scales' tiles: see
    ``low_latency_dispatch``."""
    values, scales = rows
    return values.permute(1, 2, 0), scales.view(*scales.shape[:3], 32, 4, 4).permute(3, 4, 1, 5, 2, 0)


def _as_vector(scale: torch.Tensor) -> torch.Tensor:
    """A tensor of one element, of any shape, as ``[1]``; the library refuses others."""
    return scale.reshape(1) if isinstance(scale, torch.Tensor) and scale.numel() == 1 else scale


class LowLatencyCalls(NativeOwner):
    """Part of ``Buffer``, which must have been made with ``low_latency_mode=True`` and ``num_rdma_bytes``.

    Symbols as there, and L = E / R local experts, M = ``num_max_dispatch_tokens_per_rank``: T is at most M on each rank.

    A call never makes the host wait and can be recorded into a CUDA graph, any number of calls in any order. It has two
    parts, *send* and *receive*, and ends in one of three ways:

    * by default both run on the current stream;
    * ``async_finish=True``: both run on the communication stream, and the returned event stands for the results. Keep
      it until you have waited for it: it keeps the call's tensors;
    * ``return_recv_hook=True``: only the send part runs, on the current stream. ``hook()`` puts the receive part on
      that same stream; results, counts and statistics are valid after that. In between no SM is used. Of each kind of
      call (dispatch, combine) two may wait for their hooks at once.

    On the CPU the work is complete when the call, or the hook, returns.
    """

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
    ) -> Tuple[Any, torch.Tensor, LowLatencyHandle, EventOverlap, Hook]:
        """Sends every token to each of its experts.

        Args:
            x: ``[T, H]`` bfloat16 contiguous, H a multiple of 128 (of 512 with ``use_ue8m0``).
            topk_idx: ``[T, K]``, ``deep_ep.topk_idx_t`` (or int32), contiguous; what is no expert selects nothing. An
                expert that a token names twice gets it twice.
            num_max_dispatch_tokens_per_rank, num_experts: M and E, equal on all ranks. M * K is at most 65535.
            cumulative_local_expert_recv_stats: ``[L]`` int32: rows received by each expert are added.
            dispatch_wait_recv_cost_stats: ``[R]`` int64: clock cycles spent waiting for each rank are added.
            use_fp8: cast each 128 channels to 8-bit floating point with a scale of their own.
            round_scale: scales are powers of two. Without ``use_fp8`` there are none, and it has no effect.
            use_ue8m0: scales are exponents, four in an int32, the first in the lowest byte. Needs ``round_scale``.
            arrival_counters: ``[L, W]`` int64, zeros at first: words by which a kernel on another stream sees which rows
                are there while the call still receives. The n-th call with this tensor brings each word to
                ``n << 24`` when its rows are there; a call that fails makes them negative. Not part of upstream's
                interface; not with ``enable_shrink``. docs/explanation/low-latency.md has the order and an example.
            arrival_rows: how many rows a word stands for, a power of two (W = R * M / that, rounded up); 0: all of an
                expert (W = 1).
            use_nvfp4: cast each 16 channels to 4-bit floating point with an 8-bit scale of their own, as SGLang asks for
                it. It takes the place of ``use_fp8``, which may stay at its default.
            x_global_scale: one float32, ``[]`` or ``[1]``, with ``use_nvfp4``: a channel is about value * scale / this.
                ``None``: 1.
            align_fp8_quantization: cast as the per-token-group quantisers of SGLang and Megatron do, bit for bit: true
                divisions, amax at least 1e-10. Only with ``use_fp8`` and without ``round_scale``; else without effect.

        Returns:
            The rows ``[L, R * M, H]``: bfloat16, or (``float8_e4m3fn``, scales), scales float32 ``[L, R * M, H / 128]``
            (int32 ``[L, R * M, H / 512]`` with ``use_ue8m0``), the last two dimensions column-major; with ``use_nvfp4`` uint8 ``[R * M, H / 2, L]``, a view of memory in which
            an expert's rows lie together, two values in a byte, the first in the lower half, and uint8 scales
            ``[32, 4, R * M / 128 (rounded up), 4, H / 64, L]`` in the order in which tensor cores load them: scale ``c``
            of row ``r`` of expert ``l`` is ``[r % 32, r // 32 % 4, r // 128, c % 4, c // 4, l]``;
            ``recv_count`` ``[L]`` int32: rows ``0 .. recv_count[l] - 1`` of expert l are valid, by source rank, then by
            token; all others are undefined;
            the handle: ``src_info`` ``[L, R * M]`` int32, the token index at the source; ``layout_range`` ``[L, R]``
            int64, ``(first row << 32) | rows`` of each source; M; H; E. Tuples made of the same tensors work as well,
            copies of ``src_info`` do not; the event; the hook or ``None``.
        """
        rows, count, handle, event, hook = self._alive().low_latency_dispatch(
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
            x_global_scale if x_global_scale is None else _as_vector(x_global_scale),
            align_fp8_quantization,
        )
        rows = _as_grouped_gemm(rows) if use_nvfp4 else rows
        kept = None
        if async_finish:
            kept = (x, topk_idx, rows, count, handle, cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats,
                    arrival_counters, x_global_scale)
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
                raises signals; combine sends each row once its signal is there, those that are there first. With
                ``return_recv_hook`` only, among ranks that reach each other by NVLink; ``NotImplementedError``
                elsewhere. Without it the following have no effect. The result is the same. A signal that is not raised
                by the deadline ends the call with an error that names it.
            comp_signal, block_m, threshold, num_sms, packed_recv_count: SGLang's form on Hopper. int32, at least
                ``[L * ceil(R * M / block_m)]``: element ``l * ceil(R * M / block_m) + b`` reaches ``threshold`` when
                rows ``b * block_m`` and so on of expert l are there. The send part takes ``num_sms`` SMs at most.
                ``packed_recv_count`` is not read: the handle knows which rows came.
            src_signals, src_signal_expect_value: the form on Blackwell. uint32 or int32 ``[L]``: element l reaches
                ``src_signal_expect_value`` when all rows of expert l are there; ``None``: they are. The send part takes
                32 SMs at most.

        Returns:
            ``combined_x`` ``[T, H]`` bfloat16: each rank adds in float32, selections ascending, and rounds; this rank
            adds those parts in float32, ranks ascending, and rounds. With ``return_recv_hook``, within a node, this rank
            adds all rows in float32, selections ascending, and rounds once (docs/explanation/low-latency.md says when).
            Bitwise reproducible. The event; the hook or ``None``.
        """
        signals, rows, expected, sms = None, 0, 1, 0
        if overlap:
            if not return_recv_hook or async_finish:
                raise WrongUse("overlap=True needs return_recv_hook=True and async_finish=False")
            if comp_signal is not None and src_signals is not None:
                raise InvalidArgument("comp_signal and src_signals are both given, allowed: one of them")
            if comp_signal is not None:
                signals, rows, expected = comp_signal, integer("block_m", block_m, 1), integer("threshold", threshold, 1)
                sms = integer("num_sms", num_sms, 1)
            elif packed_recv_count is not None:
                raise InvalidArgument("packed_recv_count is given, so comp_signal must be: it is None")
            else:
                sms = 32
                if src_signals is not None:
                    signals = src_signals.view(torch.int32)
                    expected = integer("src_signal_expect_value", src_signal_expect_value, 1)
        combined_x, event, hook = self._alive().low_latency_combine(
            x,
            topk_idx,
            topk_weights,
            handle,
            use_logfmt,
            zero_copy,
            out,
            combine_wait_recv_cost_stats,
            async_finish,
            return_recv_hook,
            overlap,
            signals,
            rows,
            expected,
            sms,
        )
        kept = (x, topk_idx, topk_weights, handle, combined_x, combine_wait_recv_cost_stats) if async_finish else None
        return combined_x, EventOverlap(event, kept), hook  # type: ignore[return-value]

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """The tensor ``[L, R * M, H]`` bfloat16, contiguous, whose rows a combine with ``zero_copy=True`` sends. Fill
        it between dispatch and combine, on the combine's stream. Its memory ends with the buffer."""
        if not isinstance(handle, tuple):
            raise TypeError(f"handle is of type {type_name(handle)}, expected the tuple that low_latency_dispatch returned")
        return self._alive().low_latency_combine_buffer(handle)

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Collective: waits, on the current stream, for all ranks that are not masked. Kept for programs that call it:
        calls are numbered, so nothing needs cleaning when shapes or modes change, or after an abandoned call. If the
        program has asked for the memory of low-latency calls (``get_local_buffer_tensor``), that is zeroed first."""
        self._alive().low_latency_clean()

    # Ranks that died. Sends go to ranks that are not masked, and only those are waited for. Whom a call masks, all ranks
    # that go on mask; what a program masks or unmasks concerns its own rank alone.

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Masks a rank, or, **by default, unmasks** it; on the current stream. Needs ``enable_shrink``."""
        self._alive().low_latency_update_mask(integer("rank_to_mask", rank_to_mask), bool(mask))

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Writes 1 for masked ranks and 0 for others to ``mask_status`` ``[R]`` int32, on the current stream. Needs
        ``enable_shrink``."""
        self._alive().low_latency_query_mask(mask_status)

    def low_latency_clean_mask_buffer(self) -> None:
        """Unmasks the ranks that this program has masked, on the current stream; ranks that all have found lost come back
        with ``low_latency_resume``. Needs ``enable_shrink``."""
        self._alive().low_latency_clear_mask()

    def low_latency_resume(self) -> None:
        """Collective over **all** ranks, the host waits: brings every rank to the same number of calls and unmasks all,
        so that ranks that were away take part again. Receive parts whose hooks have not been called are dropped. Needs
        ``enable_shrink``. Not part of upstream's interface."""
        self._alive().low_latency_resume()
