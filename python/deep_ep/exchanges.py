"""What ranks tell each other on the host when buffers are made and destroyed: all-gathers over the program's group."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import itertools
import struct
import time
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
import torch.distributed as dist

from . import _native
from .arguments import type_name
from .errors import Error, InvalidArgument, PeerTimeout

# A single one for each group: it counts the group's buffers, so that a rank that makes the next one is told apart from a rank
# that still destroys the last one.
_bootstraps: "Dict[int, _native.Bootstrap]" = {}
#: How many all-gathers a group has begun here: the same number on all ranks.
_rounds: "weakref.WeakKeyDictionary[Any, Iterator[int]]" = weakref.WeakKeyDictionary()
#: For how many seconds exchanges wait; 0: for as long as the group does.
timeout_s = contextvars.ContextVar("timeout_s", default=0.0)


def is_communicator(group: Any) -> bool:
    """Whether it is one of mpi4py, or has its methods, and is no ``torch.distributed`` group."""
    return hasattr(group, "Get_rank")


def rank_and_size(group: Any) -> Tuple[int, int]:
    """Of a ``torch.distributed`` group or of a communicator."""
    if group is getattr(dist.GroupMember, "NON_GROUP_MEMBER", None):
        raise InvalidArgument(f"group is {group}, allowed: a group with this process")
    try:
        if is_communicator(group):
            rank, size, _ = group.Get_rank(), group.Get_size(), group.allgather
        else:
            rank, size = group.rank(), group.size()
    except (AttributeError, TypeError):
        kinds = "a torch.distributed process group or an mpi4py communicator"
        raise TypeError(f"group is of type {type_name(group)}, expected {kinds}") from None
    return rank, size


def device_of(group: Any) -> torch.device:
    """The current CUDA device, or the CPU where the program does not use CUDA."""
    nccl = isinstance(group, dist.ProcessGroup) and "nccl" in str(dist.get_backend(group)) and torch.cuda.is_available()
    if nccl or torch.cuda.is_initialized() or torch.empty(0).is_cuda:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def bootstrap_of(group: Any) -> "_native.Bootstrap":
    """Of all buffers of a group, or of a communicator."""
    if id(group) not in _bootstraps:
        alive: Callable[[], Optional[Any]]
        try:
            alive = weakref.ref(group)  # or the group would never go
            weakref.finalize(group, _bootstraps.pop, id(group), None).atexit = False
        except TypeError:
            alive = lambda: group  # noqa: E731
        _bootstraps[id(group)] = _native.Bootstrap(*rank_and_size(group), lambda mine: _all_gather(alive(), mine))
    return _bootstraps[id(group)]


def _all_gather(group: Optional[Any], mine: bytes) -> bytes:
    if group is None:
        raise RuntimeError("the group of this buffer is gone: destroy buffers before their group")
    if is_communicator(group):
        return b"".join(group.allgather(mine))
    # torch.distributed pairs the all-gathers of a group by their order.
    number = next(_rounds.setdefault(group, itertools.count()))
    # Messages lie on the host, unless the group has no backend for that.
    kinds = {device.type for device in getattr(group, "_device_types", ())}
    own = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to("cuda" if kinds and "cpu" not in kinds else "cpu")
    everybody = torch.empty((group.size(), len(mine)), dtype=torch.uint8, device=own.device)
    work = dist.all_gather(list(everybody.unbind()), own, group=group, async_op=True)
    limit_s = timeout_s.get()
    late = "exchange: rank {} of {} waited {:g} s for the other ranks of its group to destroy the buffer, too"
    try:
        poll(
            work.is_completed, limit_s, lambda: late.format(group.rank(), group.size(), limit_s),
            lambda: _store_of(group).set(f"deep_ep/{number}/{group.rank()}", ""),
        )  # fmt: skip
        work.wait()
    except PeerTimeout as error:
        missing = _missing(group, number)
        if not missing:
            raise
        raise PeerTimeout(f"{error} Not there: rank {missing}") from None
    except RuntimeError as error:
        if isinstance(error, Error):
            raise
        raise Error(
            f"exchange: the process group of rank {group.rank()} of {group.size()} failed, as it does when a rank has "
            f"ended: {error}"
        ) from error
    host = everybody.cpu()
    return ctypes.string_at(host.data_ptr(), host.numel())


def all_gather_ints(group: Any, *mine: int) -> List[Tuple[int, ...]]:
    """Collective: the integers that each rank of a group gives, by rank."""
    packed = struct.Struct(f"={len(mine)}q")
    return list(packed.iter_unpack(_all_gather(group, packed.pack(*mine))))


def _store_of(group: Any) -> Any:
    return dist.distributed_c10d._get_process_group_store(group)


def _missing(group: Any, number: int) -> str:
    """The ranks that have not come to an all-gather, as far as the group's store says: those that wait are listed there."""
    with contextlib.suppress(Exception):  # PyTorch does not promise the store of a group
        is_there = [_store_of(group).check([f"deep_ep/{number}/{rank}"]) for rank in range(group.size())]
        return ", ".join(str(rank) for rank, there in enumerate(is_there) if not there)
    return ""


def poll(
    ready: Callable[[], bool], limit_s: float, late: Callable[[], str], after_a_second: Optional[Callable[[], Any]] = None
) -> None:
    """Returns when it is ready. Waits of groups and stores would neither end in time nor let Ctrl-C through."""
    begin, nap = time.monotonic(), 20e-6
    while not ready():
        _native.ask_whether_to_wait()  # raises where the control plane knows that a rank will not come
        if after_a_second is not None and time.monotonic() - begin > 1:
            with contextlib.suppress(Exception):
                after_a_second()
            after_a_second = None
        if 0 < limit_s < time.monotonic() - begin:
            raise PeerTimeout(late())
        time.sleep(nap)
        nap = min(2 * nap, 2e-3)
