"""A Mixture-of-Experts layer over several ranks, forward and backward.

Experts are spread over the ranks. Each rank routes its tokens, dispatch brings every token to the ranks of its experts,
the experts run as plain PyTorch matrix products, and combine brings their weighted sum back. In the backward pass the
two change places: what dispatch did to rows, combine does to their gradients, and the reverse.

    python3 examples/python/moe_layer.py    4 ranks on the CPU
    python3 -m torch.distributed.run --nproc-per-node 8 examples/python/moe_layer.py    with GPUs: one rank on each

Every rank checks output and gradients against the same layer computed on one rank.
"""

from __future__ import annotations

# Not all functions of PyTorch have annotations.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import argparse
import os
from typing import Any, List, Tuple

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from deep_ep import Buffer, Config

CONFIG = Config(num_sms=24)

Handle = Tuple[torch.Tensor, ...]
Gradients = Tuple[Any, ...]


class Dispatch(torch.autograd.Function):
    """Rows and routing weights to the ranks of their experts. Backward: combine."""

    @staticmethod
    def forward(
        ctx: Any, buffer: Buffer, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int
    ) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, Handle]:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
        rows, idx, weights, _, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            config=CONFIG,
        )
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(idx)
        return rows, idx, weights, handle

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Gradients:
        grad_rows, _, grad_weights, _ = grads
        grad_x, grad_topk_weights, _ = ctx.buffer.combine(
            grad_rows.contiguous(), ctx.handle, topk_weights=grad_weights.contiguous().float(), config=CONFIG
        )
        return None, grad_x, None, grad_topk_weights, None


class Combine(torch.autograd.Function):
    """Sums of rows back to the owners of the tokens. Backward: a dispatch with the same handle."""

    @staticmethod
    def forward(ctx: Any, buffer: Buffer, rows: torch.Tensor, handle: Handle) -> torch.Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(rows, handle, config=CONFIG)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Gradients:
        (grad_out,) = grads
        grad_rows = ctx.buffer.dispatch(grad_out.contiguous(), handle=ctx.handle, config=CONFIG)[0]
        return None, grad_rows, None


def run_experts(
    rows: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """For each row the weighted sum over its experts: ``down(silu(up(row)))``. ``up`` is ``[experts, H, F]``."""
    out = torch.zeros_like(rows)
    for expert in range(up.size(0)):
        row, slot = (idx == expert).nonzero(as_tuple=True)
        if row.numel() == 0:
            continue
        hidden = torch.nn.functional.silu(rows[row] @ up[expert])
        out = out.index_add(0, row, (hidden @ down[expert]) * weights[row, slot].unsqueeze(1).to(rows.dtype))
    return out


class MoELayer(torch.nn.Module):
    """This rank's share of a layer of ``num_experts`` experts."""

    def __init__(
        self, buffer: Buffer, num_experts: int, hidden: int, inner: int, num_topk: int, device: torch.device, seed: int = 0
    ) -> None:
        super().__init__()
        # Every rank draws the weights of all experts, and keeps its own: so that they can be compared.
        generator = torch.Generator().manual_seed(seed)
        up = torch.randn(num_experts, hidden, inner, generator=generator, dtype=torch.float32) / hidden**0.5
        down = torch.randn(num_experts, inner, hidden, generator=generator, dtype=torch.float32) / inner**0.5
        router = torch.randn(hidden, num_experts, generator=generator, dtype=torch.float32) / hidden**0.5
        local = num_experts // buffer.group_size
        mine = slice(buffer.rank * local, (buffer.rank + 1) * local)
        self.buffer, self.num_experts, self.num_topk = buffer, num_experts, num_topk
        self.router = torch.nn.Parameter(router.to(device))
        self.up = torch.nn.Parameter(up[mine].to(torch.bfloat16).to(device))
        self.down = torch.nn.Parameter(down[mine].to(torch.bfloat16).to(device))
        self.everything = (up.to(torch.bfloat16).to(device), down.to(torch.bfloat16).to(device))

    def route(self, x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        weights, idx = torch.topk((x.float() @ self.router).softmax(dim=1), self.num_topk, dim=1)
        return idx, weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        idx, weights = self.route(x)
        rows, recv_idx, recv_weights, handle = Dispatch.apply(  # type: ignore[no-untyped-call]
            self.buffer, x, idx, weights, self.num_experts
        )
        made = run_experts(rows, recv_idx, recv_weights, self.up, self.down)
        out: torch.Tensor = Combine.apply(self.buffer, made, handle)  # type: ignore[no-untyped-call]
        return out

    def on_one_rank(self, x: torch.Tensor) -> torch.Tensor:
        """The same without communication; expert weights of all ranks."""
        idx, weights = self.route(x)
        return run_experts(x, idx, weights, *self.everything)


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-6))


def train_step(
    buffer: Buffer,
    device: torch.device,
    tokens: int = 48,
    hidden: int = 64,
    inner: int = 96,
    experts_per_rank: int = 4,
    num_topk: int = 3,
) -> float:
    """One forward and backward pass. Returns the largest relative difference to the layer on one rank."""
    layer = MoELayer(buffer, experts_per_rank * buffer.group_size, hidden, inner, num_topk, device)
    generator = torch.Generator().manual_seed(100 + buffer.rank)
    x = torch.randn(tokens + buffer.rank, hidden, generator=generator, dtype=torch.float32).to(torch.bfloat16).to(device)
    target = torch.randn(x.shape, generator=generator, dtype=torch.float32).to(device)

    results: List[Tuple[Any, Any, Any]] = []
    for forward in (layer, layer.on_one_rank):
        layer.zero_grad()
        given = x.clone().requires_grad_()
        out = forward(given)
        loss = (out.float() - target).square().mean()
        loss.backward()
        results.append((out.detach(), given.grad, layer.router.grad))
    return max(relative_difference(ours, theirs) for ours, theirs in zip(*results))


def run_rank(rank: int, size: int, gpu: bool) -> None:
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if gpu else "gloo", rank=rank, world_size=size)
    group = dist.new_group(list(range(size)))
    buffer = Buffer(group, num_nvl_bytes=64 << 20, explicitly_destroy=True)
    difference = train_step(buffer, torch.device("cuda" if gpu else "cpu"))
    # Experts' sums are rounded to bfloat16 once a rank, and once at the end.
    assert difference < 0.02, f"rank {rank}: relative difference {difference}"
    print(f"rank {rank}: output and gradients agree with one rank's, relative difference {difference:.4f}", flush=True)
    buffer.destroy()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="ranks to start on the CPU (default: %(default)s)")
    arguments = parser.parse_args()
    if "LOCAL_RANK" in os.environ:
        run_rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.cuda.is_available())
        return
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    spawn(run_rank, args=(arguments.ranks, False), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
