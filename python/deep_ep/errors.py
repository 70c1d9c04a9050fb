"""What calls raise. Every class is also a ``RuntimeError``, which is what upstream raises for most of it."""

from __future__ import annotations

from typing import Any, NoReturn


class Error(RuntimeError):
    """Base of all others; raised itself when the system refuses something (a CUDA call, a mapping, a socket)."""


class InvalidArgument(Error, ValueError):
    """An argument breaks a rule; the text names it. Nothing was sent, the buffer stays usable."""


class WrongUse(InvalidArgument, AssertionError):
    """The same for rules that upstream states by ``assert``, whose ``AssertionError`` programs may expect; but it comes
    under ``python -O``, too."""


class Unsupported(InvalidArgument, NotImplementedError):
    """Nothing is wrong with the arguments, but this buffer cannot do what they ask for."""


class RankMismatch(InvalidArgument):
    """Arguments of the ranks do not fit together. Raised on every rank, before any row moves."""


class OutOfMemory(Error, MemoryError):
    """The buffer's memory is too small for the call. Every later call raises, too, if the ranks had exchanged sizes."""


class PeerTimeout(Error, TimeoutError):
    """A peer did not arrive within DEEP_EP_TIMEOUT_S seconds. The text names it; the buffer cannot be used any more."""


class UseAfterDestroy(Error):
    """The buffer was destroyed before this call."""


def _left_out(name: str) -> Any:
    """A function that refuses any arguments, in the place of one that this library leaves out."""

    def call(*arguments: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(
            f"{name}: this library moves tokens to experts; it has no bucket, Engram, pipeline, all-gather or NCCL calls"
        )

    call.__name__ = name
    return call
