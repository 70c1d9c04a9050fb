"""When PyTorch's pools are asked for memory of the heap, and for how much: ``deep_ep.results`` beside a PyTorch that is a fake.

``test_results.py`` has the memory itself, ``test_results_on_gpus.py`` true pools.
"""

import contextlib
import types

import torch

from deep_ep.results import Results

HEAP = 64 << 20


class FakeStream:
    cuda_stream = 1


def pools_of_pytorch(monkeypatch, make):
    """A ``Results`` as on a GPU whose pools make tensors by ``make``."""
    monkeypatch.setattr("deep_ep.results._has_pools", lambda: True)
    monkeypatch.setattr("deep_ep.results._new_pool", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool, device: contextlib.nullcontext(), raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: FakeStream())
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device=None: {"max_split_size": -1})
    monkeypatch.setattr(torch, "empty", make)
    return Results(0, None, True)


WANTED = [((4,), torch.uint8)]


def test_a_full_pool_is_asked_less_and_less_often(monkeypatch):
    asked, room = [], [False]

    def make(shape, **_):
        if not isinstance(shape, tuple):
            return None  # the segment
        asked.append(shape)
        if not room[0]:
            raise torch.cuda.OutOfMemoryError("full")
        return "made"

    results = pools_of_pytorch(monkeypatch, make)
    when = []
    for call in range(200):
        before = len(asked)
        assert results.make_in_heap(WANTED, 1, False, False, HEAP) is None
        when += [call] * (len(asked) - before)
    assert when == [0, 1, 3, 7, 15, 31, 63, 127, 191]
    room[0] = True
    made = [results.make_in_heap(WANTED, 1, False, False, HEAP) for _ in range(64)]
    assert made[-1] == ["made"] and results.in_heap
    results.is_in_heap()
    assert results.make_in_heap(WANTED, 1, False, False, HEAP) == ["made"], "every time again"
    when = []
    for call in range(40):
        when += [call] * (results.make_in_heap(WANTED, 1, False, False, HEAP) is not None)
        if when[-1:] == [call]:
            results.is_elsewhere()
    assert when == [0, 1, 3, 7, 15, 31], "as where there is no room"


def test_the_pool_takes_segments_for_two_calls(monkeypatch):
    taken = []

    def make(shape, **_):
        if isinstance(shape, int):
            taken.append(shape >> 20)

    def ask(megabytes, stream=1, largest=1 << 30):
        results.make_in_heap([((megabytes << 20,), torch.uint8)], stream, False, False, largest)
        return [taken.pop() for _ in taken[:]]

    results = pools_of_pytorch(monkeypatch, make)
    assert ask(1) == [16] and ask(12) == [] and ask(16) == [32] and ask(31) == [] and ask(100) == [200]
    assert ask(100, stream=2) == [200], "streams have their own"
    assert ask(300, largest=400 << 20) == [], "the heap has no such piece"
    assert ask(400, largest=1 << 30) == [] and ask(700, largest=2 << 30) == [1400]
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device=None: {"max_split_size": 1 << 20})
    assert ask(100, stream=3) == [], "it could not be cut"


def test_pytorch_without_such_pools(monkeypatch):
    def make(shape, **_):
        raise RuntimeError("this allocator has no pools")

    results = pools_of_pytorch(monkeypatch, make)
    assert results.make_in_heap(WANTED, 1, False, False, HEAP) is None and not results.in_heap
    monkeypatch.setattr("deep_ep.results._has_pools", lambda: False)
    assert not Results(0, None, True).in_heap
    assert not Results(-1, None, True).in_heap, "on the CPU"


def test_other_streams_are_recorded(monkeypatch):
    seen = []
    made = types.SimpleNamespace(record_stream=lambda stream: seen.append(stream))
    results = pools_of_pytorch(monkeypatch, lambda shape, **_: made)
    results._communication = "communication"
    results.make(WANTED, False, False)
    assert seen == []
    results.make(WANTED, False, True)
    results.make_in_heap(WANTED, 1, False, True, HEAP)
    assert seen == ["communication"] * 2
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    results.make(WANTED, True, True)
    assert isinstance(seen[2], FakeStream), "the caller's"
