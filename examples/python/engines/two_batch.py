"""Two-batch overlap, as SGLang does it: while the rows of one micro-batch travel, the other one computes.

A layer is a generator that yields wherever it would wait. ``interleave`` runs two such layers in turn, so between the
send and the receive part of a call the other micro-batch has the GPU to itself. The dispatcher has the four stages that
SGLang's have: ``dispatch_a`` sends, ``dispatch_b`` receives, and so for combine.

    cd examples/python && python -m engines.two_batch        2 ranks on the CPU
"""

import torch

from . import experts
from .launch import run_on_ranks


class Dispatcher:
    """Of one micro-batch. Two may be under way on a buffer at a time."""

    def __init__(self, buffer, num_experts, max_tokens):
        self.buffer, self.num_experts, self.max_tokens = buffer, num_experts, max_tokens

    def dispatch_a(self, x, topk_idx, topk_weights):
        self.topk = topk_idx, topk_weights
        self.rows, self.counts, self.handle, _, self.hook = self.buffer.low_latency_dispatch(
            x, topk_idx, self.max_tokens, self.num_experts, use_fp8=False, return_recv_hook=True
        )

    def dispatch_b(self):
        self.hook()
        return self.rows, self.counts

    def combine_a(self, rows):
        self.out, _, self.hook = self.buffer.low_latency_combine(rows, *self.topk, self.handle, return_recv_hook=True)

    def combine_b(self):
        self.hook()
        return self.out


def layer(dispatcher, batch, trace, name):
    """One layer of one micro-batch. Yields where the other one may go on; its value is the output."""
    x, topk_idx, topk_weights = batch
    trace.append(f"{name}: attention")
    dispatcher.dispatch_a(x, topk_idx, topk_weights)
    yield
    rows, counts = dispatcher.dispatch_b()
    trace.append(f"{name}: experts")
    local = rows.size(0)
    factors = experts.factor(torch.arange(local) + dispatcher.buffer.rank * local).view(local, 1, 1)
    valid = torch.arange(rows.size(1)).view(1, -1, 1) < counts.view(local, 1, 1)
    dispatcher.combine_a(torch.where(valid, rows.float() * factors, 0.0).to(torch.bfloat16))
    yield
    return dispatcher.combine_b()


def interleave(first, second):
    """Runs two generators in turn. Returns their values."""
    running, values = [(0, first), (1, second)], [None, None]
    while running:
        for at, generator in list(running):
            try:
                next(generator)
            except StopIteration as end:
                values[at] = end.value
                running.remove((at, generator))
    return values


def run(buffer, num_experts):
    max_tokens = 16
    dispatchers = [Dispatcher(buffer, num_experts, max_tokens) for _ in range(2)]
    for seed in range(3):
        batches = [
            experts.random_tokens(buffer, tokens, 512, num_experts, 3, 2 * seed + i)
            for i, tokens in enumerate((max_tokens, 9 + buffer.rank))
        ]
        trace = []
        results = interleave(*(layer(d, b, trace, n) for d, b, n in zip(dispatchers, batches, "AB")))
        # Each computes between the other's sending and receiving.
        assert trace == ["A: attention", "B: attention", "A: experts", "B: experts"], trace
        for batch, result in zip(batches, results):
            experts.require_close(result, experts.expected(*batch))


if __name__ == "__main__":
    run_on_ranks(run, 2)
