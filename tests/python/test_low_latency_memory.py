"""The memory of low-latency calls as others may use it."""

import low_latency_reference as reference
import pytest
import torch
from cluster import on_ranks
from common import ranks_a_node
from low_latency_calls import M, combine, dispatch, ll_case, make_buffer, outputs_of
from test_errors import refused

from deep_ep.errors import UseAfterDestroy


@on_ranks(3)
def test_zero_copy(group):
    """Each handle has a combine buffer of its own, which ``get_next_low_latency_combine_buffer`` returns again."""
    buffer = make_buffer(group, explicitly_destroy=True)
    rank = buffer.rank
    case = ll_case([M, 3, 5][: buffer.group_size])
    outputs = outputs_of(case)
    small = dispatch(buffer, case)[2]
    wanted = combine(buffer, case, outputs[rank], small)[0]
    rows = buffer.get_next_low_latency_combine_buffer(small)
    assert rows.shape == outputs[rank].shape and rows.dtype == torch.bfloat16
    rows[:, :, :] = outputs[rank]
    larger = (*dispatch(buffer, case)[2][:3], 2 * small[3], small[4])
    other = buffer.get_next_low_latency_combine_buffer(larger)
    assert other.data_ptr() != rows.data_ptr() and other.numel() == 2 * rows.numel()
    other.fill_(1e30)
    assert torch.equal(combine(buffer, case, rows, small, zero_copy=True)[0], wanted), "the tensor that came"
    look_alike = torch.full_like(rows, 1e30)
    assert torch.equal(combine(buffer, case, look_alike, small, zero_copy=True)[0], wanted), "the handle's tensor"
    assert buffer.get_next_low_latency_combine_buffer(small) is rows
    refused(
        (ValueError, "zero_copy", lambda: combine(buffer, case, outputs[rank], small, zero_copy=True, use_logfmt=True)),
        (ValueError, "^x .* must look like", lambda: combine(buffer, case, outputs[rank][:, 1:], small, zero_copy=True)),
    )
    buffer.destroy()
    refused((UseAfterDestroy, "after destroy", lambda: buffer.get_next_low_latency_combine_buffer(small)))


@pytest.mark.parametrize("ranks_per_node, shrink", [(0, False), (2, True)])
@on_ranks(4)
def test_memory_with_anything(group, ranks_per_node, shrink):
    """LightLLM keeps values of its own there, from one cleaning to the next."""
    with ranks_a_node(ranks_per_node):
        buffer = make_buffer(group, experts=16, enable_shrink=shrink)
    rank = buffer.rank
    case = ll_case([M] * buffer.group_size)
    outputs = outputs_of(case)
    memory = buffer.get_local_buffer_tensor(torch.int64, use_rdma_buffer=True)
    assert 0.9 * buffer.num_rdma_bytes < 8 * memory.numel() <= buffer.num_rdma_bytes
    for calls in range(1, 4):
        result = dispatch(buffer, case, use_fp8=False)
        reference.check_dispatched(case, rank, M, result)
        reference.close(combine(buffer, case, outputs[rank], result[2])[0], reference.combined(case, rank, outputs))
        buffer.clean_low_latency_buffer(M, 512, case.num_experts)
        memory.fill_(calls + 1)  # the number of the next call: what arrives there carries it
        buffer.clean_low_latency_buffer(M, 512, case.num_experts)
