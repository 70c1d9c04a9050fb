"""``PPBuffer``: tensors for pipeline neighbours. Left out; the name is there for programs that import it."""

from __future__ import annotations

from typing import Any, NoReturn, Optional

import torch

from .base import BufferBase, refuse


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
        refuse("PPBuffer")

    def send(self, x: torch.Tensor, dst_rank_idx: int, num_sms: Optional[int] = None) -> NoReturn:
        refuse("PPBuffer.send")

    def recv(self, x: torch.Tensor, src_rank_idx: int, num_sms: Optional[int] = None) -> NoReturn:
        refuse("PPBuffer.recv")

    def destroy(self) -> None:
        refuse("PPBuffer.destroy")
