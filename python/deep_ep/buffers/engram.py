"""``EngramBuffer``: rows of a table on other ranks. Left out; the names are there for programs that import them."""

from __future__ import annotations

from typing import Any, NoReturn, Optional

import torch

from .base import BufferBase, refuse


class EngramBuffer(BufferBase):
    """Raises ``NotImplementedError``."""

    def __init__(
        self,
        group: Any,
        num_gpu_bytes: int,
        num_rdma_storage_bytes: int,
        use_cpu_rdma_storage: bool,
        num_allocated_qps: int,
        qp_depth: int,
        restrict_rd_atomic: bool = False,
        allow_hybrid_mode: bool = True,
        sl_idx: Optional[int] = None,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        refuse("EngramBuffer")

    @staticmethod
    def get_storage_size_hint(
        group: Any,
        num_entries_per_layer: int,
        hidden: int,
        num_max_tokens: int,
        num_entries_per_token: int,
        dtype: torch.dtype = torch.bfloat16,
        num_sf_packs: int = 0,
    ) -> NoReturn:
        refuse("EngramBuffer.get_storage_size_hint")

    @staticmethod
    def get_theoretical_config(
        group: Any, num_layers: int, num_max_tokens: int, num_entries_per_token: int, num_max_read_requests_per_qp: int = 16
    ) -> NoReturn:
        refuse("EngramBuffer.get_theoretical_config")

    def destroy(self) -> None:
        refuse("EngramBuffer.destroy")
