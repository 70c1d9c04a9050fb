"""Made by scripts/native_stub: change python/bindings/ and run that."""

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import torch

version: str
max_topk: int
def environment_text(name: str, /) -> str: ...
def gpu_address(ordinal: int, /) -> str: ...
def use_exchange_api(use: bool, /) -> bool: ...
def heap_bytes_hint(num_ranks: int, tokens: int, row_bytes: int, num_topk: int, scale_bytes: int, /) -> int: ...
def heap_bytes_for(num_ranks: int, bytes: int, /) -> int: ...
def low_latency_bytes_hint(max_tokens: int, hidden: int, num_ranks: int, num_experts: int, /) -> int: ...
def default_timeout_s() -> float: ...

class EventHandle:
    def __init__(self) -> None: ...
    def current_stream_wait(self) -> None: ...
    def __copy__(self) -> EventHandle: ...
    def __deepcopy__(self, memo: Any, /) -> EventHandle: ...

class ReceiveHook:
    def __call__(self) -> None: ...

class Bootstrap:
    def __init__(self, rank: int, num_ranks: int, all_gather: Callable[[bytes], bytes], /) -> None: ...
    def for_buffer(self) -> Bootstrap: ...

class Buffer:
    def __init__(
        self,
        bootstrap: Bootstrap,
        device: int,
        memory: int,
        window_bytes: int,
        memory_between_nodes: int,
        window_bytes_between_nodes: int,
        comm_stream: int,
        low_latency_bytes: int,
        low_latency_masking: bool,
        allow_nvlink_for_low_latency: bool,
        timeout_s: Optional[float],
        num_qps_per_rank: int,
        results: Any,
        /,
    ) -> None: ...
    def num_nodes(self, /) -> int: ...
    def describe(self, /) -> str: ...
    def metrics(self, /) -> Dict[str, Any]: ...
    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: Any,
        async_finish: bool,
        /,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor], torch.Tensor, torch.Tensor, Optional[EventHandle]]: ...
    def dispatch(
        self,
        x: Union[torch.Tensor, Sequence[torch.Tensor]],
        handle: Optional[Tuple[Any, ...]],
        is_token_in_rank: Optional[torch.Tensor],
        num_tokens_per_expert: Optional[torch.Tensor],
        topk_idx: Optional[torch.Tensor],
        topk_weights: Optional[torch.Tensor],
        expert_alignment: int,
        num_worst_tokens: int,
        num_sms: int,
        previous_event: Any,
        async_finish: bool,
        /,
    ) -> Tuple[Any, Optional[torch.Tensor], Optional[torch.Tensor], Optional[List[int]], Optional[Tuple[torch.Tensor, ...]], Optional[EventHandle]]: ...
    def combine(
        self,
        x: torch.Tensor,
        handle: Tuple[Any, ...],
        topk_weights: Optional[torch.Tensor],
        bias: Union[None, torch.Tensor, Sequence[Optional[torch.Tensor]]],
        num_sms: int,
        previous_event: Any,
        async_finish: bool,
        /,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor], Optional[EventHandle]]: ...
    def dispatch_elastic(
        self,
        x: Union[torch.Tensor, Sequence[torch.Tensor]],
        route: Optional[Tuple[Any, ...]],
        metadata: Optional[torch.Tensor],
        source_ends: Optional[torch.Tensor],
        local: Optional[torch.Tensor],
        expert_ends: Optional[torch.Tensor],
        num_expanded: int,
        topk_idx: Optional[torch.Tensor],
        topk_weights: Optional[torch.Tensor],
        cumulative_local_expert_recv_stats: Optional[torch.Tensor],
        num_experts: int,
        num_max_tokens_per_rank: int,
        expert_alignment: int,
        exact: bool,
        expand: bool,
        zero_padding: bool,
        column_major_scales: bool,
        copy_selections: bool,
        num_sms: int,
        previous_event: Any,
        previous_event_before_epilogue: Any,
        async_finish: bool,
        /,
    ) -> Tuple[Any, Optional[torch.Tensor], Optional[torch.Tensor], List[int], int, Any, Optional[EventHandle]]: ...
    def combine_elastic(
        self,
        deferred: bool,
        x: torch.Tensor,
        metadata: torch.Tensor,
        source_ends: torch.Tensor,
        topk_idx: torch.Tensor,
        rows_at_owners: torch.Tensor,
        num_experts: int,
        num_max_tokens_per_rank: int,
        expanded: bool,
        each_selection: bool,
        topk_weights: Optional[torch.Tensor],
        bias: Union[None, torch.Tensor, Sequence[Optional[torch.Tensor]]],
        num_sms: int,
        previous_event: Any,
        previous_event_before_epilogue: Any,
        async_finish: bool,
        /,
    ) -> Tuple[Any, ...]: ...
    def barrier(self, async_finish: bool, /) -> Any: ...
    def allocate_lb_storage(self, bytes: int, /) -> Any: ...
    def prefetch_weights(
        self,
        redundant_expert_weights: Sequence[torch.Tensor],
        expert_weights: Sequence[torch.Tensor],
        redundancy_mapping: torch.Tensor,
        num_sms: int,
        previous_event: Any,
        async_finish: bool,
        /,
    ) -> Optional[EventHandle]: ...
    def reduce_grads(
        self,
        redundant_expert_grads: torch.Tensor,
        expert_grads: torch.Tensor,
        redundancy_mapping: torch.Tensor,
        num_sms: int,
        previous_event: Any,
        async_finish: bool,
        /,
    ) -> Optional[EventHandle]: ...
    def local_memory(self, /) -> Any: ...
    def check(self, wait: bool, /) -> None: ...
    def suspend(self, /) -> None: ...
    def resume(self, /) -> None: ...
    def destroy(self, /) -> None: ...
    def drop(self, /) -> None: ...
    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Optional[torch.Tensor],
        dispatch_wait_recv_cost_stats: Optional[torch.Tensor],
        use_fp8: bool,
        round_scale: bool,
        use_ue8m0: bool,
        async_finish: bool,
        return_recv_hook: bool,
        arrival_counters: Optional[torch.Tensor],
        arrival_rows: int,
        use_nvfp4: bool,
        x_global_scale: Optional[torch.Tensor],
        align_fp8_quantization: bool,
        /,
    ) -> Tuple[Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]], torch.Tensor, Tuple[Any, ...], Optional[EventHandle], Optional[ReceiveHook]]: ...
    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Tuple[Any, ...],
        use_logfmt: bool,
        zero_copy: bool,
        out: Optional[torch.Tensor],
        combine_wait_recv_cost_stats: Optional[torch.Tensor],
        async_finish: bool,
        return_recv_hook: bool,
        overlaps: bool,
        signals: Optional[torch.Tensor],
        signal_rows: int,
        expected: int,
        num_sms: int,
        /,
    ) -> Tuple[torch.Tensor, Optional[EventHandle], Optional[ReceiveHook]]: ...
    def low_latency_combine_buffer(self, handle: Tuple[Any, ...], /) -> Any: ...
    def low_latency_memory(self, /) -> Any: ...
    def low_latency_clean(self, /) -> None: ...
    def low_latency_update_mask(self, rank: int, masked: bool, /) -> None: ...
    def low_latency_query_mask(self, mask_status: torch.Tensor, /) -> None: ...
    def low_latency_clear_mask(self, /) -> None: ...
    def low_latency_resume(self, /) -> None: ...
    def replace_ranks(self, group: Bootstrap, ranks: Sequence[int], /) -> None: ...
