"""The interface of V2.5 on CPU ranks: what it adds to V2's. test_elastic_random.py compares its results with plain PyTorch."""

import inspect

import pytest
import torch
from cluster import on_ranks
from common import signature_of
from elastic_cases import H, M
from reference import make_case
from test_errors import Alone, refused

import deep_ep
from deep_ep import BufferAllocator, BufferBase, EPBuffer, EPHandle, comm


def make_buffer(group, **options):
    return EPBuffer(group, **{"num_max_tokens_per_rank": M, "hidden": H, "num_topk": 4, **options})


CALL = "num_sms=0, num_qps=0, previous_event=None, async_with_compute_stream=False, allocate_on_comm_stream=False"
SIGNATURES = {
    comm.barrier: "buffer, wait_comm_stream=True, with_cpu_sync=False, sequential=True, context_idx=None, use_comm_stream=None",
    EPBuffer.__init__: "self, group, num_bytes=None, num_max_tokens_per_rank=0, hidden=0, num_topk=0, "
    "use_fp8_dispatch=False, lb_allocation_plan_or_num_bytes=0, deterministic=False, allow_hybrid_mode=True, "
    "allow_multiple_reduction=True, prefer_overlap_with_compute=True, sl_idx=None, num_allocated_qps=0, "
    "num_cpu_timeout_secs=300, num_gpu_timeout_secs=100, explicitly_destroy=False",
    EPBuffer.get_buffer_size_hint: "group, num_max_tokens_per_rank, hidden, num_topk=0, use_fp8_dispatch=False, "
    "allow_hybrid_mode=True, allow_multiple_reduction=True",
    EPBuffer.get_theoretical_num_sms: "self, num_experts, num_topk, num_scaleout_topk=0, rdma_gbs=0, nvlink_gbs=0, "
    "sm_read_gbs=0, sm_write_gbs=0",
    EPBuffer.dispatch: "self, x, topk_idx=None, topk_weights=None, cumulative_local_expert_recv_stats=None, "
    "num_experts=None, num_max_tokens_per_rank=None, expert_alignment=None, " + CALL + ", handle=None, "
    "do_handle_copy=False, do_cpu_sync=None, do_expand=False, do_zero_padding=False, use_tma_aligned_col_major_sf=False, "
    "defer_epilogue=False",
    EPBuffer.combine: "self, x, handle, topk_weights=None, bias=None, " + CALL + ", defer_epilogue=False",
    EPBuffer.lb_get_theoretical_num_sms: "self",
    EPBuffer.lb_prefetch_weights: "self, redundant_expert_weights, expert_weights, redundancy_mapping, num_sms=0, "
    "previous_event=None",
    EPBuffer.lb_reduce_grads: "self, redundant_expert_grads, expert_grads, redundancy_mapping, num_sms=0, previous_event=None",
    deep_ep.BucketBuffer.__init__: "self, group, allocation_plan_or_num_bytes, sl_idx=None, num_gpu_timeout_secs=100, "
    "explicitly_destroy=False",
    deep_ep.EngramBuffer.__init__: "self, group, num_gpu_bytes, num_rdma_storage_bytes, use_cpu_rdma_storage, "
    "num_allocated_qps, qp_depth, restrict_rd_atomic=False, allow_hybrid_mode=True, sl_idx=None, "
    "num_gpu_timeout_secs=100, explicitly_destroy=False",
    deep_ep.PPBuffer.__init__: "self, group, num_max_tensor_bytes, num_max_inflight_tensors, sl_idx=None, "
    "num_gpu_timeout_secs=100, explicitly_destroy=False",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_signature(function):
    assert signature_of(function) == SIGNATURES[function]


def test_names_of_all_generations():
    for name in ("Buffer", "ElasticBuffer", "EPBuffer", "BucketSession", "destroy_all_managed_nccl_comm"):
        assert name in deep_ep.__all__ and hasattr(deep_ep, name)
    assert deep_ep.buffers.ep.EPHandle is deep_ep.buffers.elastic.EPHandle is EPHandle
    kinds = (EPBuffer, deep_ep.BucketBuffer, deep_ep.EngramBuffer, deep_ep.PPBuffer)
    assert all(issubclass(kind, BufferBase) for kind in kinds) and inspect.isabstract(BufferBase)
    assert EPBuffer.barrier is deep_ep.ElasticBuffer.barrier is comm.barrier and callable(comm.get_comm_stream)
    alignments = (deep_ep.get_num_allocation_alignment(), deep_ep.get_num_tma_alignment(), deep_ep.get_num_rdma_alignment())
    assert alignments == (2 << 20, 32, 64)
    assert comm.destroy_all_managed_nccl_comm() is None
    for call in (
        lambda: deep_ep.EngramBuffer(Alone, 1, 1, False, 1, 1),
        lambda: deep_ep.EngramBuffer.get_storage_size_hint(Alone, 1, 1, 1, 1),
        lambda: deep_ep.PPBuffer(Alone, 1, 1),
        lambda: deep_ep.BucketSession(None),
        lambda: comm.get_nccl_comm_handle(Alone),
        lambda: comm.NCCLCommHandle(3, True),
    ):
        refused((NotImplementedError, "this library moves tokens to experts", call))


def test_attributes_and_end(capsys):
    buffer = EPBuffer(Alone, 2 << 20, explicitly_destroy=True)
    assert (buffer.num_bytes, buffer.num_lb_bytes, buffer.num_allocated_qps) == (2 << 20, 0, 129)
    assert isinstance(buffer, BufferBase) and buffer.main_context is buffer.context
    for answers in (buffer, buffer.context, comm):
        given = (buffer,) if answers is comm else ()
        assert answers.get_physical_domain_size(*given) == answers.get_logical_domain_size(*given) == (1, 1)
    assert buffer.context.num_gpu_buffer_bytes == 2 << 20 and buffer.context.num_rdma_storage_bytes == 0
    sms = buffer.get_theoretical_num_sms(num_experts=256, num_topk=8)
    assert sms % 2 == 0 and sms == buffer.get_theoretical_num_sms(256, 8, 0, 0, 0, 180, 45)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffer, "_count_sms", lambda *given: given)
        assert buffer.get_theoretical_num_sms(256, 8) == (256, 8, 0, 0, 180, 45)
    assert buffer.get_theoretical_num_qps(4) == 65
    buffer.print_memory_usage()
    assert "EPBuffer: 2 MiB" in capsys.readouterr().out
    buffer.barrier()
    buffer.barrier(use_comm_stream=False)
    buffer.barrier(False, True, context_idx=0)
    with pytest.raises(ValueError, match="context_idx is 1"):
        buffer.barrier(context_idx=1)
    buffer.destroy()
    buffer.destroy()
    assert buffer.runtime is buffer.context is buffer.main_context is buffer.nccl_comm_handle is None
    # A destroy that raises has freed the memory all the same.
    group = type("Gone", (Alone,), {})
    failed = EPBuffer(group, 2 << 20, lb_allocation_plan_or_num_bytes=2 << 20, explicitly_destroy=True)
    native = failed.runtime
    group.allgather = None
    with pytest.raises(TypeError):
        failed.destroy()
    assert failed.runtime is failed.context is native.lb_storage is None
    failed.destroy()
    with pytest.raises(RuntimeError, match="used after destroy"):
        buffer.print_memory_usage()
    with pytest.raises(AssertionError):
        EPBuffer(Alone, 2 << 20).destroy()


@on_ranks(2)
def test_bucket(group):
    plan = BufferAllocator()
    first = plan.allocate((3, 5), torch.float32)
    buffer = deep_ep.BucketBuffer(group=[group, group], allocation_plan_or_num_bytes=plan, explicitly_destroy=True)
    assert not first.is_meta and first.data_ptr() == buffer.storage.data_ptr()
    assert comm.get_physical_domain_size(group) == comm.get_logical_domain_size(group, 0) == (1, 2)
    assert len(buffer.contexts) == 2 and buffer.storage.numel() == plan.num_bytes and buffer.get_context_idx(group) == 0
    for name in ("session", "barrier", "all_gather", "all_reduce", "reduce_scatter", "get_theoretical_num_sms"):
        given = () if name in ("session", "barrier") else (first,)
        refused((NotImplementedError, f"^{name}: ", lambda: getattr(buffer, name)(*given)))
    buffer.destroy()
    buffer.destroy()
    assert buffer.contexts is buffer.storage is buffer.main_context is None
    first.fill_(2)
    refused(
        (AssertionError, "explicitly_destroy", deep_ep.BucketBuffer(group, plan.num_bytes).destroy),
        (ValueError, "group is a list of 0", lambda: deep_ep.BucketBuffer([], 2 << 20)),
    )


@on_ranks(2)
def test_selections_that_change(group):
    buffer = make_buffer(group)
    rank = buffer.rank_idx
    case = make_case([6] * buffer.num_ranks, hidden=H, num_topk=4)
    x, idx = case.x[rank], case.topk_idx[rank].clone()
    rows, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=case.num_experts, num_sms=3)
    assert handle.topk_idx is idx and handle.num_sms == 4 and handle.cached_recv_src_metadata_before_sort is None
    other = idx.clone()
    idx.view(-1)[:1].add_(0)  # writes of views count, too
    for call in (lambda: handle.topk_idx, lambda: buffer.dispatch(x, handle=handle), lambda: buffer.combine(rows, handle)):
        refused((AssertionError, "handle.topk_idx was written to", call))
    handle.topk_idx = other  # as NeMo Automodel does
    assert handle.topk_idx is other
    buffer.dispatch(x, handle=handle)
    other.add_(0)
    with pytest.raises(AssertionError, match="handle.topk_idx was written to"):
        buffer.combine(rows, handle)
    with torch.inference_mode():
        unwatched = case.topk_idx[rank].clone()
        kept = buffer.dispatch(x, unwatched, num_experts=case.num_experts)[3]
        unwatched.add_(0)
        assert kept.topk_idx is unwatched


def test_wrong_use():
    buffer = make_buffer(Alone)
    x, idx = torch.zeros(3, H), torch.zeros(3, 4, dtype=torch.int64)
    make = lambda given: lambda: EPBuffer(Alone, 2 << 20, lb_allocation_plan_or_num_bytes=given)  # noqa: E731
    refused(
        (AssertionError, "do_handle_copy is True", lambda: buffer.dispatch(x, idx, num_experts=4, do_handle_copy=1)),
        (TypeError, "previous_event_before_epilogue", lambda: buffer.dispatch(x, idx, previous_event_before_epilogue=None)),
        (RuntimeError, "previous_event needs", lambda: buffer.dispatch(x, idx, num_experts=4, previous_event=buffer.capture())),
        (AssertionError, "is of type bool", make(True)),
        (AssertionError, "is of type float", make(2e6)),
        (RuntimeError, "is 5, allowed: multiples of 2 MiB", make(5)),
        (RuntimeError, "num_bytes is None", lambda: EPBuffer(Alone)),
    )
