"""What the second interface is given: checked, and in the form that the native buffer takes."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple, Union

import torch

from .._native import EventHandle
from ..arguments import type_name
from ..errors import InvalidArgument
from ..utils.event import EventOverlap
from .handle import EPHandle

Bias = Union[None, torch.Tensor, Sequence[Optional[torch.Tensor]]]
AnyEvent = Union[None, EventHandle, EventOverlap]

_KNOWN_DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float32, torch.uint8)


def check_rows(rows: Any, tokens: int) -> None:
    if not isinstance(rows, torch.Tensor):
        raise TypeError(f"x is of type {type_name(rows)}, expected a torch.Tensor")
    if rows.dim() != 2 or rows.size(0) != tokens:
        raise InvalidArgument(f"x is of shape {tuple(rows.shape)}, allowed: [{tokens}, hidden], a row for each token")


def split_rows(x: Any) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    if isinstance(x, (tuple, list)):
        if len(x) != 2:
            raise InvalidArgument(f"x is a {type_name(x)} of {len(x)}, expected a tensor or (rows, scales)")
        scales = x[1]
        if not isinstance(scales, torch.Tensor):
            raise TypeError(f"x_scales (x[1]) is of type {type_name(scales)}, expected a torch.Tensor")
        if scales.dim() != 2 or scales.element_size() != 4 or scales.shape[:1] != getattr(x[0], "shape", scales.shape)[:1]:
            raise InvalidArgument(
                f"x_scales (x[1]) is {scales.dtype} of shape {tuple(scales.shape)}, allowed: a 4-byte type of two "
                "dimensions, with as many rows as x[0]"
            )
        return x[0], scales
    return x, None


def align(value: int, step: int) -> int:
    return -(-value // step) * step


def typed(scales: Optional[torch.Tensor], given: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """Received scales, with the type of those that were given."""
    return scales if scales is None or given is None or scales.dtype == given.dtype else scales.view(given.dtype)


def known(*rows: Optional[torch.Tensor]) -> Tuple[Optional[torch.Tensor], ...]:
    """The same with a type that the library knows: it only moves them."""
    return tuple(each if each is None or each.dtype in _KNOWN_DTYPES else each.view(torch.uint8) for each in rows)


def native_scales(scales: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    if scales is None or scales.dtype in (torch.float32, torch.int32):
        return scales
    return scales.view(torch.int32)


def check_tensor(name: str, tensor: Any, dtypes: Sequence[torch.dtype], dims: int) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is of type {type_name(tensor)}, expected a torch.Tensor")
    if tensor.dtype not in dtypes or tensor.dim() != dims or not tensor.is_contiguous():
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        raise InvalidArgument(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())}, "
            f"allowed: {allowed} of {dims} dimensions, contiguous"
        )


def check_biases(bias: Bias, shape: Tuple[int, int]) -> List[torch.Tensor]:
    if bias is None or isinstance(bias, torch.Tensor):
        given: Sequence[Optional[torch.Tensor]] = (bias,)
    elif isinstance(bias, (tuple, list)) and len(bias) == 2:
        given = bias
    else:
        raise TypeError(f"bias is of type {type_name(bias)}, expected a torch.Tensor or a tuple of two")
    biases = [each for each in given if each is not None]
    for number, each in enumerate(biases):
        check_tensor(f"bias_{number}", each, (torch.bfloat16,), 2)
        if tuple(each.shape) != shape:
            raise InvalidArgument(f"bias_{number} is of shape {tuple(each.shape)}, allowed: {shape}")
    return biases


def checked_handle(handle: Any) -> EPHandle:
    if not isinstance(handle, EPHandle):
        raise TypeError(f"handle is of type {type_name(handle)}, expected the EPHandle that dispatch returned")
    return handle
