"""The interface of V2.5: ``EPBuffer``, over the same calls as ``ElasticBuffer``."""

from __future__ import annotations

from typing import Any, Optional, Union

import torch

from .. import comm
from ..arguments import RowsLike, integer
from ..errors import WrongUse
from ..peers import device_index
from ..utils import envs
from .allocator import BufferAllocator, check_bytes
from .base import BufferBase, Context
from .elastic import _DEFAULT_GPU_TIMEOUT, ElasticBuffer
from .given import AnyEvent, Bias, align
from .handle import EPHandle

__all__ = ["EPBuffer", "EPHandle"]


class EPBuffer(ElasticBuffer, BufferBase):
    """``ElasticBuffer`` as V2.5 names and orders its arguments, with results that may be placed later (``defer_epilogue``) and
    with memory for replicas of experts.

    A handle keeps ``topk_idx`` itself, which must not change while the handle is in use. All objects share one communication
    stream.
    """

    def __init__(
        self,
        group: Any,
        num_bytes: Optional[int] = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        lb_allocation_plan_or_num_bytes: Union[BufferAllocator, int] = 0,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: Optional[int] = None,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = _DEFAULT_GPU_TIMEOUT,
        explicitly_destroy: bool = False,
    ) -> None:
        """Collective, see ``ElasticBuffer``. ``lb_allocation_plan_or_num_bytes``: memory for replicas, beside ``num_bytes``: a
        ``BufferAllocator``, whose tensors become views of it, or a multiple of 2 MiB."""
        plan = lb_allocation_plan_or_num_bytes
        if isinstance(plan, BufferAllocator):
            plan._check_open()
        given = plan.num_bytes if isinstance(plan, BufferAllocator) else plan
        self.num_lb_bytes: int = check_bytes("lb_allocation_plan_or_num_bytes", given)
        if self.num_lb_bytes:
            raise NotImplementedError("lb_allocation_plan_or_num_bytes: this version has no memory for replicas of experts")
        if device_index(group) >= 0:
            self._shared_stream = comm.get_comm_stream()
        ElasticBuffer.__init__(
            self,
            group,
            num_bytes,
            0,
            num_max_tokens_per_rank,
            hidden,
            num_topk,
            use_fp8_dispatch,
            deterministic,
            allow_hybrid_mode,
            allow_multiple_reduction,
            prefer_overlap_with_compute,
            0 if sl_idx is None else sl_idx,
            num_allocated_qps,
            num_cpu_timeout_secs,
            num_gpu_timeout_secs,
            explicitly_destroy,
        )
        self.context: Optional[Context] = Context(self.get_physical_domain_size(), self.num_bytes)

    def destroy(self) -> None:
        """As ``ElasticBuffer.destroy``. Memory of replicas lives on while tensors of it do."""
        super().destroy()
        self.context = None

    barrier = comm.barrier  # type: ignore[assignment]

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 0,
        sm_write_gbs: float = 0,
    ) -> int:
        """As of ``ElasticBuffer``; a rate of 0 stands for the default."""
        read, write = sm_read_gbs or envs.get_sm_read_gbs(), sm_write_gbs or envs.get_sm_write_gbs()
        return super().get_theoretical_num_sms(num_experts, num_topk, num_scaleout_topk, rdma_gbs, nvlink_gbs, read, write)

    def dispatch(  # type: ignore[override]
        self,
        x: RowsLike,
        topk_idx: Optional[torch.Tensor] = None,
        topk_weights: Optional[torch.Tensor] = None,
        cumulative_local_expert_recv_stats: Optional[torch.Tensor] = None,
        num_experts: Optional[int] = None,
        num_max_tokens_per_rank: Optional[int] = None,
        expert_alignment: Optional[int] = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: AnyEvent = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: Optional[EPHandle] = None,
        do_handle_copy: bool = False,
        do_cpu_sync: Optional[bool] = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> Any:
        """As ``ElasticBuffer.dispatch``; the handle keeps ``topk_idx`` itself, so ``do_handle_copy`` must be false.
        An odd ``num_sms`` counts as the next even one."""
        if do_handle_copy:
            raise WrongUse("do_handle_copy is True, allowed: False, as the handle keeps topk_idx itself: give a copy instead")
        result = ElasticBuffer.dispatch(
            self, x, topk_idx, topk_weights, cumulative_local_expert_recv_stats, num_experts, num_max_tokens_per_rank,
            expert_alignment, _even(num_sms), num_qps, previous_event, None, async_with_compute_stream,
            allocate_on_comm_stream, handle, False, do_cpu_sync, do_expand, do_zero_padding, use_tma_aligned_col_major_sf,
        )  # fmt: skip
        if handle is None:
            result[3]._watch()
        return result

    def combine(  # type: ignore[override]
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: Optional[torch.Tensor] = None,
        bias: Bias = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: AnyEvent = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        """As ``ElasticBuffer.combine``."""
        return ElasticBuffer.combine(
            self, x, handle, topk_weights, bias, _even(num_sms), num_qps, previous_event, None, async_with_compute_stream,
            allocate_on_comm_stream,
        )  # fmt: skip


def _even(num_sms: int) -> int:
    return align(integer("num_sms", num_sms, 0), 2)
