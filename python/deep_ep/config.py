"""Tuning of a call, and how much memory a buffer wants."""

from __future__ import annotations

from . import _native
from .errors import InvalidArgument

RANKS_PER_NODE = 8
ALIGNMENT = 128
_LARGEST = 2**31 - ALIGNMENT
# What a buffer of hinted size receives without its slower window: every rank's tokens on one rank.
_HINTED_TOKENS = 4096
_HINTED_SCALES = 128  # of a row, 4 bytes each


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise InvalidArgument(text)


class Config:
    """Tuning of ``dispatch`` and ``combine``. Results never depend on it.

    Args:
        num_sms: the main kernel occupies at most this many SMs; 0 leaves the choice to the library.
        num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens: accepted and checked; the kernels here do not
            move tokens in chunks.
        num_max_rdma_chunked_send_tokens, num_max_rdma_chunked_recv_tokens: the same.
    """

    __slots__ = (
        "num_sms",
        "num_max_nvl_chunked_send_tokens",
        "num_max_nvl_chunked_recv_tokens",
        "num_max_rdma_chunked_send_tokens",
        "num_max_rdma_chunked_recv_tokens",
    )

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        _require(num_sms >= 0, f"num_sms is {num_sms}, allowed: 0 or more")
        chunks = {
            "num_max_nvl_chunked_send_tokens": num_max_nvl_chunked_send_tokens,
            "num_max_nvl_chunked_recv_tokens": num_max_nvl_chunked_recv_tokens,
            "num_max_rdma_chunked_send_tokens": num_max_rdma_chunked_send_tokens,
            "num_max_rdma_chunked_recv_tokens": num_max_rdma_chunked_recv_tokens,
        }
        for name, value in chunks.items():
            _require(value > 0, f"{name} is {value}, allowed: 1 or more")
        _require(
            num_max_nvl_chunked_send_tokens < num_max_nvl_chunked_recv_tokens,
            f"num_max_nvl_chunked_send_tokens is {num_max_nvl_chunked_send_tokens}, allowed: less than "
            f"num_max_nvl_chunked_recv_tokens, which is {num_max_nvl_chunked_recv_tokens}",
        )
        _require(
            num_max_rdma_chunked_send_tokens <= num_max_rdma_chunked_recv_tokens // 2,
            f"num_max_rdma_chunked_send_tokens is {num_max_rdma_chunked_send_tokens}, allowed: at most half of "
            f"num_max_rdma_chunked_recv_tokens, which is {num_max_rdma_chunked_recv_tokens}",
        )
        self.num_sms = num_sms
        self.num_max_nvl_chunked_send_tokens = num_max_nvl_chunked_send_tokens
        self.num_max_nvl_chunked_recv_tokens = num_max_nvl_chunked_recv_tokens
        self.num_max_rdma_chunked_send_tokens = num_max_rdma_chunked_send_tokens
        send = num_max_rdma_chunked_send_tokens
        self.num_max_rdma_chunked_recv_tokens = -(-num_max_rdma_chunked_recv_tokens // send) * send

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of ``num_nvl_bytes`` with which rows of ``hidden_bytes`` travel at full speed, for usual token counts.

        Within a node any token count works with any buffer: what does not fit is received through a window, more slowly.
        Between nodes all received tensors that live at a time must fit.
        """
        _require(hidden_bytes > 0, f"hidden_bytes is {hidden_bytes}, allowed: 1 or more")
        _require_ranks(num_ranks)
        size = _native.heap_bytes_hint(
            num_ranks,
            _HINTED_TOKENS,
            min(hidden_bytes, _LARGEST),  # far more than fits anyway
            _native.max_topk,
            4 * _HINTED_SCALES,
        )
        return min(_align(size), _LARGEST)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of ``num_rdma_bytes`` for the normal mode: 0. Rows pass from node to node through a window that every
        buffer's heap has besides ``num_nvl_bytes``."""
        _require(hidden_bytes > 0, f"hidden_bytes is {hidden_bytes}, allowed: 1 or more")
        _require_ranks(num_ranks)
        return 0

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={getattr(self, name)}' for name in self.__slots__)})"


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _require_ranks(num_ranks: int) -> None:
    allowed = 0 < num_ranks < RANKS_PER_NODE or (num_ranks > 0 and num_ranks % RANKS_PER_NODE == 0)
    _require(allowed, f"num_ranks is {num_ranks}, allowed: below 8, or a multiple of 8")


def low_latency_size(num_max_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Monotone in each argument."""
    for name, value in (
        ("num_max_dispatch_tokens_per_rank", num_max_tokens),
        ("hidden", hidden),
        ("num_ranks", num_ranks),
        ("num_experts", num_experts),
    ):
        _require(value > 0, f"{name} is {value}, allowed: 1 or more")
    return _align(_native.low_latency_bytes_hint(num_max_tokens, hidden, num_ranks, num_experts))


# (send, receive) of NVLink, (send, receive) of RDMA, for dispatch and for combine, by number of ranks.
DISPATCH_CHUNKS = {
    2: (24, 256, 6, 128),
    4: (6, 256, 6, 128),
    8: (6, 256, 6, 128),
    16: (36, 288, 20, 128),
    24: (32, 288, 8, 128),
    32: (32, 288, 8, 128),
    48: (32, 288, 8, 128),
    64: (32, 288, 8, 128),
    96: (20, 480, 12, 128),
    128: (20, 560, 12, 128),
    144: (32, 720, 12, 128),
    160: (28, 720, 12, 128),
}
COMBINE_CHUNKS = {
    2: (10, 256, 6, 128),
    4: (9, 256, 6, 128),
    8: (4, 256, 6, 128),
    16: (4, 288, 12, 128),
    24: (1, 288, 8, 128),
    32: (1, 288, 8, 128),
    48: (1, 288, 8, 128),
    64: (1, 288, 8, 128),
    96: (1, 480, 8, 128),
    128: (1, 560, 8, 128),
    144: (2, 720, 8, 128),
    160: (2, 720, 8, 128),
}
