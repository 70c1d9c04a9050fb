"""Prepare and finalize, as vLLM splits a layer of experts: one object moves tokens in and results out, another computes.

``HighThroughput`` is for prefill: rows arrive in one block, each with the numbers of its experts here. ``LowLatency`` is
for decoding: rows arrive sorted by expert, in a block of fixed size, without the host ever waiting. Both begin their
communication in ``prepare_async`` and ``finalize_async``; calling what these return waits for it, and what the engine
does in between overlaps.

    cd examples/python && python -m engines.prepare_finalize        2 ranks on the CPU
"""

from __future__ import annotations

# Not all functions of PyTorch have annotations.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from dataclasses import dataclass
from typing import Any, Callable, Optional, Tuple, Union

import torch

from deep_ep import Buffer

from . import experts
from .launch import run_on_ranks


Rows = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Prepared:
    """What the experts of this rank get."""

    rows: torch.Tensor  # [N, H], or [local experts, M * R, H]
    scales: Optional[torch.Tensor]  # of 8-bit rows
    tokens_per_expert: torch.Tensor  # [local experts]
    topk_ids: Optional[torch.Tensor] = None  # [N, K]: experts of this rank, -1 for those of others
    topk_weights: Optional[torch.Tensor] = None  # [N, K]


class HighThroughput:
    def __init__(self, buffer: Buffer, num_experts: int) -> None:
        self.buffer, self.num_experts = buffer, num_experts
        self.handle: Any = None

    def prepare_async(self, x: Rows, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> Callable[[], Prepared]:
        """``x``: rows, or (8-bit rows, their scales). Returns what waits for the rows."""
        event = Buffer.capture()
        per_rank, per_node, per_expert, in_rank, event = self.buffer.get_dispatch_layout(
            topk_ids, self.num_experts, previous_event=event, async_finish=True, allocate_on_comm_stream=False
        )
        received, ids, weights, counts, self.handle, event = self.buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_ids,
            topk_weights=topk_weights,
            expert_alignment=1,
            previous_event=event,
            async_finish=True,
            allocate_on_comm_stream=False,
        )

        def receive() -> Prepared:
            event.current_stream_wait()
            rows, scales = received if isinstance(received, tuple) else (received, None)
            return Prepared(rows, scales, torch.tensor(counts), ids, weights)

        return receive

    def finalize_async(self, output: torch.Tensor, rows: torch.Tensor) -> Callable[[], None]:
        """``rows`` ``[N, H]``: a token's experts here added up, with their weights. ``output`` ``[T, H]`` gets the sums."""
        combined, _, event = self.buffer.combine(rows, self.handle, previous_event=Buffer.capture(), async_finish=True)

        def receive() -> None:
            event.current_stream_wait()
            output.copy_(combined)

        return receive


class LowLatency:
    def __init__(self, buffer: Buffer, num_experts: int, max_tokens: int) -> None:
        self.buffer, self.num_experts, self.max_tokens = buffer, num_experts, max_tokens
        self.handle: Any = None

    def prepare_async(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, use_fp8: bool = False
    ) -> Callable[[], Prepared]:
        received, counts, self.handle, _, hook = self.buffer.low_latency_dispatch(
            x, topk_ids, self.max_tokens, self.num_experts, use_fp8=use_fp8, return_recv_hook=True
        )

        def receive() -> Prepared:
            hook()
            rows, scales = received if isinstance(received, tuple) else (received, None)
            return Prepared(rows, scales, counts)

        return receive

    def finalize_async(
        self, output: torch.Tensor, rows: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> Callable[[], None]:
        """``rows`` as ``prepare_async`` gave them; weights are applied on the way."""
        _, _, hook = self.buffer.low_latency_combine(
            rows, topk_ids, topk_weights, self.handle, out=output, return_recv_hook=True
        )
        return hook


def run_high_throughput(buffer: Buffer, num_experts: int, seed: int) -> float:
    x, topk_ids, topk_weights = experts.random_tokens(buffer, 30 + 7 * buffer.rank, 256, num_experts, 4, seed)
    layer = HighThroughput(buffer, num_experts)
    prepared = layer.prepare_async(x, topk_ids, topk_weights)()
    first = buffer.rank * (num_experts // buffer.group_size)
    ids, weights = prepared.topk_ids, prepared.topk_weights
    assert ids is not None and weights is not None
    assert prepared.tokens_per_expert.sum() == (ids >= 0).sum()
    share = torch.where(ids >= 0, weights * experts.factor(ids + first), 0.0).sum(dim=1, keepdim=True)
    output = torch.empty_like(x)
    layer.finalize_async(output, (prepared.rows.float() * share).to(torch.bfloat16))()
    return experts.require_close(output, experts.expected(x, topk_ids, topk_weights))


def run_low_latency(buffer: Buffer, num_experts: int, seed: int, use_fp8: bool = False) -> float:
    x, topk_ids, topk_weights = experts.random_tokens(buffer, 5 + buffer.rank, 256, num_experts, 4, seed)
    layer = LowLatency(buffer, num_experts, max_tokens=8)
    prepared = layer.prepare_async(x, topk_ids, topk_weights, use_fp8)()
    rows = prepared.rows.float()
    if prepared.scales is not None:
        rows = rows * prepared.scales.repeat_interleave(128, dim=2)
    local = num_experts // buffer.group_size
    factors = experts.factor(torch.arange(local) + buffer.rank * local).view(local, 1, 1)
    # Rows behind an expert's count are whatever was there before.
    valid = torch.arange(rows.size(1)).view(1, -1, 1) < prepared.tokens_per_expert.view(local, 1, 1)
    output = torch.empty_like(x)
    layer.finalize_async(
        output, torch.where(valid, rows * factors, 0.0).to(torch.bfloat16), topk_ids, topk_weights
    )()
    return experts.require_close(output, experts.expected(x, topk_ids, topk_weights), 0.05 if use_fp8 else 0.02)


def run(buffer: Buffer, num_experts: int) -> None:
    for seed in range(3):
        run_high_throughput(buffer, num_experts, seed)
        run_low_latency(buffer, num_experts, seed)
        run_low_latency(buffer, num_experts, seed, use_fp8=True)


if __name__ == "__main__":
    run_on_ranks(run, 2)
