"""How large a buffer of the second interface is, which domains it has, and how many SMs and queue pairs calls should use."""

from __future__ import annotations

from typing import Any, Tuple

import torch

from ..arguments import integer
from ..errors import WrongUse
from . import model


class Sizes:
    """The part of ``ElasticBuffer`` that only calculates."""

    num_ranks: int
    num_rdma_ranks: int
    num_nvlink_ranks: int
    num_scaleout_ranks: int
    num_scaleup_ranks: int
    num_allocated_qps: int
    allow_hybrid_mode: bool
    prefer_overlap_with_compute: bool
    _device: torch.device

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """The ``num_bytes`` of a buffer made with these settings: equal on all ranks, a multiple of 2 MiB."""
        size = group.size() if callable(getattr(group, "size", None)) else group.Get_size()
        return model.buffer_bytes(
            size,
            integer("num_max_tokens_per_rank", num_max_tokens_per_rank, 1),
            integer("hidden", hidden, 1),
            num_topk,
            bool(use_fp8_dispatch),
            bool(allow_multiple_reduction),
        )

    def get_physical_domain_size(self) -> Tuple[int, int]:
        """(nodes, ranks of each)."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_logical_domain_size(self) -> Tuple[int, int]:
        """(1, R): results are those of one domain, also between nodes."""
        return self.num_scaleout_ranks, self.num_scaleup_ranks

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """An even number of SMs that should keep the links busy; what calls use with ``num_sms=0``. Results do not depend
        on it. Rates are in GB/s; 0 stands for those of this machine."""
        if num_scaleout_topk != 0:
            raise WrongUse(f"num_scaleout_topk is {num_scaleout_topk}, allowed: 0")
        return model.num_sms(
            self.num_ranks,
            self.num_rdma_ranks,
            integer("num_experts", num_experts, 1),
            integer("num_topk", num_topk, 1),
            (rdma_gbs, nvlink_gbs, sm_read_gbs, sm_write_gbs),
            self._device,
            self.prefer_overlap_with_compute,
        )

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Queue pairs that a call with this many SMs would use upstream. Here calls choose by themselves."""
        wanted = 16 * num_sms + 1 if self.allow_hybrid_mode else min(num_sms, 9)
        return min(wanted, self.num_allocated_qps)
