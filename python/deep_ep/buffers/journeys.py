"""How dispatch and combine of the second interface are made of the library's calls."""

from __future__ import annotations

from typing import Optional, Sequence, Tuple, Union

import torch

from .. import _native
from ..arguments import integer
from ..errors import InvalidArgument, UseAfterDestroy
from .given import align, check_rows, check_tensor, known, native_scales, typed
from .handle import EPHandle
from .streams import used_here


class Journeys:
    """The part of ``ElasticBuffer`` in which arguments are known to be right: rows travel, and get their layout."""

    runtime: Optional["_native.Buffer"]
    num_ranks: int
    rank_idx: int
    num_rdma_ranks: int
    num_max_tokens_per_rank: int
    allow_multiple_reduction: bool
    _device: torch.device

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
        check_tensor("topk_idx", topk_idx, (torch.int64, torch.int32), 2)
        tokens, topk = topk_idx.shape
        check_rows(rows, tokens)
        if tokens > most:
            raise InvalidArgument(f"topk_idx has {tokens} tokens, allowed: at most num_max_tokens_per_rank, which is {most}")
        local_experts = num_experts // self.num_ranks
        if stats is not None:
            check_tensor("cumulative_local_expert_recv_stats", stats, (torch.int32,), 1)
            if stats.numel() != local_experts:
                raise InvalidArgument(f"cumulative_local_expert_recv_stats has {stats.numel()} elements, allowed: {local_experts}")
        sms = num_sms or self.get_theoretical_num_sms(num_experts, topk)
        if self.num_rdma_ranks == 1:
            recv_x, recv_scales, recv_idx, recv_weights, counts, num_expanded, made, event = runtime.dispatch_elastic(
                rows, native_scales(scales), topk_idx, topk_weights, stats, num_experts, most, alignment, cpu_sync, expand,
                zero_padding, column_major, copy_selections, sms, stream.switched,
            )  # fmt: skip
            stream.part(event)
            source_ends, expert_ends, expert_counts, metadata, local, rows_at_owners, sent_to, selections = made
            handle = EPHandle(
                expand, num_experts, alignment, most, sms, selections if copy_selections else topk_idx, metadata.size(0),
                num_expanded, counts, source_ends, expert_ends, expert_counts, metadata, rows_at_owners,
            )  # fmt: skip
            handle._route, handle._local = (sent_to,), local
            return recv_x, typed(recv_scales, scales), recv_idx, recv_weights, handle

        worst = 0 if cpu_sync else most * self.num_ranks
        per_rank, _, per_expert, in_rank, event = runtime.get_dispatch_layout(topk_idx, num_experts, None, stream.switched)
        stream.part(event)
        recv_x, recv_scales, recv_idx, recv_weights, counts, route, event = runtime.dispatch(
            rows, native_scales(scales), per_rank, in_rank, per_expert, topk_idx, topk_weights,
            alignment, worst, sms, None, stream.switched, True,
        )  # fmt: skip
        stream.part(event)
        if cpu_sync:
            num_expanded = sum(counts)
        else:
            # A token may name an expert more than once: also where there are fewer experts than selections.
            num_expanded = align(self.num_ranks * most * topk + (alignment - 1) * local_experts, alignment)
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
        if expand:
            return self._expanded(recv_x, recv_scales, recv_weights, scales, handle, zero_padding, column_major)
        # What does not fit into the buffer takes a slower way: what programs hold must not fill it.
        return self._copied(recv_x, recv_scales, recv_weights, scales, handle, column_major)

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
        check_rows(rows, tokens)
        beside = None if scales is None else native_scales(scales)
        if topk_weights is not None:
            check_tensor("topk_weights", topk_weights, (torch.float32,), 2)
            if tuple(topk_weights.shape) != (tokens, topk):
                raise InvalidArgument(f"topk_weights is of shape {tuple(topk_weights.shape)}, allowed: {(tokens, topk)}")
        if self.num_rdma_ranks == 1:
            recv_x, recv_scales, recv_idx, recv_weights, event = runtime.cached_dispatch_elastic(
                rows, beside, topk_weights, handle._route[0], handle.recv_src_metadata,
                handle.psum_num_recv_tokens_per_scaleup_rank, handle._local,
                handle.num_unaligned_recv_tokens_per_expert if expand and zero_padding else None, handle.num_max_tokens_per_rank,
                handle.expert_alignment, expand, handle.num_expanded_tokens, handle.topk_idx.dtype == torch.int64, column_major,
                num_sms or handle.num_sms, stream.switched,
            )  # fmt: skip
            stream.part(event)
            return recv_x, typed(recv_scales, scales), recv_idx, recv_weights, handle
        if topk_weights is not None:
            # As bits: a copy of numbers need not keep those of a NaN.
            bits = topk_weights.view(torch.int32)
            beside = bits if beside is None else torch.cat([beside.view(torch.int32), bits], dim=1)
        recv_x, together, event = runtime.cached_dispatch(
            rows, beside, handle._route, num_sms or handle.num_sms, None, stream.switched, True
        )
        stream.part(event)
        recv_scales, recv_weights = (together, None) if topk_weights is None else (None, together)
        if scales is not None and topk_weights is not None:
            recv_scales, recv_weights = together[:, : scales.size(1)], together[:, scales.size(1) :]
        if expand:
            return self._expanded(recv_x, recv_scales, recv_weights, scales, handle, zero_padding, column_major)
        return self._copied(recv_x, recv_scales, recv_weights, scales, handle, column_major)

    def _expanded(self, recv_x, recv_scales, recv_weights, scales, handle, zero_padding, column_major):
        """What ``dispatch`` returns but for the event, in the expanded layout."""
        size = handle.num_expanded_tokens
        rows = self._new((size, recv_x.size(1)), recv_x.dtype)
        spread_scales = self._scales_like(recv_scales, size, column_major)
        weights = None if recv_weights is None else self._new(size, torch.float32)
        self._alive().spread_rows(
            handle.psum_num_recv_tokens_per_scaleup_rank, handle.recv_src_metadata, None, *known(recv_x, rows), recv_scales,
            spread_scales, recv_weights, weights, None,
            handle.num_unaligned_recv_tokens_per_expert if zero_padding else None, handle.expert_alignment,
        )  # fmt: skip
        return rows, typed(spread_scales, scales), None, weights, handle

    def _copied(self, recv_x, recv_scales, recv_weights, scales, handle, column_major):
        """What ``dispatch`` returns but for the event, not expanded: each row where it is, in new memory."""
        received, topk = handle._local.shape
        rows = torch.empty_like(recv_x)
        new_scales = self._scales_like(recv_scales, received, column_major)
        weights = None if recv_weights is None else self._new((received, topk), torch.float32)
        indices = self._new((received, topk), handle.topk_idx.dtype)
        self._alive().spread_rows(
            handle.psum_num_recv_tokens_per_scaleup_rank, None, handle._local, *known(recv_x, rows), recv_scales,
            new_scales, recv_weights, weights, indices, None, 1,
        )  # fmt: skip
        return rows, typed(new_scales, scales), indices, weights, handle

    def _combine(self, stream, x, handle, topk_weights, biases, sms, later):
        """``later``: biases are read when the result, a function, is called: it returns what else this returns."""
        runtime = self._alive()
        metadata, topk_idx, ends = handle.recv_src_metadata, handle.topk_idx, handle.psum_num_recv_tokens_per_scaleup_rank
        tokens, topk = topk_idx.shape
        local_experts, most = handle.num_experts // self.num_ranks, handle.num_max_tokens_per_rank
        single = bool(handle.do_expand) and not self.allow_multiple_reduction
        if self.num_rdma_ranks == 1 and not later:
            combined_x, combined_weights, event = runtime.combine_elastic(
                x, metadata, ends, topk_idx, handle.dst_buffer_slot_idx, handle.num_experts, most, bool(handle.do_expand), single,
                topk_weights, *(*biases, None, None)[:2], sms, stream.switched,
            )  # fmt: skip
            stream.part(event)
            return combined_x, combined_weights
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
            x, beside, per_rank, in_rank, per_rank, None, None, 1, max(most_rows, 1), sms, None, stream.switched, not later
        )
        stream.part(event)
        hidden, weighted = x.size(1), topk_weights is not None

        def add_up():
            combined_x = self._new((tokens, hidden), torch.bfloat16)
            combined_weights = self._new((tokens, topk), torch.float32) if weighted else None
            self._alive().sum_returned_rows(
                recv, recv_beside, self._tables(route)[0], handle.topk_idx, self.rank_idx, local_experts, single,
                *(*biases, None, None)[:2], combined_x, combined_weights, self._new((tokens, topk)),
            )  # fmt: skip
            if later:
                used_here(recv, recv_beside)
            return combined_x, combined_weights

        return add_up if later else add_up()

    def _new(self, shape: Union[int, Sequence[int]], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _scales_like(self, scales: Optional[torch.Tensor], rows: int, column_major: bool) -> Optional[torch.Tensor]:
        """Memory for scales; ``column_major``: with strides (1, rows rounded up to 4), as TMA loads want them."""
        if scales is None:
            return None
        width = scales.size(1)
        strides = (1, align(rows, 4)) if column_major else (width, 1)
        return torch.empty_strided((rows, width), strides, dtype=scales.dtype, device=self._device)

    def _tables(self, route: Tuple[torch.Tensor, ...]) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of a native handle: where each source's rows end on each rank, tokens of the received rows at their sources,
        rows of this rank's tokens at their destinations."""
        return (route[0], route[3], route[5]) if self.num_rdma_ranks == 1 else (route[5], route[7], route[2])

    def _alive(self) -> "_native.Buffer":
        if self.runtime is None:
            raise UseAfterDestroy("the buffer was used after destroy()")
        return self.runtime
