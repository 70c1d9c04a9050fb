"""What a dispatch of the second interface leaves for later calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, List, Optional, Tuple

import torch

from ..errors import WrongUse

__all__ = ["EPHandle"]


@dataclass(eq=False, repr=False)
class EPHandle:
    """Where the rows of a dispatch went. All attributes may be written; calls use what they find.

    Symbols as in ``ElasticBuffer``. Without a host wait, sizes are the largest possible ones.

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
        dst_buffer_slot_idx: ``[T, K]`` int32, the row of each selection's token at the rank that owns the expert (between
            nodes its number among this rank's rows there), or -1.
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
    _route: Optional[Tuple[Any, ...]] = field(default=None, init=False)
    _local: Optional[torch.Tensor] = field(default=None, init=False)

    #: Of the tensor in ``topk_idx``, where its writes are watched.
    _version: Optional[int] = field(default=None, init=False)
    _watched: bool = field(default=False, init=False)

    def _get_topk_idx(self) -> torch.Tensor:
        if self._version is not None and self._topk_idx._version != self._version:
            raise WrongUse("handle.topk_idx was written to after dispatch: the handle refers to it, so give dispatch a copy")
        return self._topk_idx

    def _set_topk_idx(self, given: torch.Tensor) -> None:
        self._topk_idx = given
        counted = self._watched and isinstance(given, torch.Tensor) and not given.is_inference()
        self._version = given._version if counted else None

    def _watch(self) -> "EPHandle":
        """From now on writes to ``topk_idx`` are found out, but for tensors of inference mode, which count none."""
        self._watched = True
        self.topk_idx = self._topk_idx
        return self

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
        mine = [value for value in vars(self).values() if isinstance(value, torch.Tensor)]
        return mine + [value for value in self._route or () if isinstance(value, torch.Tensor)]


# Not in the class, where it would be the field's default.
EPHandle.topk_idx = property(EPHandle._get_topk_idx, EPHandle._set_topk_idx)  # type: ignore[assignment]
