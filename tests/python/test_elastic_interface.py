"""The second interface's surface: signatures, sizes, attributes, and what wrong use says."""

import inspect

import elastic_reference as reference
import pytest
import torch
from cluster import on_ranks
from common import signature_of
from elastic_cases import H, M, check_rows, make_buffer, send
from reference import make_case
from test_errors import Alone, refused

from deep_ep.buffers.elastic import LEFT_OUT, ElasticBuffer, EPHandle


@on_ranks(2)
def test_wrong_use(group):
    buffer = make_buffer(group)
    single = make_buffer(group, allow_multiple_reduction=False)
    rank, ranks = buffer.rank_idx, buffer.num_ranks
    case = make_case([6] * ranks, hidden=H, num_topk=4)
    x, idx, weights = case.x[rank], case.topk_idx[rank], case.topk_weights[rank]
    flat, wide = send(buffer, case), send(buffer, case, do_expand=True)
    rows, handle = flat[0], flat[3]
    many = torch.zeros(M + 1, 4, dtype=torch.int64)

    def call(x=x, idx=idx, **options):
        return lambda: buffer.dispatch(x, idx, **{"topk_weights": weights, "num_experts": case.num_experts, **options})

    # Checks of the library have tests in C++ (buffer/elastic).
    refused(
        (ValueError, "topk_idx is None", call(idx=None)),
        (TypeError, "topk_idx is of type list", call(idx=[[1]])),
        (ValueError, "number of tokens is 25, allowed: 0 to 24", lambda: buffer.dispatch(torch.zeros(M + 1, H), many, num_experts=4)),
        (ValueError, "num_experts is None", call(num_experts=None)),
        (TypeError, "num_experts is 8.0", call(num_experts=8.0)),
        (ValueError, "do_zero_padding", call(do_zero_padding=True)),
        (ValueError, "recv_stats is given", lambda: buffer.dispatch(
            x, handle=handle, cumulative_local_expert_recv_stats=torch.zeros(4, dtype=torch.int32))),
        (AssertionError, "num_qps", call(num_qps=10**6)),
        (AssertionError, "do_cpu_sync", lambda: buffer.dispatch(x, handle=handle, do_cpu_sync=True)),
        (AssertionError, "topk_idx", lambda: buffer.dispatch(x, idx, handle=handle)),
        (AssertionError, "expert_alignment is 2", lambda: buffer.dispatch(x, handle=handle, expert_alignment=2)),
        (AssertionError, "num_experts is 4", lambda: buffer.dispatch(x, handle=handle, num_experts=4)),
        (ValueError, "do_expand", lambda: buffer.dispatch(x, handle=handle, do_expand=True)),
        (TypeError, "handle is of type tuple", lambda: buffer.dispatch(x, handle=())),
        (TypeError, "x_scales", call(x=(x, 1.0))),
        (ValueError, "^x lies on a device", call(x=x.to("meta"))),
        (TypeError, "handle is of type NoneType", lambda: buffer.combine(rows, None)),
        (ValueError, "topk_weights is given, .* in Python with allow_multiple_reduction", lambda: single.combine(wide[0], wide[3], wide[2])),
        (TypeError, "bias is of type int", lambda: buffer.combine(rows, handle, bias=1)),
    )  # fmt: skip
    check_rows(reference.expected(case, rank, M, 1), send(buffer, case), False)


CALL = "num_sms=0, num_qps=0, previous_event=None, previous_event_before_epilogue=None, async_with_compute_stream=False, " \
       "allocate_on_comm_stream=False"  # fmt: skip
SIGNATURES = {
    "__init__": "self, group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, hidden=0, num_topk=0, "
    "use_fp8_dispatch=False, deterministic=False, allow_hybrid_mode=True, allow_multiple_reduction=True, "
    "prefer_overlap_with_compute=True, sl_idx=3, num_allocated_qps=0, num_cpu_timeout_secs=300, "
    "num_gpu_timeout_secs=100, explicitly_destroy=False",
    "get_buffer_size_hint": "group, num_max_tokens_per_rank, hidden, num_topk=0, use_fp8_dispatch=False, "
    "allow_hybrid_mode=True, allow_multiple_reduction=True",
    "capture": "",
    "get_comm_stream": "self",
    "destroy": "self",
    "get_physical_domain_size": "self",
    "get_logical_domain_size": "self",
    "get_theoretical_num_sms": "self, num_experts, num_topk, num_scaleout_topk=0, rdma_gbs=0, nvlink_gbs=0, "
    "sm_read_gbs=200, sm_write_gbs=50",
    "get_theoretical_num_qps": "self, num_sms",
    "dispatch": "self, x, topk_idx=None, topk_weights=None, cumulative_local_expert_recv_stats=None, num_experts=None, "
    "num_max_tokens_per_rank=None, expert_alignment=None, " + CALL + ", handle=None, do_handle_copy=True, "
    "do_cpu_sync=None, do_expand=False, do_zero_padding=False, use_tma_aligned_col_major_sf=False",
    "combine": "self, x, handle, topk_weights=None, bias=None, " + CALL,
}


def test_calls_that_are_left_out():
    buffer = ElasticBuffer(Alone, 2 << 20)
    for name in LEFT_OUT:
        for owner in (ElasticBuffer, buffer):
            with pytest.raises(NotImplementedError, match=f"^{name}: this library moves tokens to experts"):
                getattr(owner, name)(1, more=2)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    assert signature_of(getattr(ElasticBuffer, name)) == SIGNATURES[name]


def test_handle_signature():
    assert ", ".join(list(inspect.signature(EPHandle.__init__).parameters)[1:]) == (
        "do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms, topk_idx, num_recv_tokens, "
        "num_expanded_tokens, num_recv_tokens_per_expert_list, psum_num_recv_tokens_per_scaleup_rank, "
        "psum_num_recv_tokens_per_expert, num_unaligned_recv_tokens_per_expert, recv_src_metadata, dst_buffer_slot_idx, "
        "token_metadata_at_forward, channel_linked_list"
    )


def test_sizes_and_attributes():
    hint = ElasticBuffer.get_buffer_size_hint
    base = dict(num_max_tokens_per_rank=128, hidden=1024, num_topk=8)
    size = hint(Alone, **base)
    assert size % (2 << 20) == 0 and size > 0
    for name in base:
        assert hint(Alone, **{**base, name: 2 * base[name]}) >= size
    buffer = ElasticBuffer(Alone, **base, explicitly_destroy=True)
    assert buffer.num_bytes == size and buffer.group is Alone and buffer.num_max_tokens_per_rank == 128
    assert (buffer.num_ranks, buffer.rank_idx, buffer.scaleup_rank_idx, buffer.scaleout_rank_idx) == (1, 0, 0, 0)
    assert buffer.get_logical_domain_size() == buffer.get_physical_domain_size() == (1, 1)
    assert buffer.num_allocated_qps == 129 and ElasticBuffer(Alone, 2 << 20, allow_hybrid_mode=0).num_allocated_qps == 17
    sms = buffer.get_theoretical_num_sms(num_experts=256, num_topk=8)
    assert sms % 2 == 0 and sms >= 4
    assert buffer.get_theoretical_num_qps(4) == 65 and buffer.get_theoretical_num_qps(100) == 129
    assert buffer.get_theoretical_num_sms(256, 8, 0, rdma_gbs=50, nvlink_gbs=400, sm_read_gbs=100, sm_write_gbs=25) % 2 == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffer, "_count_sms", lambda *given: given)
        assert buffer.get_theoretical_num_sms(256, 8) == (256, 8, 0, 0, 200, 50)
    with pytest.raises(AssertionError, match="num_scaleout_topk is 2"):
        buffer.get_theoretical_num_sms(256, 8, num_scaleout_topk=2)
    assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks, buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == (1,) * 4
    settings = ("deterministic", "allow_hybrid_mode", "allow_multiple_reduction", "prefer_overlap_with_compute")
    for given in (0, 1):
        other = ElasticBuffer(Alone, 4 << 20, 2 << 20, **{name: given for name in settings})
        assert [getattr(other, name) for name in settings] == [bool(given)] * 4
        assert other.num_cpu_bytes == 2 << 20 and not other.explicitly_destroy
    with pytest.raises(RuntimeError, match="get_comm_stream: the buffer is on the CPU"):
        other.get_comm_stream()
    assert buffer.explicitly_destroy and buffer.runtime is not None
    buffer.destroy()
    assert buffer.runtime is None
    buffer.destroy()
    with pytest.raises(AssertionError):
        ElasticBuffer(Alone, 2 << 20).destroy()
    for call in (buffer.barrier, buffer.get_comm_stream):
        with pytest.raises(RuntimeError, match="after destroy"):
            call()
    refused(
        (ValueError, "num_bytes is None", lambda: ElasticBuffer(Alone)),
        (ValueError, "num_bytes is 100", lambda: ElasticBuffer(Alone, 100)),
        (TypeError, "num_bytes is 2097152.0", lambda: ElasticBuffer(Alone, 2097152.0)),
        (ValueError, "num_cpu_bytes is 4194304", lambda: ElasticBuffer(Alone, 2 << 20, 4 << 20)),
        (TypeError, "hidden is 7168.0", lambda: ElasticBuffer(Alone, num_max_tokens_per_rank=8, hidden=7168.0)),
        (ValueError, "num_topk is 64", lambda: hint(Alone, 128, 1024, 64)),
    )
