"""Checks of what callers give: each failure is a sentence that names the argument, what came and what is allowed."""

from __future__ import annotations

import operator
from typing import Any, List, Optional, Sequence, Tuple, TypeVar, Union

import torch

from .errors import InvalidArgument

#: A tensor of rows, or (8-bit rows, their scales). Calls return the form that they were given.
Rows = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
RowsLike = TypeVar("RowsLike", bound=Rows)
# ``None`` in some calls, as their arguments decide. ``Any``, so that type checkers ask for no check of ``None``.
MaybeTensor = Union[torch.Tensor, Any]
MaybeCounts = Union[List[int], Any]
Bias = Union[None, torch.Tensor, Sequence[Optional[torch.Tensor]]]


def type_name(value: Any) -> str:
    return type(value).__name__


def one_or_two(name: str, given: Any, two: str = "two") -> Any:
    """A tensor and ``None``, or what is in a tuple or list of two."""
    if not isinstance(given, (tuple, list)):
        return given, None
    if len(given) != 2:
        raise InvalidArgument(f"{name} is a {type_name(given)} of {len(given)}, expected a tensor or {two}")
    return given


def biases(bias: Any) -> Any:
    """The first one is there if any is."""
    first, second = one_or_two("bias", bias)
    return (second, None) if first is None else (first, second)


def integer(name: str, value: Any, least: Optional[int] = None) -> int:
    """``value`` as an int, also where it is one of another library."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r} of type {type_name(value)}, expected an integer") from None
    if least is not None and number < least:
        raise InvalidArgument(f"{name} is {number}, allowed: {least} or more")
    return number


def check_dtype(name: str, given: Any, *allowed: torch.dtype) -> None:
    """For tensors that PyTorch reads, or that the library gets as a view."""
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"{name} is of type {type_name(given)}, expected a torch.Tensor")
    if given.dtype not in allowed:
        raise InvalidArgument(f"{name} must be {' or '.join(map(str, allowed))}, got {given.dtype}")
