"""The interface of V2.5: ``EPBuffer``, over the same calls as ``ElasticBuffer``."""

from __future__ import annotations

import math
from typing import Any, Callable, List, Optional, Sequence, Union

import torch

from .. import comm
from ..arguments import RowsLike, biases, integer
from ..errors import InvalidArgument, WrongUse
from ..exchanges import device_of
from ..peers import event_in
from ..utils import envs
from ..utils.event import EventOverlap
from ..utils.math import align
from .allocator import BufferAllocator, plan_of
from .base import BufferBase, Context
from .elastic import _DEFAULT_TIMEOUT_S, AnyEvent, Bias, ElasticBuffer, EPHandle

__all__ = ["EPBuffer", "EPHandle"]

Tensors = Union[torch.Tensor, Sequence[torch.Tensor]]

# GB/s of an SM that loads gradients from a peer, so that 16 of them are at the speed of an H100's links.
_LB_SM_GBS = 27


class EPBuffer(ElasticBuffer, BufferBase):
    """``ElasticBuffer`` as V2.5 names and orders its arguments, with results that may be placed later (``defer_epilogue``).

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
        num_gpu_timeout_secs: int = _DEFAULT_TIMEOUT_S,
        explicitly_destroy: bool = False,
    ) -> None:
        """Collective, see ``ElasticBuffer``. ``lb_allocation_plan_or_num_bytes``: memory for replicas of experts, beside
        ``num_bytes`` and equal on all ranks: a plan, whose tensors become views of that memory, or its size (then
        ``runtime.lb_storage`` is a tensor over it). It lives as long as the buffer or a view of it."""
        options = {name: value for name, value in locals().items() if name not in ("self", "lb_allocation_plan_or_num_bytes")}
        plan = plan_of("lb_allocation_plan_or_num_bytes", lb_allocation_plan_or_num_bytes)
        self.num_lb_bytes: int = plan.num_bytes
        if device_of(group).type == "cuda":
            self._shared_stream = comm.get_comm_stream()
        ElasticBuffer.__init__(self, **options)
        self.context: Optional[Context] = Context(self.get_physical_domain_size(), self.num_bytes)
        self._lb_sms = max(2, align(math.ceil(envs.get_nvlink_gbs() / _LB_SM_GBS), 2))
        # Before any other memory of the heap, so at one offset on all ranks.
        self._native.lb_storage = self._native.allocate_lb_storage(self.num_lb_bytes)
        plan.materialize(self._native.lb_storage)

    def destroy(self) -> None:
        """As ``ElasticBuffer.destroy``."""
        try:
            super().destroy()
        finally:
            if self.runtime is None:
                self.context = self._native.lb_storage = None

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
        """As of ``ElasticBuffer``, with other defaults."""
        rates = rdma_gbs, nvlink_gbs, sm_read_gbs, sm_write_gbs
        return super().get_theoretical_num_sms(num_experts, num_topk, num_scaleout_topk, *rates)

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
        defer_epilogue: bool = False,
    ) -> Any:
        """As ``ElasticBuffer.dispatch``; the handle keeps ``topk_idx`` itself, so ``do_handle_copy`` must be false.
        An odd ``num_sms`` counts as the next even one.

        ``defer_epilogue``: returns the event alone, and the host does not wait. Its ``wait()`` returns the results but for the
        event, for the stream that is current then; with ``do_cpu_sync`` the host waits there, and results get their exact
        sizes. Until then the rows take as much memory as without ``do_cpu_sync``. Several such calls of a buffer may wait
        together, and their results come in any order of ``wait()``."""
        _check_deferred(defer_epilogue, async_with_compute_stream)
        if do_handle_copy:
            raise WrongUse("do_handle_copy is True, allowed: False, as the handle keeps topk_idx itself: give a copy instead")
        exact = bool(defer_epilogue) and handle is None and (do_cpu_sync is None or bool(do_cpu_sync))
        *result, event = ElasticBuffer.dispatch(
            self, x, topk_idx, topk_weights, cumulative_local_expert_recv_stats, num_experts, num_max_tokens_per_rank,
            expert_alignment, _even(num_sms), num_qps, previous_event, None, async_with_compute_stream,
            allocate_on_comm_stream, handle, False, False if exact else do_cpu_sync, do_expand, do_zero_padding, use_tma_aligned_col_major_sf,
        )  # fmt: skip
        if handle is None:
            result[3]._watched = True
        if not defer_epilogue:
            return (*result, event)
        sizes = self._sizes(result[3]) if exact else None

        def place() -> Any:
            rows, local, weights, made = result
            used_here(*(rows if isinstance(rows, tuple) else (rows,)), local, weights, *made._tensors())
            if sizes is not None:
                *counts, received = sizes()
                made._cut(counts, received)
                length = made.num_expanded_tokens if do_expand else received
                rows, local, weights = (_cut(each, length, bool(use_tma_aligned_col_major_sf)) for each in (rows, local, weights))
            return rows, local, weights, made

        event.register_hook_after_wait(place)
        return event

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
        defer_epilogue: bool = False,
    ) -> Any:
        """As ``ElasticBuffer.combine``.

        ``defer_epilogue``: returns the event alone; its ``wait()`` returns the results but for the event, for the stream that is
        current then. ``bias`` is read there; with a ``bias`` the sum comes behind the calls of this buffer so far.
        Several such calls wait as those of ``dispatch`` do, in any order."""
        _check_deferred(defer_epilogue, async_with_compute_stream)
        kept = handle.topk_idx if isinstance(handle, EPHandle) else None, bias
        later = bool(defer_epilogue) and biases(bias)[0] is not None
        made, event = self._call_combine(
            later, x, handle, topk_weights, bias, _even(num_sms),
            num_qps, previous_event, None, async_with_compute_stream, allocate_on_comm_stream,
        )  # fmt: skip
        if not defer_epilogue:
            return (*made, event)

        def add_up(read_here: Any = kept) -> Any:
            if later:
                return made[0]()[:2]
            used_here(*made)
            return tuple(made)

        event.register_hook_after_wait(add_up)
        return event

    def lb_get_theoretical_num_sms(self) -> int:
        """How many SMs keep a GPU's NVLinks busy in the two calls below; even."""
        return self._lb_sms

    def lb_prefetch_weights(
        self,
        redundant_expert_weights: Tensors,
        expert_weights: Tensors,
        redundancy_mapping: torch.Tensor,
        num_sms: int = 0,
        previous_event: AnyEvent = None,
    ) -> EventOverlap:
        """Collective in each NVLink domain: copies weights of experts over NVLink into the slots of their replicas.

        Args:
            redundant_expert_weights: a tensor, or a list of 1 to 16: ``[C, ...]`` contiguous, C slots of this rank, in the
                memory of ``lb_allocation_plan_or_num_bytes`` at the same offset on all ranks of the domain.
            expert_weights: as many: ``[L, ...]`` contiguous, of the L experts that this rank owns. In bytes an expert is as
                large as a slot, a multiple of 16.
            redundancy_mapping: ``[D, C]`` int32 contiguous, the same on the D ranks of the domain: the expert of each rank's
                slots, those of the domain's rank d being ``d * L`` to ``d * L + L - 1``, or -1. Read on the device: it must
                not change before the event.
            num_sms: at most so many, an odd number counts as the next even one; 0: ``lb_get_theoretical_num_sms``.
            previous_event: the call comes behind it instead of behind the current stream's work.

        Returns:
            An event behind the call on the communication stream: all ranks' slots are written, and no weights are read any
            more. No slot is written before its rank reaches the call on the device.
        """
        slots = _experts("redundant_expert_weights", redundant_expert_weights)
        own = _experts("expert_weights", expert_weights)
        return self._load_balance(self._native.prefetch_weights, slots, own, redundancy_mapping, num_sms, previous_event)

    def lb_reduce_grads(
        self,
        redundant_expert_grads: torch.Tensor,
        expert_grads: torch.Tensor,
        redundancy_mapping: torch.Tensor,
        num_sms: int = 0,
        previous_event: AnyEvent = None,
    ) -> EventOverlap:
        """Collective in each NVLink domain: adds the gradients of replicas, ``[C, n]`` float32, to those of their experts,
        ``[L, n]`` float32, by ascending rank and slot. The replicas' gradients lie in slots as of ``lb_prefetch_weights``;
        the call only reads them. Behind the event all ranks' sums are made, and no rank reads a slot any more. All else is
        as for ``lb_prefetch_weights``."""
        call = self._native.reduce_grads
        return self._load_balance(call, redundant_expert_grads, expert_grads, redundancy_mapping, num_sms, previous_event)

    def _load_balance(self, call, slots, own, mapping, num_sms, previous_event):
        sms = _even(num_sms) or self.lb_get_theoretical_num_sms()
        return self._event(call(slots, own, mapping, sms, event_in(previous_event), True), mapping, slots, own)

    def _sizes(self, handle: EPHandle) -> Callable[[], List[int]]:
        """Makes the host read rows of each local expert, and of all, when the function is called: behind the dispatch alone,
        not behind what the program enqueues after it."""
        counts, ends = handle.num_unaligned_recv_tokens_per_expert, handle.psum_num_recv_tokens_per_scaleup_rank
        if self._comm_stream is None:
            return torch.cat([counts, ends[-1:]]).tolist
        with torch.cuda.stream(self._comm_stream):
            host = torch.cat([counts, ends[-1:]]).to("cpu", non_blocking=True)  # pinned
            copied = torch.cuda.Event()
            copied.record()

        def read() -> List[int]:
            copied.synchronize()
            if self.runtime is not None:
                self.runtime.check(False)  # a rank that did not come leaves no sizes
            return host.tolist()

        return read


def _check_deferred(defer_epilogue: bool, asynchronous: bool) -> None:
    if defer_epilogue and not asynchronous:
        raise InvalidArgument("defer_epilogue is True, allowed: only with async_with_compute_stream")


def used_here(*tensors: Optional[torch.Tensor]) -> None:
    """Their memory is not given to other work before the current stream has used them. That stream may be another one than
    that of the call which made them."""
    for each in tensors:
        if each is not None and each.is_cuda:
            each.record_stream(torch.cuda.current_stream(each.device))


def _cut(given: Any, rows: int, column_major: bool) -> Any:
    """The first rows of a tensor, or of rows and their scales, in memory of their own."""
    if not isinstance(given, tuple):
        return None if given is None else given[:rows].clone()
    values, scales = given[0][:rows].clone(), given[1][:rows]
    strides = (1, align(rows, 4)) if column_major else (scales.size(1), 1)
    return values, torch.empty_strided(scales.shape, strides, dtype=scales.dtype, device=scales.device).copy_(scales)


def _experts(name: str, tensors: Tensors) -> List[Any]:
    """The bytes of each tensor, a row for each expert or slot: views, as a copy would not come behind ``previous_event``. The
    library refuses what is no tensor."""
    given = list(tensors) if isinstance(tensors, (tuple, list)) else [tensors]
    for number, each in enumerate(given):
        if isinstance(each, torch.Tensor):
            if each.dim() == 0 or not each.is_contiguous():
                raise InvalidArgument(
                    f"{name}[{number}] is {each.dtype} of shape {tuple(each.shape)} and strides {tuple(each.stride())}, allowed: "
                    "contiguous, a row for each expert or slot"
                )
            given[number] = each.detach().unsqueeze(-1).flatten(1).view(torch.uint8)
    return given


def _even(num_sms: int) -> int:
    return align(integer("num_sms", num_sms, 0), 2)
