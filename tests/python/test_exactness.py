"""How exact each mode is, as a benchmark that does not know the library would ask: the same fixed workload for all, and fp64 as the judge.

Activations, router and weights are functions of counters, experts are affine maps of a channel, and each token takes 8 of 256 experts,
all with the same probability. The measure is the largest error / max(|value|, 0.02). docs/reference/sums.md has the order and the
roundings of each call, from which the limits follow.
"""

import pytest
import torch
from common import ranks_a_node
from low_latency_reference import cast_fp8

from deep_ep import Buffer, ElasticBuffer, EPBuffer
from deep_ep.utils.math import per_token_cast_to_fp8

RANKS, EXPERTS, TOPK = 4, 256, 8
LOCAL = EXPERTS // RANKS
SIZES = ((1, 512), (5, 256), (64, 384), (512, 128))  # tokens of each rank, hidden
# bfloat16 has 8 bits: one rounding is off by 2^-8 of a value's power of two at most. The rest is for sums in fp32.
ROUNDING = 0.0042
FLOOR = 0.02


def hashed(*shape, stream):
    """Numbers of [0, 1), each a function of its index."""
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.int64) + (stream << 40)
    for multiplier in (0x45D9F3B, 0x119DE1F3):
        count = ((count ^ (count >> 16)) * multiplier) & 0xFFFFFFFF
    return ((count ^ (count >> 16)) & 0xFFFFFF).to(torch.float32).div(1 << 24).view(shape)


SLOPE, OFFSET = hashed(EXPERTS, stream=1) * 2 - 1, hashed(EXPERTS, stream=2) - 0.5


def expert(rows, experts):
    """bfloat16; ``experts`` are numbers of the shape of ``rows`` without channels."""
    return rows.float().mul(SLOPE[experts].unsqueeze(-1)).add(OFFSET[experts].unsqueeze(-1)).to(torch.bfloat16)


def back(values, scales):
    return values.float().mul(scales.repeat_interleave(128, dim=-1))


class Workload:
    """Of one rank."""

    def __init__(self, rank, tokens, hidden, fp8, cast=per_token_cast_to_fp8):
        self.x = (hashed(tokens, hidden, stream=16 + rank) * 4 - 2).to(torch.bfloat16)
        self.idx = hashed(tokens, EXPERTS, stream=32 + rank).topk(TOPK, dim=1).indices
        self.weights = torch.softmax(hashed(tokens, TOPK, stream=48 + rank), dim=1)
        self.owners = self.idx // LOCAL
        self.sent = cast(self.x) if fp8 else self.x
        self.rows = back(*self.sent) if fp8 else self.x
        # [T, K, H]: what the experts make of it, and without any rounding.
        self.outputs = expert(self.rows.unsqueeze(1).expand(-1, TOPK, -1), self.idx)
        scaled = self.x.double().unsqueeze(1) * SLOPE.double()[self.idx].unsqueeze(2)
        offset = OFFSET.double()[self.idx].unsqueeze(2)
        weights = self.weights.double().unsqueeze(2)
        self.ideal = (weights * (scaled + offset)).sum(1)
        # A term passes four roundings at most: of the expert, of its product or sum in the program, of a sum on its rank or node, of
        # the result. 8-bit floating point has 4 bits, and loses 2^-10 of a block's scale, 2 / 448, at least.
        self.allowed = (weights * (4 * ROUNDING * (scaled.abs() + offset.abs()) + fp8 * (scaled.abs() / 16 + 1e-5))).sum(1)

    def check(self, combined, terms, sums=()):
        """``terms`` [T, n, H] are what the call adds up; ``sums`` are those that it rounds on the way."""
        exact = terms.double().sum(1)
        scale = exact.abs().clamp(min=FLOOR)
        # Of the result; of sums that were rounded before, whose errors are relative to their own size.
        limit = ROUNDING * (1 + sum((each.double().abs() / scale for each in sums), torch.zeros_like(scale)))
        error = (combined.double() - exact).abs() / scale
        worst = (error / limit).argmax()
        worst = f"{error.flatten()[worst]:.5f} of {exact.flatten()[worst]:.5f}, limit {limit.flatten()[worst]:.5f}"
        assert (error <= limit).all(), f"error {worst}"
        assert ((combined.double() - self.ideal).abs() <= self.allowed).all(), "from end to end"

    def of_ranks(self, terms, rounded=False):
        """[T, R, H]: sums of ``terms`` [T, K, H] that each rank makes, selections ascending."""
        made = torch.zeros(len(self.x), RANKS, terms.size(2))
        for k in range(TOPK):
            made.scatter_add_(1, self.owners[:, k, None, None].expand(-1, 1, terms.size(2)), terms[:, k : k + 1].float())
        return made.to(torch.bfloat16) if rounded else made


def weighted(outputs, weights):
    return outputs.float() * weights.unsqueeze(-1)


def reduced(rows, idx, weights, first):
    """What a program gives combine that has one row for each token: the sum of its experts, rounded."""
    total = torch.zeros(rows.shape)
    for k in range(TOPK):
        term = weighted(expert(rows, idx[:, k].clamp(min=0) + first), weights[:, k])
        total += torch.where(idx[:, k : k + 1] >= 0, term, 0)
    return total.to(torch.bfloat16)


def received(rows):
    return back(*rows) if isinstance(rows, tuple) else rows


def on_other_nodes(rank, by_rank, ranks_per_node):
    """[T, H] each: the sums of the rows [T, R, H] of other nodes, which are rounded before they travel."""
    if not ranks_per_node:
        return []
    nodes = [by_rank[:, begin : begin + ranks_per_node].float().sum(1) for begin in range(0, RANKS, ranks_per_node)]
    return [each for node, each in enumerate(nodes) if node != rank // ranks_per_node]


def normal(group, fp8, ranks_per_node):
    with ranks_a_node(ranks_per_node):
        buffer = Buffer(group, 1 << 24)
    rank = group.rank()
    for tokens, hidden in SIZES:
        work = Workload(rank, tokens, hidden, fp8)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(work.idx, EXPERTS)
        rows, idx, weights, _, handle, _ = buffer.dispatch(
            work.sent, None, per_rank, None, in_rank, per_expert, work.idx, work.weights
        )
        combined = buffer.combine(reduced(received(rows), idx, weights, rank * LOCAL), handle)[0]
        given = work.of_ranks(weighted(work.outputs, work.weights), rounded=True)
        work.check(combined, given, on_other_nodes(rank, given, ranks_per_node))


def low_latency(group, fp8, ranks_per_node, hooks):
    rank, largest = group.rank(), max(tokens for tokens, _ in SIZES)
    size = Buffer.get_low_latency_rdma_size_hint(largest, 128, RANKS, EXPERTS)
    with ranks_a_node(ranks_per_node):
        buffer = Buffer(group, 0, size, low_latency_mode=True, num_qps_per_rank=4)
    for tokens, hidden in SIZES:
        work = Workload(rank, tokens, hidden, fp8, cast_fp8)
        rows, _, handle, _, hook = buffer.low_latency_dispatch(
            work.x, work.idx, tokens, EXPERTS, use_fp8=fp8, return_recv_hook=hooks
        )
        if hooks:
            hook()
        numbers = torch.arange(rank * LOCAL, (rank + 1) * LOCAL).unsqueeze(1).expand(-1, RANKS * tokens)
        made = expert(received(rows), numbers)
        combined, _, hook = buffer.low_latency_combine(made, work.idx, work.weights, handle, return_recv_hook=hooks)
        if hooks:
            hook()
        work.check(combined, work.outputs.double() * work.weights.double().unsqueeze(2))


def elastic(group, fp8, ranks_per_node, expand, multiple=True, make=ElasticBuffer):
    with ranks_a_node(ranks_per_node):
        buffer = make(group, num_max_tokens_per_rank=512, hidden=512, num_topk=TOPK, allow_multiple_reduction=multiple)
    rank = group.rank()
    for tokens, hidden in SIZES:
        work = Workload(rank, tokens, hidden, fp8)
        rows, idx, weights, handle, _ = buffer.dispatch(work.sent, work.idx, work.weights, num_experts=EXPERTS, do_expand=expand)
        rows = received(rows)
        if expand:
            numbers = torch.arange(rank * LOCAL, (rank + 1) * LOCAL).repeat_interleave(torch.tensor(handle.num_recv_tokens_per_expert_list))
            made = weighted(expert(rows, numbers), weights).to(torch.bfloat16)
            given = weighted(work.outputs, work.weights).to(torch.bfloat16)
            several = torch.nn.functional.one_hot(work.owners, RANKS).sum(1).unsqueeze(2) > 1
            sums = torch.where(several, work.of_ranks(given), 0).unbind(1) if multiple else ()
        else:
            made, sums = reduced(rows, idx, weights, rank * LOCAL), ()
            given = work.of_ranks(weighted(work.outputs, work.weights), rounded=True)
        work.check(buffer.combine(made, handle)[0], given, sums)


MODES = {
    "V1 normal": (normal,),
    "V1 low latency": (low_latency, False),
    "V1 low latency with hooks": (low_latency, True),
    "V2": (elastic, False),
    "V2 expanded, sums on each rank": (elastic, True),
    "V2 expanded, one sum": (elastic, True, False),
    "V2.5 expanded": (elastic, True, True, EPBuffer),
}


# Sums do not depend on how dispatch sent rows.
@pytest.mark.parametrize(("precision", "ranks_per_node"), (("BF16", 0), ("FP8", 0), ("FP8", 2)), ids=("BF16", "FP8", "FP8 on two nodes"))
@pytest.mark.parametrize("mode", MODES)
def test_exactness(ranks, mode, precision, ranks_per_node):
    function, *options = MODES[mode]
    ranks(RANKS).run(function, precision == "FP8", ranks_per_node, *options)
