"""The interface of DeepEP's hybrid-ep branch, for training: a dense routing map, and rows permuted by expert.

The calls are those of ``ElasticBuffer``: rows travel once for each rank, with the selections and weights that maps and probs
stand for. Where rows lie is worked out on the device, so calls with ``non_blocking=True`` can be recorded into CUDA graphs.

Symbols: R ranks, r this rank, E experts, El = E / R of this rank, T tokens of this rank, H hidden size; N tokens of all ranks
that have an expert here, by source rank, then by token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Optional, Tuple

import torch

from . import _native, exchanges
from .arguments import check_dtype, integer
from .buffers.elastic import ElasticBuffer, EPHandle
from .errors import InvalidArgument, RankMismatch, Unsupported, WrongUse
from .peers import OfThisProcess
from .utils.math import align

__all__ = ["HybridEPBuffer", "HybridEpConfigInstance", "indices_to_map"]

_MOST_ALIGNMENT = 1 << 20  # of rows of an expert
_SMALLEST_CAPACITY = 512


@dataclass
class HybridEpConfigInstance:
    """What a buffer, or a call, is made for."""

    hidden_dim: int = 0
    max_num_of_tokens_per_rank: int = 0
    num_of_experts_per_rank: int = 0
    token_data_type: torch.dtype = torch.bfloat16
    #: Of a call, and private: the buffer that made it, and its handle there, whose places are those of the permuted rows.
    route: Any = field(default=None, repr=False, compare=False)


def indices_to_map(
    topk_idx: torch.Tensor, topk_weights: Optional[torch.Tensor], num_of_tokens: int, num_of_experts: int
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """``routing_map`` bool ``[T, E]`` and ``probs`` float32 ``[T, E]`` (``None`` without weights) of selections ``[T, K]``."""
    check_dtype("topk_idx", topk_idx, torch.int64, torch.int32)
    if topk_weights is not None:
        check_dtype("topk_weights", topk_weights, torch.float32, torch.bfloat16, torch.float16)
    index = topk_idx.to(torch.int64)
    routing_map = _dense(index, True, num_of_experts, torch.bool)
    return routing_map, None if topk_weights is None else _dense(index, topk_weights.float(), num_of_experts, torch.float32)


def _dense(idx: torch.Tensor, values: Any, experts: int, dtype: torch.dtype) -> torch.Tensor:
    """``[T, E]``: values at the experts that selections name, 0 elsewhere; -1 names none."""
    made = torch.zeros((idx.size(0), experts + 1), dtype=dtype, device=idx.device)
    return made.scatter_(1, torch.where(idx >= 0, idx, experts), values)[:, :-1].contiguous()


def _selections(routing_map: torch.Tensor, most: Optional[int]) -> torch.Tensor:
    """The experts of each row, ascending, then -1: int64 ``[T, K]``. K is ``most``, if it is known that no row has more; else as
    large as maps need or dispatch allows."""
    experts = routing_map.size(1)
    columns = min(experts, most or _native.max_topk)
    if experts > columns and most is None:
        few = (routing_map.sum(dim=1) <= columns).all()
        torch._assert_async(few, f"a row has more than {columns} experts, allowed: at most so many")
    numbers = torch.where(routing_map, torch.arange(experts, device=routing_map.device), experts)
    numbers = numbers.topk(columns, dim=1, largest=False).values
    return torch.where(numbers < experts, numbers, -1)


def _weights(probs: Optional[torch.Tensor], idx: torch.Tensor) -> Optional[torch.Tensor]:
    """``[T, K]``: of ``probs``, those of the selections; anything where there is none."""
    return None if probs is None else probs.gather(1, idx.clamp(min=0))


class HybridEPBuffer(OfThisProcess):
    """Expert-parallel communication of one rank with the others of ``group``, a ``torch.distributed`` group.

    Everything runs on the current stream. A buffer is made for the largest ``hidden_dim`` and ``max_num_of_tokens_per_rank`` of
    all ranks (at least 512 tokens). A larger call works, more slowly, and the next call makes a larger buffer, which is collective:
    by then all ranks have made a call of that size. SM and block counts, ``load_cached_kernels``, ``use_shared_buffer``,
    ``enable_custom_allgather`` and ``fuse_...`` are accepted without effect.
    """

    def __init__(
        self,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: Optional[int] = None,
        num_sms_combine_api: Optional[int] = None,
        num_sms_preprocessing_api: Optional[int] = None,
        num_blocks_permute: Optional[int] = None,
        num_blocks_unpermute: Optional[int] = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: Optional[int] = None,
        use_mnnvl: Optional[bool] = None,
    ) -> None:
        self.group: Any = group
        self.group_size: int = group.size()
        self.rank: int = group.rank()
        self.local_rank: int = self.rank
        self.node_rank: int = 0
        self.num_of_nodes: int = 1
        self.num_of_hybrid_ep_ranks_per_nvlink_domain: int = self.group_size
        self.configurer = SimpleNamespace(buffer_config=HybridEpConfigInstance())
        refused: Optional[Exception] = None
        try:
            if use_fp8:
                raise Unsupported("use_fp8 is True, allowed: False: rows of HybridEPBuffer are bfloat16")
            hidden_dim = integer("hidden_dim", hidden_dim, 1)
            tokens = max(integer("max_num_of_tokens_per_rank", max_num_of_tokens_per_rank, 0), _SMALLEST_CAPACITY)
            num_local_experts = integer("num_local_experts", num_local_experts, 1)
        except (TypeError, InvalidArgument) as error:
            hidden_dim, tokens, refused = 0, 0, error  # zeros mark a refusal: the other ranks raise, too
        sizes = exchanges.all_gather_ints(group, hidden_dim, tokens)
        if refused is not None:
            raise refused
        if (0, 0) in sizes:
            raise RankMismatch(f"HybridEPBuffer: the arguments of rank {sizes.index((0, 0))} are refused, which its own error says")
        self._want(max(size[0] for size in sizes), max(size[1] for size in sizes), num_local_experts)
        self._buffer: ElasticBuffer = self._make()

    @property
    def runtime(self) -> Any:
        return self._buffer.runtime

    def _want(self, hidden: int, tokens: int, local_experts: int) -> None:
        """Notes a size that all ranks have asked for."""
        config = self.configurer.buffer_config
        config.hidden_dim = max(config.hidden_dim, hidden)
        config.max_num_of_tokens_per_rank = max(config.max_num_of_tokens_per_rank, align(tokens, 64))
        config.num_of_experts_per_rank = max(config.num_of_experts_per_rank, local_experts)

    def _make(self) -> ElasticBuffer:
        config = self.configurer.buffer_config
        self._made = config.hidden_dim, config.max_num_of_tokens_per_rank
        return ElasticBuffer(self.group, hidden=self._made[0], num_max_tokens_per_rank=self._made[1])

    def _grown(self) -> ElasticBuffer:
        """The buffer, of the size that earlier calls had. Handles keep an earlier one."""
        config = self.configurer.buffer_config
        if self._made != (config.hidden_dim, config.max_num_of_tokens_per_rank):
            if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
                self._buffer._native.check(True)  # do the ranks agree?
                self._buffer = self._make()
        return self._buffer

    @torch.no_grad()
    def dispatch_with_permute(
        self,
        *,
        hidden: torch.Tensor,
        topk_idx: Optional[torch.Tensor] = None,
        topk_weights: Optional[torch.Tensor] = None,
        num_of_experts_per_rank: Optional[int] = None,
        num_of_experts: Optional[int] = None,
        use_fp8: Optional[bool] = None,
        routing_map: Optional[torch.Tensor] = None,
        probs: Optional[torch.Tensor] = None,
        scaling_factor: Optional[torch.Tensor] = None,
        num_permuted_tokens: Optional[int] = None,
        pad_multiple: Optional[int] = None,
        handle: Optional[Tuple[Any, ...]] = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: Optional[int] = None,
        use_host_meta: Optional[bool] = None,
        num_of_tokens_per_rank: Optional[int] = None,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor], Optional[torch.Tensor], Optional[torch.Tensor], Tuple[Any, ...]]:
        """Sends each row to the ranks of its experts, and lays it out by expert there.

        Args:
            hidden: ``[T, H]`` contiguous, rows of a multiple of 16 bytes.
            routing_map, probs: bool and float32 ``[T, E]``, at most 32 experts a row; probs on all ranks or on none. Or
                ``topk_idx`` and ``topk_weights`` ``[T, K]``, with ``num_of_experts``.
            num_permuted_tokens: P. With ``non_blocking`` a budget, which is needed: rows that would lie behind it are dropped.
                With ``handle`` needed, too.
            pad_multiple: each expert's rows are filled up with zeros to a multiple of it.
            handle: of an earlier call: rows go where they went then.
            use_fp8: refused. ``scaling_factor``, ``num_dispatched_tokens``: accepted without effect.
            use_host_meta: an older name for the opposite of ``non_blocking``.
            num_of_tokens_per_rank: at least the largest T, equal on all ranks. Needed where T differs and a rank has more than
                the buffer was made for, or ``non_blocking`` is set; else ``RankMismatch`` names the ranks.

        Returns:
            Rows ``[P, H]``, by expert, then by global token; probs ``[P]``; ``None``, as there are no scales; the experts' padded
            counts int64 ``[El]``, on the CPU unless ``non_blocking`` (``None`` with ``handle``); the handle, a tuple of eleven, whose
            last element is 1 where rows were dropped.
        """
        if use_fp8:
            raise Unsupported("use_fp8 is True, allowed: False: rows of HybridEPBuffer are bfloat16")
        if probs is not None:
            check_dtype("probs", probs, torch.float32)
        if use_host_meta is not None:
            non_blocking = not use_host_meta
        tokens_per_expert = None
        budget = None if num_permuted_tokens is None else int(num_permuted_tokens)
        if handle is not None:
            if budget is None:
                raise WrongUse("num_permuted_tokens is None, allowed: a number where a handle is given")
            buffer, sent = self._route_of(handle)
            rows, _, weights, _, _ = buffer.dispatch(hidden, topk_weights=_weights(probs, sent.topk_idx), handle=sent)
            places = sent.recv_src_metadata[:, 2:]
        else:
            columns = None
            if routing_map is None:
                if topk_idx is None or num_of_experts is None:
                    raise InvalidArgument("routing_map is None, allowed: a map, or topk_idx and num_of_experts instead")
                columns = topk_idx.size(1)
                routing_map, dense = indices_to_map(topk_idx, topk_weights, hidden.size(0), num_of_experts)
                probs = dense if probs is None else probs
            check_dtype("routing_map", routing_map, torch.bool)
            if routing_map.dim() != 2 or routing_map.size(0) != hidden.size(0) or routing_map.size(1) % self.group_size:
                raise InvalidArgument(
                    f"routing_map is of shape {tuple(routing_map.shape)}, allowed: [{hidden.size(0)}, a multiple of {self.group_size}]"
                )
            step = max(1, integer("pad_multiple", pad_multiple or 0, 0))
            if step > _MOST_ALIGNMENT:
                raise InvalidArgument(f"pad_multiple is {step}, allowed: at most {_MOST_ALIGNMENT}")
            if non_blocking and (budget is None or budget < 0 or budget % step):
                raise WrongUse(f"num_permuted_tokens is {budget}, allowed with non_blocking: a multiple of pad_multiple, {step}")
            tokens, experts = routing_map.shape
            capacity = self.configurer.buffer_config.max_num_of_tokens_per_rank
            if num_of_tokens_per_rank is not None:
                most = integer("num_of_tokens_per_rank", num_of_tokens_per_rank, max(tokens, 1))
            elif non_blocking:  # memory for the largest number of rows
                most = max(tokens, 1)
            else:
                most = capacity if tokens <= capacity else align(tokens, 64)
            buffer = self._grown()
            idx = _selections(routing_map, columns)
            try:
                rows, local, weights, sent, _ = buffer.dispatch(
                    hidden, idx, _weights(probs, idx), num_experts=experts,
                    num_max_tokens_per_rank=most, expert_alignment=step, do_cpu_sync=not non_blocking, do_handle_copy=False,
                )  # fmt: skip
            except RankMismatch as error:
                remedy = "; give num_of_tokens_per_rank where ranks have different numbers of tokens"
                raise RankMismatch(f"{error}{remedy if 'maximum of tokens' in str(error) else ''}") from None
            self._want(hidden.size(1), most, experts // self.group_size)
            counts = sent.num_unaligned_recv_tokens_per_expert.to(torch.int64)
            starts = sent.psum_num_recv_tokens_per_expert - align(counts, step)
            received = sent.psum_num_recv_tokens_per_scaleup_rank[-1:].clone()
            if not non_blocking:
                host = {"device": "cpu", "pin_memory": hidden.is_cuda}
                tokens_per_expert = torch.tensor(sent.num_recv_tokens_per_expert_list, dtype=torch.int64, **host)
                received = torch.tensor([sent.num_recv_tokens], dtype=torch.int32, **host)
                wanted = sent.num_expanded_tokens
                budget = wanted if budget is None else budget
                if budget < wanted:
                    raise InvalidArgument(f"num_permuted_tokens is {budget}, allowed: {wanted} or more, which have come")
            overflow = (starts[-1:] + counts[-1:] > budget).to(torch.int32)
            counts = torch.minimum(counts, budget - starts).clamp(min=0)
            if non_blocking:
                tokens_per_expert = align(counts, step)
            # Received rows are in the order of global tokens.
            here = _dense(local, True, starts.numel(), torch.bool)
            places = (here.to(torch.int64).cumsum(0) - 1 + starts).gather(1, local.clamp(min=0))
            places = torch.where((local >= 0) & (places < budget), places, -1)
            # From here on it is one of the expanded layout.
            sent.do_expand, sent.recv_src_metadata[:, 2:] = True, places
            # The tuple has None in the places of what is private upstream.
            config = HybridEpConfigInstance(hidden.size(1), tokens, here.size(1), hidden.dtype, (buffer, sent))
            local_map = here.new_zeros((max(self.group_size * tokens, here.size(0)), here.size(1)))
            local_map[: here.size(0)] = here
            handle = None, None, None, received, local_map, None, None, counts.to(torch.int32), tokens, config, overflow
        # For each permuted row, the place in ``places`` of the selection that it is of; -1: of none.
        pairs = torch.full((budget + 1,), -1, dtype=torch.int64, device=hidden.device)
        at = torch.where((places >= 0) & (places < budget), places, budget).flatten().to(torch.int64)
        pairs = pairs.scatter_(0, at, torch.arange(at.numel(), device=hidden.device))[:budget]
        permuted = _picked(rows, pairs // places.size(1))
        permuted_probs = None if weights is None else _picked(weights.flatten(), pairs)
        return permuted, permuted_probs, None, tokens_per_expert, handle

    @torch.no_grad()
    def combine_with_unpermute(
        self,
        *,
        hidden: torch.Tensor,
        probs: Optional[torch.Tensor] = None,
        handle: Optional[Tuple[Any, ...]] = None,
        pad_multiple: Optional[int] = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: Optional[int] = None,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """``[T, H]`` bfloat16: for each token the sum of its rows on each rank, in float32, rounded, then of the ranks. Of
        ``probs`` ``[P]``: float32 ``[T, E]``, each pair's value at its place, zeros elsewhere."""
        buffer, sent = self._route_of(handle)
        combined, weights, _ = buffer.combine(hidden, sent, probs)
        if probs is None:
            return combined, None
        return combined, _dense(sent.topk_idx, weights, sent.num_experts, torch.float32)

    @staticmethod
    def _route_of(handle: Optional[Tuple[Any, ...]]) -> Tuple[ElasticBuffer, EPHandle]:
        config = handle[9] if isinstance(handle, tuple) and len(handle) == 11 else None
        if not isinstance(config, HybridEpConfigInstance):
            raise InvalidArgument(f"handle is {type(handle).__name__}, allowed: the tuple of 11 that the dispatch returned")
        return config.route


def _picked(rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Rows by number; zeros in the place of -1."""
    if rows.size(0) == 0:
        return rows.new_zeros((*numbers.shape, *rows.shape[1:]))
    missing = (numbers < 0).reshape(*numbers.shape, *[1] * (rows.dim() - 1))
    return rows[numbers.clamp(min=0)].masked_fill_(missing, 0)
