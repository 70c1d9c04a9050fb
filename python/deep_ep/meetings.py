"""Where the ranks of a buffer and a new process meet, which is in no process group with them: a store."""

from __future__ import annotations

import time
import uuid
from typing import Any, Dict, List, Sequence

from . import _native
from .arguments import type_name
from .errors import PeerTimeout

_ROOT = "deep_ep"


class StoreRanks:
    """The ranks of one meeting, with the methods of mpi4py's communicators that a buffer needs.

    A new process publishes a token under its rank and waits for the name of the meeting, which the others make of the
    tokens of all new processes. So any number of meetings may follow each other in one store. All-gathers of a meeting are
    keys with its name, a number and the rank; a rank removes its key of one when it has all keys of the next."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        for method in ("set", "get", "check", "delete_key"):
            if not hasattr(store, method):
                raise TypeError(f"store is of type {type_name(store)}, expected a torch.distributed.Store: {method} is missing")
        self._store, self._rank, self._size = store, rank, size
        self._timeout_s: float = _native.default_timeout_s()
        self._name = ""
        self._round = 0
        self._joins: Dict[str, bytes] = {}  # keys of new processes, with their tokens

    @classmethod
    def join(cls, store: Any, rank: int, size: int) -> "StoreRanks":
        """Of a new process. Waits until the others replace this rank."""
        ranks, token = cls(store, rank, size), uuid.uuid4().hex
        ranks._joins = {_join_key(rank): token.encode()}
        store.set(_join_key(rank), token)
        try:
            ranks._name = ranks._await({f"{_ROOT}/meet/{token}": "the other ranks to replace it"})[0].decode()
        except BaseException:
            ranks._forget()
            raise
        return ranks

    @classmethod
    def replace(cls, store: Any, rank: int, size: int, replaced: Sequence[int]) -> "StoreRanks":
        """Of the others. Waits until a new process has come for each of the ranks ``replaced``."""
        ranks = cls(store, rank, size)
        joins = {_join_key(one): f"a new process for rank {one}" for one in sorted(replaced)}
        ranks._joins = dict(zip(joins, ranks._await(joins)))
        tokens = [token.decode() for token in ranks._joins.values()]
        ranks._name = "-".join(tokens)
        for token in tokens:
            store.set(f"{_ROOT}/meet/{token}", ranks._name)  # all write the same
        return ranks

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._size

    def allgather(self, mine: bytes) -> List[bytes]:
        number, self._round = self._round, self._round + 1
        self._store.set(self._key(number, self._rank), mine)
        try:
            gathered = self._await({self._key(number, rank): f"rank {rank}" for rank in range(self._size)})
        except BaseException:
            self._forget()
            self._store.delete_key(self._key(number, self._rank))
            raise
        # All have come since, so none looks there any more.
        if number > 0:
            self._store.delete_key(self._key(number - 1, self._rank))
        elif _join_key(self._rank) in self._joins:
            self._store.delete_key(_join_key(self._rank))
        return gathered

    def _key(self, number: int, rank: int) -> str:
        return f"{_ROOT}/{self._name}/{number}/{rank}"

    def _forget(self) -> None:
        """No later meeting may be taken for this one."""
        for key, token in self._joins.items():
            if self._store.check([key]) and self._store.get(key) == token:
                self._store.delete_key(key)

    def _await(self, keys: Dict[str, str]) -> List[bytes]:
        """The values of keys, with what each stands for."""
        begin = time.monotonic()
        nap = 20e-6
        # Polled: a wait of the store would let no Ctrl-C through, and would not say which key is missing.
        for key, whose in keys.items():
            while not self._store.check([key]):
                waited = time.monotonic() - begin
                if 0 < self._timeout_s < waited:
                    raise PeerTimeout(f"rank {self._rank} of {self._size} waited {self._timeout_s:g} s for {whose}")
                time.sleep(nap)
                nap = min(2 * nap, 5e-3)
        return [self._store.get(key) for key in keys]


def _join_key(rank: int) -> str:
    """Where a new process for the rank publishes its token."""
    return f"{_ROOT}/join/{rank}"
