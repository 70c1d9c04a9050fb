"""A token dispatcher for training, in the stages of Megatron's flex dispatcher, with gradients.

``dispatch_preprocess`` -> ``token_dispatch`` -> ``dispatch_postprocess`` -> experts -> ``combine_preprocess`` ->
``token_combine``. Rows are sorted by expert behind the dispatch, so that experts can be one grouped matrix product, and
sorted back before combine. The backward pass of dispatch is a combine, and the reverse.

    cd examples/python && python -m engines.flex_dispatcher        2 ranks on the CPU
"""

from __future__ import annotations

# Not all functions of PyTorch have annotations.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from typing import Any, List, Tuple

import torch

from deep_ep import Buffer, EventOverlap

from . import experts
from .launch import run_on_ranks

Handle = Tuple[torch.Tensor, ...]
Received = Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Handle]


def _previous() -> EventOverlap:
    return Buffer.capture()


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, buffer: Buffer
    ) -> Received:
        per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
            topk_idx, num_experts, previous_event=_previous(), async_finish=True, allocate_on_comm_stream=True
        )
        rows, idx, weights, counts, handle, event = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            previous_event=event,
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        event.current_stream_wait()
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(idx)
        return rows, idx, weights, torch.tensor(counts), handle

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tuple[Any, ...]:
        grad_rows, _, grad_weights, _, _ = grads
        grad_x, grad_topk_weights, event = ctx.buffer.combine(
            grad_rows.contiguous(),
            ctx.handle,
            topk_weights=grad_weights.contiguous().float(),
            previous_event=_previous(),
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        event.current_stream_wait()
        return grad_x, None, grad_topk_weights, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, handle: Handle, buffer: Buffer) -> torch.Tensor:
        out, _, event = buffer.combine(
            rows.contiguous(), handle, previous_event=_previous(), async_finish=True, allocate_on_comm_stream=True
        )
        event.current_stream_wait()
        ctx.buffer, ctx.handle = buffer, handle
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tuple[Any, ...]:
        (grad_out,) = grads
        grad_rows, _, _, _, _, event = ctx.buffer.dispatch(
            grad_out.contiguous(),
            handle=ctx.handle,
            previous_event=_previous(),
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        event.current_stream_wait()
        return grad_rows, None, None


class FlexDispatcher:
    def __init__(self, buffer: Buffer, num_experts: int, num_topk: int) -> None:
        self.buffer, self.num_experts, self.num_topk = buffer, num_experts, num_topk

    def dispatch_preprocess(self, scores: torch.Tensor) -> None:
        """``scores`` ``[T, E]``: the router's. Keeps the best ``num_topk``."""
        self.topk_weights, self.topk_idx = scores.topk(self.num_topk, dim=1)

    def token_dispatch(self, x: torch.Tensor) -> Received:
        received: Received = _Dispatch.apply(  # type: ignore[no-untyped-call]
            x, self.topk_idx, self.topk_weights, self.num_experts, self.buffer
        )
        return received

    def dispatch_postprocess(self, received: Received) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows sorted by expert, their weights, and how many each expert has."""
        rows, idx, weights, counts, self.handle = received
        self.row, slot = (idx >= 0).nonzero(as_tuple=True)
        order = idx[self.row, slot].argsort(stable=True)
        self.row, self.num_rows = self.row[order], rows.size(0)
        return rows[self.row], weights[self.row, slot[order]], counts

    def combine_preprocess(self, expert_rows: torch.Tensor) -> torch.Tensor:
        """A row for each received row again: its experts' results added up."""
        out = expert_rows.new_zeros(self.num_rows, expert_rows.size(1), dtype=torch.float32)
        return out.index_add(0, self.row, expert_rows.float()).to(expert_rows.dtype)

    def token_combine(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Combine.apply(rows, self.handle, self.buffer)  # type: ignore[no-untyped-call]
        return out


def run(buffer: Buffer, num_experts: int) -> None:
    local, num_topk = num_experts // buffer.group_size, 3
    dispatcher = FlexDispatcher(buffer, num_experts, num_topk)
    for seed in range(3):
        tokens = 20 + 5 * buffer.rank if seed else 0 if buffer.rank else 12  # once a rank without tokens
        x, _, _ = experts.random_tokens(buffer, tokens, 128, num_experts, num_topk, seed)
        generator = torch.Generator().manual_seed(seed)
        scores = experts.random_numbers(torch.rand, tokens, num_experts, generator)
        target = experts.random_numbers(torch.randn, tokens, 128, generator)

        def here(given: torch.Tensor, given_scores: torch.Tensor) -> torch.Tensor:
            dispatcher.dispatch_preprocess(given_scores)
            rows, weights, counts = dispatcher.dispatch_postprocess(dispatcher.token_dispatch(given))
            assert counts.sum() == rows.size(0)
            mine = torch.arange(local).repeat_interleave(counts) + buffer.rank * local
            made = rows.float() * (experts.factor(mine) * weights).unsqueeze(1)
            return dispatcher.token_combine(dispatcher.combine_preprocess(made.to(torch.bfloat16)))

        def on_one_rank(given: torch.Tensor, given_scores: torch.Tensor) -> torch.Tensor:
            weights, idx = given_scores.topk(num_topk, dim=1)
            return experts.expected(given, idx, weights)

        results: List[Tuple[Any, Any, Any]] = []
        for forward in here, on_one_rank:
            given, given_scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
            out = forward(given, given_scores)
            (out.float() * target).sum().backward()
            results.append((out.detach(), given.grad, given_scores.grad))
        for ours, theirs in zip(*results):
            experts.require_close(ours, theirs.float())


if __name__ == "__main__":
    run_on_ranks(run, 2)
