"""Tuning of a call, and how much memory a buffer wants."""

from __future__ import annotations

from dataclasses import dataclass, fields

from . import _native
from .arguments import integer
from .errors import InvalidArgument
from .utils.math import align

ALIGNMENT = 128
_LARGEST = 2**31 - ALIGNMENT
# The rows that a buffer of hinted size receives without its slower window: every rank's tokens on one rank.
_HINTED_TOKENS = 4096
_HINTED_SCALES = 128  # of a row, 4 bytes each


@dataclass(eq=False)
class Config:
    """Tuning of ``dispatch`` and ``combine``. Results never depend on it.

    Args:
        num_sms: the main kernel occupies at most this many SMs; 0 leaves the choice to the library.
        num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens: accepted and checked; the kernels here do not
            move tokens in chunks.
        num_max_rdma_chunked_send_tokens, num_max_rdma_chunked_recv_tokens: the same.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 0 if field.name == "num_sms" else 1
            setattr(self, field.name, integer(field.name, getattr(self, field.name), least))
        send, recv = self.num_max_nvl_chunked_send_tokens, self.num_max_nvl_chunked_recv_tokens
        if send >= recv:
            raise InvalidArgument(
                f"num_max_nvl_chunked_send_tokens is {send}, allowed: less than num_max_nvl_chunked_recv_tokens, which is {recv}"
            )
        send, recv = self.num_max_rdma_chunked_send_tokens, self.num_max_rdma_chunked_recv_tokens
        if 2 * send > recv:
            raise InvalidArgument(
                f"num_max_rdma_chunked_send_tokens is {send}, allowed: at most half of num_max_rdma_chunked_recv_tokens, which is {recv}"
            )
        self.num_max_rdma_chunked_recv_tokens = align(recv, send)

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of ``num_nvl_bytes`` with which rows of ``hidden_bytes`` travel at full speed, for usual token counts.

        Within a node any token count works with any buffer: what does not fit is received through a window, more slowly.
        Between nodes all received tensors that live at a time must fit.
        """
        hidden_bytes = integer("hidden_bytes", hidden_bytes, 1)
        num_ranks = integer("num_ranks", num_ranks, 1)
        size = _native.heap_bytes_hint(
            num_ranks,
            _HINTED_TOKENS,
            min(hidden_bytes, _LARGEST),  # far more than fits anyway
            _native.max_topk,
            4 * _HINTED_SCALES,
        )
        return min(align(size, ALIGNMENT), _LARGEST)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of ``num_rdma_bytes`` for the normal mode: 0, as rows pass from node to node through ``num_nvl_bytes``."""
        integer("hidden_bytes", hidden_bytes, 1)
        integer("num_ranks", num_ranks, 1)
        return 0
