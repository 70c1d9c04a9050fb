"""What the tests of low-latency calls have in common: buffers, cases, calls."""

import low_latency_reference as reference
from reference import make_case

from deep_ep import Buffer

M = 6


def make_buffer(group, hidden=512, max_tokens=M, experts=12, **options):
    size = Buffer.get_low_latency_rdma_size_hint(max_tokens, hidden, group.size(), experts)
    return Buffer(group, 0, size, low_latency_mode=True, num_qps_per_rank=4, **options)


def ll_case(tokens, hidden=512, **options):
    return make_case(tokens, hidden=hidden, **options)


def dispatch(buffer, case, max_tokens=M, **options):
    rank = buffer.rank
    return buffer.low_latency_dispatch(case.x[rank], case.topk_idx[rank], max_tokens, case.num_experts, **options)


def combine(buffer, case, output, handle, **options):
    rank = buffer.rank
    return buffer.low_latency_combine(output, case.topk_idx[rank], case.topk_weights[rank], handle, **options)


def outputs_of(case, max_tokens=M, hidden=512, seed=0):
    return [reference.expert_output(case, rank, max_tokens, hidden, seed) for rank in range(case.num_ranks)]
