"""What ranks tell each other on the host when buffers are made and destroyed: all-gathers over the program's group."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import time
import weakref
from typing import Any, Callable, Dict, Iterator, Optional

import torch
import torch.distributed as dist

from . import _native
from .errors import PeerTimeout

# A single one for each group: it counts the group's buffers, so that a rank that makes the next one is told apart from a rank
# that still destroys the last one.
_bootstraps: "Dict[int, _native.Bootstrap]" = {}
_timeout_s = contextvars.ContextVar("timeout_s", default=0.0)


def is_group(group: Any) -> bool:
    """Whether it has the methods of a ``torch.distributed`` group: ``rank`` and ``size`` of mpi4py's communicators are
    numbers."""
    return all(callable(getattr(group, name, None)) for name in ("rank", "size"))


def bootstrap_of(group: Any, rank: int, size: int) -> "_native.Bootstrap":
    """Of all buffers of a group, or of a communicator."""
    if id(group) not in _bootstraps:
        alive: Callable[[], Optional[Any]]
        try:
            alive = weakref.ref(group)  # or the group would never go
            weakref.finalize(group, _bootstraps.pop, id(group), None).atexit = False
        except TypeError:
            alive = lambda: group  # noqa: E731
        _bootstraps[id(group)] = _native.Bootstrap(rank, size, lambda mine: _all_gather(alive(), mine))
    return _bootstraps[id(group)]


@contextlib.contextmanager
def bounded(timeout_s: float) -> Iterator[None]:
    """Within it, exchanges wait for at most ``timeout_s`` seconds (0: as long as the group does)."""
    before = _timeout_s.set(timeout_s)
    try:
        yield
    finally:
        _timeout_s.reset(before)


def _all_gather(group: Optional[Any], mine: bytes) -> bytes:
    if group is None:
        raise RuntimeError("the group of this buffer is gone: destroy buffers before their group")
    if not is_group(group):
        return b"".join(group.allgather(mine))
    own = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(_device_of(group))
    everybody = torch.empty((group.size(), len(mine)), dtype=torch.uint8, device=own.device)
    work = dist.all_gather(list(everybody.unbind()), own, group=group, async_op=True)
    begin, limit = time.monotonic(), _timeout_s.get()
    nap = 20e-6
    # Polled: a wait of the group would neither end in time nor let Ctrl-C through.
    while not work.is_completed():
        if 0 < limit < time.monotonic() - begin:
            raise PeerTimeout(
                f"exchange: rank {group.rank()} of {group.size()} waited {limit:g} s for the other ranks "
                "of its group to destroy the buffer, too"
            )
        time.sleep(nap)
        nap = min(2 * nap, 2e-3)
    work.wait()
    host = everybody.cpu()
    return ctypes.string_at(host.data_ptr(), host.numel())


def _device_of(group: Any) -> torch.device:
    """Where the group's messages must lie: on the host, unless it has no backend for that."""
    kinds = {device.type for device in getattr(group, "_device_types", ())}
    if not kinds or "cpu" in kinds:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
