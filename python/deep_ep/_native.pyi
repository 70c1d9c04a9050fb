from typing import Callable, List, Optional, Sequence, Tuple

import torch

has_cuda: bool

def use_exchange_api(use: bool) -> bool: ...

class EventHandle:
    """A point in the work of a CUDA stream: all that is enqueued on the current stream at construction."""

    def __init__(self) -> None: ...
    def current_stream_wait(self) -> None: ...
    def __copy__(self) -> "EventHandle": ...
    def __deepcopy__(self, memo: dict) -> "EventHandle": ...

class Buffer:
    def __init__(
        self,
        rank: int,
        num_ranks: int,
        all_gather: Callable[[bytes], Sequence[bytes]],
        device: int,
        heap_bytes: int,
        comm_stream: int,
    ) -> None: ...
    def get_dispatch_layout(
        self, topk_idx: torch.Tensor, num_experts: int, previous_event: Optional[EventHandle], async_finish: bool
    ) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, Optional[EventHandle]]: ...
    def dispatch(
        self,
        x: torch.Tensor,
        x_scales: Optional[torch.Tensor],
        num_tokens_per_rank: torch.Tensor,
        is_token_in_rank: torch.Tensor,
        num_tokens_per_expert: torch.Tensor,
        topk_idx: Optional[torch.Tensor],
        topk_weights: Optional[torch.Tensor],
        expert_alignment: int,
        num_worst_tokens: int,
        num_sms: int,
        previous_event: Optional[EventHandle],
        async_finish: bool,
    ) -> Tuple[
        torch.Tensor,
        Optional[torch.Tensor],
        Optional[torch.Tensor],
        Optional[torch.Tensor],
        List[int],
        Tuple[torch.Tensor, ...],
        Optional[EventHandle],
    ]: ...
    def cached_dispatch(
        self,
        x: torch.Tensor,
        x_scales: Optional[torch.Tensor],
        handle: Tuple[torch.Tensor, ...],
        num_sms: int,
        previous_event: Optional[EventHandle],
        async_finish: bool,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor], Optional[EventHandle]]: ...
    def combine(
        self,
        x: torch.Tensor,
        handle: Tuple[torch.Tensor, ...],
        topk_weights: Optional[torch.Tensor],
        bias_0: Optional[torch.Tensor],
        bias_1: Optional[torch.Tensor],
        num_sms: int,
        previous_event: Optional[EventHandle],
        async_finish: bool,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor], Optional[EventHandle]]: ...
    def local_memory(self) -> torch.Tensor: ...
    def check(self) -> None: ...
    def destroy(self) -> None: ...
    def drop(self) -> None: ...
