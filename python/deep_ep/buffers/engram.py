"""``EngramBuffer``: rows of a table on other ranks. Left out; the names are there for programs that import them."""

from __future__ import annotations

from typing import Any, Optional

from ..errors import _left_out
from .base import BufferBase


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
        _left_out("EngramBuffer")()

    get_storage_size_hint = staticmethod(_left_out("EngramBuffer.get_storage_size_hint"))
    get_theoretical_config = staticmethod(_left_out("EngramBuffer.get_theoretical_config"))
    destroy = _left_out("EngramBuffer.destroy")
