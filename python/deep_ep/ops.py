"""Dispatch and combine as operators of PyTorch, for ``torch.compile`` and autograd::

    state = ops.state_of(buffer)  # Buffer, ElasticBuffer or EPBuffer
    rows, idx, weights, counts, handle = ops.dispatch(state, x, topk_idx, topk_weights, num_experts)
    combined = ops.combine(state, experts(rows, idx, weights), handle)

The operators that move rows count their calls in the state tensor of the buffer: so a compiler neither drops, joins nor reorders
them. A handle is a tensor on the CPU with an integer key; what the key stands for lives as long as the tensor's memory.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from dataclasses import dataclass
from typing import Any, Callable, List, Optional, Tuple, Union

import torch

from .arguments import type_name
from .buffer import Buffer
from .buffers.elastic import ElasticBuffer
from .errors import InvalidArgument, UseAfterDestroy

__all__ = ["combine", "dispatch", "state_of"]

AnyBuffer = Union[Buffer, ElasticBuffer]

_KEY_BYTES = 8

_numbers = itertools.count(1)
_buffers: "weakref.WeakValueDictionary[int, AnyBuffer]" = weakref.WeakValueDictionary()
_states: "weakref.WeakKeyDictionary[AnyBuffer, torch.Tensor]" = weakref.WeakKeyDictionary()
_sent: "weakref.WeakValueDictionary[int, _Sent]" = weakref.WeakValueDictionary()


def state_of(buffer: AnyBuffer) -> torch.Tensor:
    """The tensor that stands for the buffer: int64 ``[2, R]`` on the CPU, the same one each time. It does not keep the buffer.
    Hold it as an attribute of the layer, outside compiled code, and move it to no other device."""
    if not isinstance(buffer, (Buffer, ElasticBuffer)):
        raise TypeError(f"buffer is of type {type_name(buffer)}, expected a Buffer or an ElasticBuffer")
    if buffer not in _states:
        number = next(_numbers)
        ranks = buffer.group_size if isinstance(buffer, Buffer) else buffer.num_ranks
        state = torch.zeros((2, ranks), dtype=torch.int64, device="cpu")
        state[0] = number
        _buffers[number], _states[buffer] = buffer, state
    return _states[buffer]


def dispatch(
    state: torch.Tensor,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    expert_alignment: int = 1,
    do_expand: bool = False,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``dispatch`` of the buffer, with exact sizes, for which the host waits. Differentiable in ``x`` and ``topk_weights``.

    Args:
        state: see ``state_of``.
        x: ``[T, H]`` contiguous; bfloat16 where gradients are wanted.
        topk_idx, topk_weights: ``[T, K]`` contiguous, int64 or int32, and float32.
        expert_alignment: ``counts`` are rounded up to multiples of it, and with ``do_expand`` experts' rows are filled up.
        do_expand: not of ``Buffer``: a row for each (token, local expert), by expert; rows that fill up are zero.

    Returns:
        Rows ``[N, H]``; indices among this rank's experts ``[N, K]``, -1 for those of others (with ``do_expand``: ``[0, K]``);
        weights ``[N, K]`` (with ``do_expand``: ``[N]``); ``counts`` ``[L]`` int32, rows of each local expert; the handle.
    """
    handle = torch.ops.deep_ep.send(state, x, topk_idx, topk_weights, num_experts, expert_alignment, do_expand)
    return (*torch.ops.deep_ep.receive(state, x, topk_idx, topk_weights, handle, num_experts, do_expand), handle)


def combine(state: torch.Tensor, rows: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    """``combine`` of the buffer: ``[T, H]`` bfloat16, the sums of ``rows``, which lie as dispatch has left them. Differentiable
    in ``rows``, by a dispatch with the same handle."""
    return torch.ops.deep_ep.combine(state, rows, None, handle)


@dataclass(eq=False)
class _Sent:
    """Of a dispatch: the handle of the buffer, its other results until they are received, and weights that came back."""

    handle: Any
    received: List[Optional[torch.Tensor]]
    combined_weights: Optional[torch.Tensor] = None


class _Key(bytearray):
    """Memory of a handle's tensor, which refers to it. It refers to the dispatch."""


def _new_handle(sent: "_Sent", tokens: int, topk: int) -> torch.Tensor:
    """``[T + 8, K]`` bytes: by its shape fake kernels know T and K."""
    number = next(_numbers)
    memory = _Key(number.to_bytes(_KEY_BYTES, "little").ljust((tokens + _KEY_BYTES) * topk, b"\0"))
    _sent[number] = memory.sent = sent
    return torch.frombuffer(memory, dtype=torch.uint8).view(tokens + _KEY_BYTES, topk)


def _sent_by(handle: torch.Tensor) -> "_Sent":
    number = int.from_bytes(bytes(handle.flatten()[:_KEY_BYTES].tolist()), "little")
    sent = _sent.get(number)
    if sent is None:
        raise InvalidArgument(f"handle has the key {number}, allowed: the tensor that dispatch returned, not a copy of it")
    return sent


def _begin(state: torch.Tensor) -> AnyBuffer:
    """The buffer of a call, which is counted."""
    number = int(state[0, 0])
    buffer = _buffers.get(number)
    if buffer is None:
        raise UseAfterDestroy(f"state stands for buffer {number}, which is gone")
    state[1] += 1
    return buffer


class _Receive(torch.autograd.Function):
    """All results of a dispatch. An operator each, as a part of a compiled program that is recorded into a CUDA graph takes no tuple."""

    @staticmethod
    def forward(ctx, state, x, topk_idx, topk_weights, handle, num_experts, do_expand):
        ctx.state, ctx.handle = state, handle
        of = torch.ops.deep_ep
        with torch._C._AutoDispatchBelowAutograd():
            rows = of.receive_rows(state, x, handle)
            idx = of.receive_idx(rows, topk_idx, handle, do_expand)
            weights = of.receive_weights(rows, topk_weights, handle, do_expand)
            counts = of.receive_counts(state, x, handle, num_experts)
        ctx.mark_non_differentiable(idx, counts)
        return rows, idx, weights, counts

    @staticmethod
    def backward(ctx, grad_rows, _idx, grad_weights, _counts):
        grad_weights = grad_weights.contiguous()
        grad_x = torch.ops.deep_ep.combine(ctx.state, grad_rows.contiguous(), grad_weights, ctx.handle)
        return None, grad_x, None, torch.ops.deep_ep.combined_weights(grad_x, grad_weights, ctx.handle), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, state, rows, weights, handle):
        ctx.state, ctx.handle, ctx.num_rows = state, handle, rows.size(0)
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.deep_ep.combine(state, rows, weights, handle)

    @staticmethod
    def backward(ctx, grad):
        return None, torch.ops.deep_ep.combine_backward(ctx.state, grad.contiguous(), ctx.handle, ctx.num_rows), None, None


# A fragment: other parts of a program may have operators of the same name space.
_library = torch.library.Library("deep_ep", "FRAGMENT")
# Graphs of CUDA cannot hold a call whose host waits; older versions of PyTorch have no word for that.
_TAGS = [getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "cudagraph_unsafe") if hasattr(torch.Tag, name)]


def _operator(schema: str, shape: Callable[..., torch.Tensor], function: Any = None) -> Callable[[Any], Any]:
    """Makes a kernel an operator. ``shape``: the result of a fake kernel; ``function``: what autograd calls."""

    def register(kernel: Any) -> Any:
        name = schema.partition("(")[0]
        _library.define(schema, tags=_TAGS)
        _library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"deep_ep::{name}", shape, lib=_library)
        if function is not None:
            _library.impl(name, function.apply, "Autograd")
        return kernel

    return register


# It stands for the operators that it calls, also to a compiler.
_library.define(
    "receive(Tensor state, Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor handle, SymInt num_experts, bool do_expand) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
_library.impl("receive", _Receive.apply, "CompositeImplicitAutograd")


@_operator(
    "send(Tensor(a!) state, Tensor x, Tensor topk_idx, Tensor topk_weights, SymInt num_experts, SymInt expert_alignment, "
    "bool do_expand) -> Tensor",
    lambda state, x, topk_idx, *_: topk_idx.new_empty(
        (topk_idx.size(0) + _KEY_BYTES, topk_idx.size(1)), dtype=torch.uint8, device="cpu"
    ),
)
def _send(state, x, topk_idx, topk_weights, num_experts, expert_alignment, do_expand):
    """Dispatch; ``receive`` hands out what it returns, because Inductor wants no operator that changes its arguments to have
    results of unknown size."""
    buffer = _begin(state)
    if isinstance(buffer, ElasticBuffer):
        if do_expand and not buffer.allow_multiple_reduction:
            raise InvalidArgument("do_expand is True, allowed: only with a buffer that has allow_multiple_reduction")
        # Also for an EPBuffer, whose own dispatch keeps the tensor itself: its memory a compiler uses for something else.
        rows, idx, weights, handle, _ = ElasticBuffer.dispatch(
            buffer, x, topk_idx, topk_weights, num_experts=num_experts, expert_alignment=expert_alignment, do_expand=do_expand,
            do_zero_padding=do_expand,
        )  # fmt: skip
        sizes = handle.num_recv_tokens_per_expert_list
    else:
        if do_expand:
            raise InvalidArgument("do_expand is True, allowed: only with the state of an ElasticBuffer")
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
        rows, idx, weights, sizes, handle, _ = buffer.dispatch(
            x, None, per_rank, None, in_rank, per_expert, topk_idx, topk_weights, expert_alignment
        )
    counts = torch.tensor(sizes, dtype=torch.int32, device=x.device)
    if idx is None:
        idx = topk_idx.new_empty((0, topk_idx.size(1)))
    return _new_handle(_Sent(handle, [rows, idx, weights, counts]), *topk_idx.shape)


def _receive(part, first, like, handle, *_):
    """Hands out one of the results, which the program alone has from here on."""
    received = _sent_by(handle).received
    result, received[part] = received[part], None
    if result is None:
        raise InvalidArgument("handle is one whose rows were received already, allowed: a dispatch's, once")
    return result


for _part, (_schema, _shape) in enumerate((
    ("receive_rows(Tensor state, Tensor x, Tensor handle) -> Tensor",
     lambda state, x, handle: x.new_empty((torch.library.get_ctx().new_dynamic_size(), x.size(1)))),
    ("receive_idx(Tensor rows, Tensor topk_idx, Tensor handle, bool do_expand) -> Tensor",
     lambda rows, idx, handle, do_expand: idx.new_empty((0 if do_expand else rows.size(0), idx.size(1)))),
    ("receive_weights(Tensor rows, Tensor topk_weights, Tensor handle, bool do_expand) -> Tensor",
     lambda rows, weights, handle, do_expand: weights.new_empty((rows.size(0), weights.size(1))[: 1 if do_expand else 2])),
    ("receive_counts(Tensor state, Tensor x, Tensor handle, SymInt num_experts) -> Tensor",
     lambda state, x, handle, num_experts: x.new_empty((num_experts // state.size(1),), dtype=torch.int32)),
)):  # fmt: skip
    _operator(_schema, _shape)(functools.partial(_receive, _part))


@_operator(
    "combine(Tensor(a!) state, Tensor rows, Tensor? weights, Tensor handle) -> Tensor",
    lambda state, rows, weights, handle: rows.new_empty((handle.size(0) - _KEY_BYTES, rows.size(1))),
    _Combine,
)
def _combine(state, rows, weights, handle):
    sent = _sent_by(handle)
    combined, sent.combined_weights, _ = _begin(state).combine(rows, sent.handle, weights)
    return combined


@_operator(
    "combined_weights(Tensor combined, Tensor weights, Tensor handle) -> Tensor",
    lambda combined, weights, handle: weights.new_empty((handle.size(0) - _KEY_BYTES, handle.size(1))),
)
def _combined_weights(combined, weights, handle):
    sent = _sent_by(handle)
    result, sent.combined_weights = sent.combined_weights, None
    return result


@_operator(
    "combine_backward(Tensor(a!) state, Tensor grad, Tensor handle, SymInt num_rows) -> Tensor",
    lambda state, grad, handle, num_rows: grad.new_empty((num_rows, grad.size(1))),
)
def _combine_backward(state, grad, handle, num_rows):
    buffer, given = _begin(state), _sent_by(handle).handle
    if isinstance(buffer, ElasticBuffer):
        return buffer.dispatch(grad, handle=given, do_expand=given.do_expand, do_zero_padding=given.do_expand)[0]
    return buffer.dispatch(grad, handle=given)[0]
