"""``PPBuffer``: tensors for pipeline neighbours. Left out; the name is there for programs that import it."""

from __future__ import annotations

from typing import Any, Optional

from ..errors import _left_out
from .base import BufferBase


class PPBuffer(BufferBase):
    """Raises ``NotImplementedError``."""

    def __init__(
        self,
        group: Any,
        num_max_tensor_bytes: int,
        num_max_inflight_tensors: int,
        sl_idx: Optional[int] = None,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        _left_out("PPBuffer")()

    send = _left_out("PPBuffer.send")
    recv = _left_out("PPBuffer.recv")
    destroy = _left_out("PPBuffer.destroy")
