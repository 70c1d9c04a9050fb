"""What ranks tell each other on the host when buffers are made and destroyed: all-gathers over the program's group."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

import torch
import torch.distributed as dist

from . import _native
from .errors import PeerTimeout


class GroupExchanges:
    """Of all buffers of one group. There is a single one for each group: it counts the group's buffers, so that a rank
    that makes the next one is told apart from a rank that still destroys the last one."""

    _of_groups: Dict[int, "GroupExchanges"] = {}
    _ends_groups = False

    @classmethod
    def of(cls, group: Any, rank: int, size: int, by_torch: bool) -> "GroupExchanges":
        known = cls._of_groups.get(id(group))
        if known is None:
            known = cls._of_groups[id(group)] = cls(group, rank, size, by_torch)
        return known

    @classmethod
    def known(cls, group: Any) -> "GroupExchanges":
        """Of a group that a buffer was made over, and that still lives."""
        return cls._of_groups[id(group)]

    def __init__(self, group: Any, rank: int, size: int, by_torch: bool) -> None:
        self._timeout_s = 0.0
        self._group: Callable[[], Any]
        try:
            self._group = weakref.ref(group)  # or the group would never go
            weakref.finalize(group, self._of_groups.pop, id(group), None).atexit = False
        except TypeError:
            self._group = lambda: group
        if by_torch and not GroupExchanges._ends_groups:
            GroupExchanges._ends_groups = True
            weakref.finalize(GroupExchanges, _end_gloo_groups, os.getpid())  # at exit, after the buffers, which are younger
        own = weakref.ref(self)
        gather = GroupExchanges._gather_by_torch if by_torch else GroupExchanges._gather_by_communicator
        self.bootstrap = _native.Bootstrap(rank, size, lambda mine: gather(_alive(own), mine))

    @contextlib.contextmanager
    def bounded(self, timeout_s: float) -> Iterator[None]:
        """Within it, exchanges wait for at most ``timeout_s`` seconds (0: as long as the group does)."""
        self._timeout_s = timeout_s
        try:
            yield
        finally:
            self._timeout_s = 0.0

    def _gather_by_communicator(self, mine: bytes) -> Sequence[bytes]:
        return _alive(self._group).allgather(mine)

    def _gather_by_torch(self, mine: bytes) -> List[bytes]:
        group = _alive(self._group)
        own = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(_device_of(group))
        everybody = torch.empty((group.size(), len(mine)), dtype=torch.uint8, device=own.device)
        work = dist.all_gather(list(everybody.unbind()), own, group=group, async_op=True)
        begin = time.monotonic()
        nap = 20e-6
        # Polled: a wait of the group would neither end in time nor let Ctrl-C through.
        while not work.is_completed():
            waited = time.monotonic() - begin
            if 0 < self._timeout_s < waited:
                raise PeerTimeout(
                    f"exchange: rank {group.rank()} of {group.size()} waited {self._timeout_s:g} s for the other ranks "
                    "of its group to destroy the buffer, too"
                )
            time.sleep(nap)
            nap = min(2 * nap, 2e-3)
        work.wait()
        host = everybody.cpu()
        gathered = ctypes.string_at(host.data_ptr(), host.numel())
        return [gathered[rank * len(mine) : (rank + 1) * len(mine)] for rank in range(group.size())]


def _end_gloo_groups(process: int) -> None:
    """When the program ends without ``destroy_process_group``: PyTorch's destructors would end it by SIGABRT where threads
    of gloo still run. Groups over NCCL are left alone, as ending them may wait for GPUs."""
    if os.getpid() == process and dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


def _alive(reference: Callable[[], Optional[Any]]) -> Any:
    target = reference()
    if target is None:
        raise RuntimeError("the group of this buffer is gone: destroy buffers before their group")
    return target


def _device_of(group: Any) -> torch.device:
    """Where the group's messages must lie: on the host, unless it has no backend for that."""
    kinds = {device.type for device in getattr(group, "_device_types", ())}
    if not kinds or "cpu" in kinds:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if "cuda" in kinds else torch.device(kinds.pop())
