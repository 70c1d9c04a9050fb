"""Tensors that are planned before the memory for them exists."""

from __future__ import annotations

import math
from typing import List, Sequence, Tuple, Union

import torch

from ..arguments import type_name
from ..errors import InvalidArgument, WrongUse
from ..utils.math import align

#: Planned tensors begin at multiples of this, which is also what sizes of buffers are multiples of.
ALIGNMENT = 2 << 20


class BufferAllocator:
    """A plan of tensors in a buffer's memory. Ranks plan the same tensors in the same order, so that each lies at one offset on
    all of them. The plan is given to a buffer, whose constructor turns the tensors, in place, into views of its memory."""

    def __init__(self) -> None:
        self.alignment: int = ALIGNMENT
        #: The planned tensors, and where they begin.
        self.allocations: List[Tuple[torch.Tensor, int]] = []
        self.num_bytes: int = 0
        self.materialized: bool = False

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor behind the others: on the ``meta`` device until a buffer is made with the plan."""
        self._check_open()
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self.allocations.append((tensor, self.num_bytes))
        self.num_bytes += align(tensor.numel() * tensor.element_size(), ALIGNMENT)
        return tensor

    def materialize(self, storage: torch.Tensor) -> None:
        """Called by buffers: makes the planned tensors views of ``storage``, which is as long as the plan."""
        self._check_open()
        if storage.dtype != torch.uint8 or storage.shape != (self.num_bytes,) or not storage.is_contiguous():
            raise InvalidArgument(
                f"storage is {storage.dtype} of shape {tuple(storage.shape)}, allowed: contiguous torch.uint8 of shape "
                f"({self.num_bytes},)"
            )
        self.materialized = True
        for tensor, begin in self.allocations:
            end = begin + math.prod(tensor.shape) * tensor.element_size()
            torch.utils.swap_tensors(tensor, storage[begin:end].view(tensor.dtype).view(tensor.shape))

    def _check_open(self) -> None:
        if self.materialized:
            raise WrongUse("the plan has been given to a buffer: make another BufferAllocator")


def plan_of(name: str, given: Union[BufferAllocator, int], least: int = 0) -> BufferAllocator:
    """A plan that no buffer has; a size, which is a multiple of 2 MiB, stands for one without tensors."""
    plan = given if isinstance(given, BufferAllocator) else BufferAllocator()
    if plan is not given:
        if isinstance(given, bool) or not isinstance(given, int):
            raise WrongUse(f"{name} is of type {type_name(given)}, allowed: a BufferAllocator or an int")
        plan.num_bytes = given
    plan._check_open()
    if plan.num_bytes < least or plan.num_bytes % ALIGNMENT:
        raise InvalidArgument(f"{name} is {plan.num_bytes}, allowed: multiples of 2 MiB, {least} or more")
    return plan
