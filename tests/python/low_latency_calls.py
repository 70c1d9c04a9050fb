"""What the tests of low-latency calls have in common: buffers, cases, calls."""

import low_latency_reference as reference
import torch
from reference import make_case

from deep_ep import Buffer, EventOverlap

M = 6
FORMS = (
    {"use_fp8": False, "align_fp8_quantization": True},
    {},
    {"align_fp8_quantization": True},
    {"round_scale": True, "align_fp8_quantization": True},
    {"round_scale": True, "use_ue8m0": True},
)


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


def check_round_trip(buffer, case, form, max_tokens=M):
    rank, hidden = buffer.rank, case.x[0].size(1)
    result = dispatch(buffer, case, max_tokens, **form)
    reference.check_dispatched(case, rank, max_tokens, result, **form)
    assert isinstance(result[3], EventOverlap) and result[3].event is None and result[4] is None
    outputs = outputs_of(case, max_tokens, hidden)
    back, event, hook = combine(buffer, case, outputs[rank], result[2])
    reference.close(back, reference.combined(case, rank, outputs))
    assert event.event is None and hook is None
    again, _, _ = combine(buffer, case, outputs[rank], result[2], use_logfmt=True)
    assert torch.equal(back, again), "a second combine, or use_logfmt, gives other bits"
