"""``BucketBuffer``: memory for training's buckets. Its collectives are left out."""

from __future__ import annotations

from typing import Any, List, Optional, Union

import torch

from ..comm import get_physical_domain_size
from ..errors import InvalidArgument, WrongUse, _left_out
from ..exchanges import device_of
from .allocator import BufferAllocator, plan_of
from .base import BufferBase, Context


class BucketBuffer(BufferBase):
    """Memory of one rank for buckets, of one group or of up to 8. It can be made and destroyed, so that programs may plan
    tensors in it; collectives over it raise ``NotImplementedError``."""

    def __init__(
        self,
        group: Any,
        allocation_plan_or_num_bytes: Union[BufferAllocator, int],
        sl_idx: Optional[int] = None,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        """Collective in each of the groups, in their order."""
        super().__init__(explicitly_destroy)
        self.groups: List[Any] = list(group) if isinstance(group, (list, tuple)) else [group]
        if not 1 <= len(self.groups) <= 8:
            raise InvalidArgument(f"group is a list of {len(self.groups)}, allowed: one group, or a list of 1 to 8")
        plan = plan_of("allocation_plan_or_num_bytes", allocation_plan_or_num_bytes, 1)
        self.num_bytes: int = plan.num_bytes
        self.storage: Optional[torch.Tensor] = torch.empty(self.num_bytes, dtype=torch.uint8, device=device_of(self.groups[0]))
        self.contexts: Optional[List[Context]] = [
            Context(get_physical_domain_size(each), self.num_bytes) for each in self.groups
        ]
        self.context = self.contexts[0]
        plan.materialize(self.storage)

    def get_context_idx(self, group: Any) -> int:
        """Which of ``groups`` this one is."""
        return self.groups.index(group)

    def destroy(self) -> None:
        """Collective upstream; here it only lets go of the memory, which lives on while tensors of the plan do."""
        if not self.explicitly_destroy:
            raise WrongUse("destroy() needs a buffer made with explicitly_destroy=True")
        self.storage = self.contexts = self.context = None

    get_theoretical_num_sms = _left_out("get_theoretical_num_sms")
    session = _left_out("session")
    barrier = _left_out("barrier")
    all_gather = _left_out("all_gather")
    all_reduce = _left_out("all_reduce")
    reduce_scatter = _left_out("reduce_scatter")


class BucketSession:
    """Tensors of a bucket for a block: left out."""

    def __init__(self, buffer: BucketBuffer) -> None:
        _left_out("BucketSession")()
