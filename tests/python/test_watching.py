"""What programs that watch see: numbers for exporters, and ranges for profilers."""

import threading
import time
from concurrent import futures

import pytest
import torch
from cluster import Cluster, on_ranks
from low_latency_calls import M, combine, dispatch, ll_case, make_buffer, outputs_of
from normal_mode import CONFIG, send
from reference import make_case
from test_errors import Alone
from time_scale import scaled

import deep_ep
from common import ranks_a_node
from deep_ep import Buffer, ElasticBuffer

KINDS = ["combine", "dispatch", "low_latency_combine", "low_latency_dispatch"]
kept = {}


def check_numbers(x, **calls):
    """Of the buffer made last, whose calls were of these kinds, of ``x`` or for its tokens."""
    last = deep_ep.metrics()["buffers"][-1]
    assert last["calls"] == {**dict.fromkeys(KINDS, 0), **calls}
    assert last["bytes"] == {kind: count * x.numel() * x.element_size() for kind, count in last["calls"].items()}
    return last


@on_ranks(2)
def test_numbers(group):
    before = len(deep_ep.metrics()["buffers"])
    rank, case = group.rank(), make_case([5, 7], hidden=64)
    buffer = Buffer(group, 1 << 22, explicitly_destroy=True)
    rows, *_, handle, _ = send(buffer, case)
    buffer.dispatch(case.x[rank], handle=handle, config=CONFIG)
    buffer.combine(rows, handle, config=CONFIG)
    mine = check_numbers(case.x[rank], dispatch=2, combine=1)
    del mine["calls"], mine["bytes"]
    assert mine == {"rank": rank, "ranks": 2, "nodes": 1, "lost_ranks": [], "handlers": []}
    found = deep_ep.metrics()
    assert found["version"] == deep_ep.__version__ and len(found["buffers"]) == before + 1

    elastic = ElasticBuffer(group, num_max_tokens_per_rank=8, hidden=64, num_topk=3, explicitly_destroy=True)
    rows, _, _, handle, _ = elastic.dispatch(case.x[rank], case.topk_idx[rank], num_experts=case.num_experts)
    elastic.dispatch(case.x[rank], handle=handle)
    elastic.combine(rows, handle)
    check_numbers(case.x[rank], dispatch=2, combine=1)

    low_latency = make_buffer(group)
    case = ll_case([M, M])
    outputs = outputs_of(case)
    handle = dispatch(low_latency, case)[2]
    combine(low_latency, case, outputs[rank], handle, out=torch.empty_like(case.x[rank]))
    combine(low_latency, case, outputs[rank], handle)
    check_numbers(case.x[rank], low_latency_dispatch=1, low_latency_combine=2)

    for each in (buffer, elastic):
        each.destroy()
    assert len(deep_ep.metrics()["buffers"]) == before + 1, "destroyed buffers have no numbers"


@on_ranks(2)
def test_handlers_between_nodes(group):
    with ranks_a_node(1):
        Buffer(group, 1 << 22)
        buffer = Buffer(group, 1 << 22)
    mine = deep_ep.metrics()["buffers"][-1]
    assert mine["nodes"] == 2 and mine["handlers"] == ["cpu"], mine
    del buffer


def with_masks(group):
    kept["buffer"] = make_buffer(group, enable_shrink=True)


def who_is_lost(group):
    for _ in range(int(scaled(10) * 100)):
        if deep_ep.metrics()["buffers"][-1]["lost_ranks"]:
            break
        time.sleep(0.01)
    return deep_ep.metrics()["buffers"][-1]["lost_ranks"]


def test_lost_ranks():
    cluster = Cluster(3)
    try:
        cluster.run(with_masks)
        assert cluster.run(who_is_lost, ranks=[]) == []
        cluster.processes[1].kill()
        assert cluster.run(who_is_lost, ranks=[0, 2]) == [[1], [1]]
    finally:
        cluster.close(kill=True)


def test_another_thread_may_ask_while_buffers_come_and_go():
    stop = threading.Event()

    def ask():
        while not stop.is_set():
            deep_ep.metrics()

    with futures.ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask)
        for _ in range(20):
            Buffer(None, comm=Alone, explicitly_destroy=True).destroy()
            Buffer(None, comm=Alone)
        stop.set()
        asking.result()


@on_ranks(2)
def test_another_thread_may_ask_while_connections_are_made_anew(group):
    with ranks_a_node(1):
        buffer = make_buffer(group, enable_shrink=True)
    stop, found = threading.Event(), []

    def ask():
        while not stop.is_set():
            found.append(deep_ep.metrics()["buffers"][-1]["handlers"])

    with futures.ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask)
        for _ in range(5):
            buffer.low_latency_resume()
        stop.set()
        asking.result()
    assert found and all(handlers == ["cpu"] for handlers in found), found


@pytest.mark.parametrize("wanted, possible", [("1", True), ("1", False), ("0", True)])
def test_ranges(monkeypatch, wanted, possible):
    seen, open_ranges = [], []

    def mark(text):
        if not possible:
            raise RuntimeError("NVTX functions not installed")

    monkeypatch.setattr(torch.cuda.nvtx, "mark", mark)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda text: (seen.append(text), open_ranges.append(text)))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", open_ranges.pop)
    monkeypatch.setenv("DEEP_EP_NVTX", wanted)
    idx, x = torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 64, dtype=torch.bfloat16)
    buffer = ElasticBuffer(Alone, num_max_tokens_per_rank=4, hidden=64, explicitly_destroy=True)
    for _ in range(2):
        rows, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=2)
    buffer.combine(rows, handle)
    with pytest.raises(ValueError):
        buffer.dispatch(x[:, :3], idx, num_experts=2)
    buffer.destroy()
    calls = ["dispatch_elastic"] * 2 + ["combine_elastic", "dispatch_elastic", "destroy"]
    assert [text for text in seen if "nodes" not in text] == (
        [f"deep_ep.{call}" for call in calls] if wanted == "1" and possible else []
    )
    assert not open_ranges
