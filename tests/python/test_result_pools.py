"""Results without pools, and streams that are recorded: ``deep_ep.results`` beside a PyTorch that is a fake.

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
