"""Where the ranks of a buffer and a new process meet, which is in no process group with them: a store."""

from __future__ import annotations

import itertools
import uuid
from typing import Any, Dict, List, Sequence

import torch.distributed as dist

from . import _native
from .arguments import type_name
from .exchanges import poll


class StoreRanks:
    """The ranks of one meeting, with the methods of mpi4py's communicators that a buffer needs.

    A new process publishes a token under its rank and waits for the name of the meeting, which the others make of the
    tokens of all new processes. So any number of meetings may follow each other in one store. All-gathers of a meeting are
    keys with its name, a number and the rank; a rank removes its key of one, and first its token, when it has all keys of the
    next: all have read it then."""

    def __init__(self, store: Any, rank: int, size: int, replaced: Sequence[int] = ()) -> None:
        """Without ``replaced``: of a new process, which waits until the others replace its rank. With it: of the others, which wait
        until a new process has come for each of these ranks."""
        if not isinstance(store, dist.Store):
            raise TypeError(f"store is of type {type_name(store)}, expected a torch.distributed.Store")
        self._store, self._rank, self._size = dist.PrefixStore("deep_ep", store), rank, size
        self._timeout_s: float = _native.default_timeout_s()
        self._rounds = itertools.count()
        self._joins: Dict[str, bytes] = {}  # keys of new processes, with their tokens
        self._read = f"read/{rank}"  # there is none
        if replaced:
            joins = {f"join/{one}": f"a new process for rank {one}" for one in sorted(replaced)}
            self._joins = dict(zip(joins, self._await(joins)))
            tokens = [token.decode() for token in self._joins.values()]
            self._name = "-".join(tokens)
            for token in tokens:
                self._store.set(f"meet/{token}", self._name)  # all write the same
        else:
            mine = uuid.uuid4().hex
            self._read = f"join/{rank}"
            self._joins = {self._read: mine.encode()}
            self._store.set(self._read, mine)
            self._name = self._await({f"meet/{mine}": "the other ranks to replace it"})[0].decode()

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._size

    def allgather(self, mine: bytes) -> List[bytes]:
        number = next(self._rounds)
        keys = [f"{self._name}/{number}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], mine)
        try:
            gathered = self._await({key: f"rank {rank}" for rank, key in enumerate(keys)})
        except BaseException:  # a rank that comes later must not find this one's part
            self._store.delete_key(keys[self._rank])
            raise
        self._store.delete_key(self._read)
        self._read = keys[self._rank]
        return gathered

    def _await(self, keys: Dict[str, str]) -> List[bytes]:
        """The values of keys, with what each stands for. If one does not come, no later meeting is taken for this one."""

        def late() -> str:
            whose = next((whose for key, whose in keys.items() if not self._store.check([key])), "the store")
            return f"rank {self._rank} of {self._size} waited {self._timeout_s:g} s for {whose}"

        try:
            poll(lambda: self._store.check(list(keys)), self._timeout_s, late)
        except BaseException:
            for key, token in self._joins.items():
                if self._store.check([key]) and self._store.get(key) == token:
                    self._store.delete_key(key)
            raise
        return [self._store.get(key) for key in keys]
