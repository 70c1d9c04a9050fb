"""Two-batch overlap, as SGLang does it: while the rows of one micro-batch travel, the other one computes.

A layer is a generator that yields wherever it would wait. ``interleave`` runs two such layers in turn, so between the
send and the receive part of a call the other micro-batch has the GPU to itself. The dispatcher has the four stages that
SGLang's have: ``dispatch_a`` sends, ``dispatch_b`` receives, and so for combine.

    cd examples/python && python -m engines.two_batch        2 ranks on the CPU
    cd examples/python && python3 -m torch.distributed.run --nproc-per-node 2 -m engines.two_batch        a GPU each

At the end it measures what that gains, with matrix products for attention and experts. On the CPU that says nothing of
GPUs: the library's kernels run on the processors that they are to overlap with, and only waits for the other rank can.
"""

from __future__ import annotations

# Not all functions of PyTorch have annotations.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import statistics
import time
from typing import Callable, Generator, List, Optional, Tuple

import torch
import torch.distributed as dist

from deep_ep import Buffer

from . import experts
from .launch import run_on_ranks

Batch = Tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Work = Callable[[], object]
Layer = Generator[None, None, torch.Tensor]


class Dispatcher:
    """Of one micro-batch. Two may be under way on a buffer at a time."""

    def __init__(self, buffer: Buffer, num_experts: int, max_tokens: int) -> None:
        self.buffer, self.num_experts, self.max_tokens = buffer, num_experts, max_tokens

    def dispatch_a(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> None:
        self.topk = topk_idx, topk_weights
        self.rows, self.counts, self.handle, _, self.hook = self.buffer.low_latency_dispatch(
            x, topk_idx, self.max_tokens, self.num_experts, use_fp8=False, return_recv_hook=True
        )

    def dispatch_b(self) -> Tuple[torch.Tensor, torch.Tensor]:
        self.hook()
        return self.rows, self.counts

    def combine_a(self, rows: torch.Tensor) -> None:
        self.out, _, self.hook = self.buffer.low_latency_combine(rows, *self.topk, self.handle, return_recv_hook=True)

    def combine_b(self) -> torch.Tensor:
        self.hook()
        return self.out


def multiplied(dispatcher: Dispatcher, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """What the experts of this rank make of their rows. What lies behind the last row of each is left out."""
    local = rows.size(0)
    factors = experts.factor(torch.arange(local) + dispatcher.buffer.rank * local).view(local, 1, 1)
    valid = torch.arange(rows.size(1)).view(1, -1, 1) < counts.view(local, 1, 1)
    return torch.where(valid, rows.float() * factors, 0.0).to(torch.bfloat16)


def layer(dispatcher: Dispatcher, batch: Batch, trace: List[str], name: str, work: Optional[Work] = None) -> Layer:
    """One layer of one micro-batch. Yields where the other one may go on; its value is the output.
    ``work`` stands for attention, and for the experts."""
    x, topk_idx, topk_weights = batch
    trace.append(f"{name}: attention")
    if work:
        work()
    dispatcher.dispatch_a(x, topk_idx, topk_weights)
    yield
    rows, counts = dispatcher.dispatch_b()
    trace.append(f"{name}: experts")
    if work:
        work()
    dispatcher.combine_a(rows if work else multiplied(dispatcher, rows, counts))
    yield
    return dispatcher.combine_b()


def interleave(first: Layer, second: Layer) -> List[torch.Tensor]:
    """Runs two generators in turn. Returns their values."""
    running, values = [(0, first), (1, second)], [torch.empty(0)] * 2
    while running:
        for at, generator in list(running):
            try:
                next(generator)
            except StopIteration as end:
                values[at] = end.value
                running.remove((at, generator))
    return values


def in_order(first: Layer, second: Layer) -> None:
    """Runs one generator after the other."""
    for generator in first, second:
        for _ in generator:
            pass


def seconds(run: Work, rounds: int) -> float:
    """Median of the rounds, of the slowest rank."""
    gpu = torch.get_default_device().type == "cuda"
    times: List[float] = []
    for _ in range(rounds + 2):
        dist.barrier()
        if gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    slowest = torch.tensor(times[2:], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(statistics.median(slowest.tolist()))


def measure(buffer: Buffer, num_experts: int) -> None:
    gpu = torch.get_default_device().type == "cuda"
    tokens, hidden = (128, 7168) if gpu else (16, 512)
    side, rounds = (4096, 50) if gpu else (128, 5)
    buffer.clean_low_latency_buffer(tokens, hidden, num_experts)  # before calls of another size
    dispatchers = [Dispatcher(buffer, num_experts, tokens) for _ in range(2)]
    batches = [experts.random_tokens(buffer, tokens, hidden, num_experts, 3, seed) for seed in (10, 11)]
    matrix = torch.ones(side, side, dtype=torch.bfloat16 if gpu else torch.float32)

    def work() -> None:
        torch.mm(matrix, matrix)

    def layers(work: Work) -> Tuple[Layer, Layer]:
        first, second = (layer(d, b, [], "", work) for d, b in zip(dispatchers, batches))
        return first, second

    def compute() -> None:
        for _ in range(4):
            work()

    alone = seconds(compute, rounds), seconds(lambda: interleave(*layers(lambda: None)), rounds)
    after = seconds(lambda: in_order(*layers(work)), rounds)
    together = seconds(lambda: interleave(*layers(work)), rounds)
    if buffer.rank != 0:
        return
    print(f"{tokens} tokens of {hidden} channels: computing alone {alone[0] * 1e3:.3f} ms, calls alone {alone[1] * 1e3:.3f} ms")
    print(
        f"one batch after the other {after * 1e3:.3f} ms, interleaved {together * 1e3:.3f} ms: "
        f"{together / after:.3f} of that, {together / max(alone):.3f} of the larger part alone"
    )
    if not gpu:
        print("on the CPU that says nothing of GPUs: kernels run on the processors that they are to overlap with")


def run(buffer: Buffer, num_experts: int) -> None:
    max_tokens = 16
    dispatchers = [Dispatcher(buffer, num_experts, max_tokens) for _ in range(2)]
    for seed in range(3):
        batches = [
            experts.random_tokens(buffer, tokens, 512, num_experts, 3, 2 * seed + i)
            for i, tokens in enumerate((max_tokens, 9 + buffer.rank))
        ]
        trace: List[str] = []
        first, second = (layer(d, b, trace, n) for d, b, n in zip(dispatchers, batches, "AB"))
        results = interleave(first, second)
        # Each computes between the other's sending and receiving.
        assert trace == ["A: attention", "B: attention", "A: experts", "B: experts"], trace
        for batch, result in zip(batches, results):
            experts.require_close(result, experts.expected(*batch))
    measure(buffer, num_experts)


if __name__ == "__main__":
    run_on_ranks(run, 2)
