"""Ranks for the examples: processes on the CPU, or one for each GPU under torchrun."""

from __future__ import annotations

# Not all functions of PyTorch have annotations.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import os
from typing import Callable

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from deep_ep import Buffer

EXPERTS_PER_RANK = 4
LARGEST = dict(num_max_dispatch_tokens_per_rank=32, hidden=512)  # of the low-latency calls
LARGEST_ON_GPUS = dict(num_max_dispatch_tokens_per_rank=128, hidden=7168)


def _run_rank(rank: int, size: int, run: Callable[[Buffer, int], None], gpu: bool) -> None:
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
        torch.set_default_device("cuda")
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if gpu else "gloo", rank=rank, world_size=size)
    num_experts = EXPERTS_PER_RANK * size
    buffer = Buffer(
        dist.new_group(list(range(size))),
        num_nvl_bytes=64 << 20,
        num_rdma_bytes=Buffer.get_low_latency_rdma_size_hint(
            num_ranks=size, num_experts=num_experts, **(LARGEST_ON_GPUS if gpu else LARGEST)
        ),
        low_latency_mode=True,
        explicitly_destroy=True,
    )
    run(buffer, num_experts)
    print(f"rank {rank}: every result is right", flush=True)
    buffer.destroy()
    dist.destroy_process_group()


def run_on_ranks(run: Callable[[Buffer, int], None], ranks: int) -> None:
    """``run(buffer, num_experts)`` on each of so many ranks; under torchrun on its ranks."""
    if "LOCAL_RANK" in os.environ:
        _run_rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), run, torch.cuda.is_available())
        return
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29518")
    spawn(_run_rank, args=(ranks, run, False), nprocs=ranks)
