"""Processes that have died are replaced by new ones, which meet the others in a store. Where there are two GPUs or more, each rank
has one of them."""

from concurrent import futures

import low_latency_reference as reference
import pytest
import torch
import torch.distributed as dist
from cluster import Cluster
from low_latency_calls import M, check_round_trip, combine, dispatch, ll_case, make_buffer, outputs_of
from normal_mode import send
from test_errors import refused

from deep_ep import Buffer
from deep_ep.errors import InvalidArgument, PeerTimeout, Unsupported
from deep_ep.meetings import StoreRanks

GPUS = torch.cuda.device_count()
RANKS, DEAD = (2 if GPUS == 2 else 3), 1
LIVING = [rank for rank in range(RANKS) if rank != DEAD]
TOKENS = [3, 4, 2][:RANKS]
MASKED = [int(rank == DEAD) for rank in range(RANKS)]
kept = {}


def use_gpu(rank):
    if GPUS < 2:
        return
    torch.cuda.set_device(rank)
    torch.set_default_device("cuda")


def wait_for_gpu():
    if GPUS >= 2:
        torch.cuda.synchronize()


class Recorded:
    """A dispatch and its combine, recorded once as a CUDA graph. Other ranks make a pair of calls for each replay."""

    def __init__(self, buffer, case, outputs):
        self.inputs = case, outputs  # replays read them
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.rows, _, handle, _, _ = dispatch(buffer, case, use_fp8=False)
            self.sums = combine(buffer, case, outputs[buffer.rank], handle)[0]

    def replay(self):
        self.rows.fill_(7)
        self.sums.fill_(7)
        self.graph.replay()
        return self.sums


def calls_with(buffer, recorded=None):
    case = ll_case(TOKENS)
    outputs, rank = outputs_of(case), buffer.rank
    expected = reference.combined(case, rank, outputs)
    for _ in range(3):
        check_round_trip(buffer, case, {"use_fp8": False})
    for _ in range(3 if GPUS >= 2 else 0):
        if recorded:
            reference.close(recorded.replay(), expected)
        else:
            combine(buffer, case, outputs[rank], dispatch(buffer, case, use_fp8=False)[2])
    return case


def masks(buffer):
    status = torch.full((RANKS,), 7, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    return status.tolist()


def before(group):
    use_gpu(group.rank())
    buffer = kept["buffer"] = make_buffer(group, experts=4 * RANKS, enable_shrink=True, explicitly_destroy=True)
    case = calls_with(buffer)
    kept["recorded"] = Recorded(buffer, case, outputs_of(case)) if GPUS >= 2 else None
    wait_for_gpu()


def replace(group, port, last):
    buffer, case = kept["buffer"], ll_case(TOKENS)
    memory = buffer.get_local_buffer_tensor(torch.uint8).data_ptr()
    for _ in range(20):  # all ranks that live make equally many calls
        dispatch(buffer, case)
    assert masks(buffer) == MASKED
    refused((InvalidArgument, "remote_ranks", lambda: buffer.connect_ranks([RANKS])))
    if last:  # the process has ended, the store is the one of before
        buffer.connect_ranks([DEAD])
    else:
        buffer.disconnect_ranks([DEAD])
        buffer.set_tcp_store_group(dist.TCPStore("127.0.0.1", port, is_master=False))
        buffer.connect_ranks([DEAD], activate=False)
        assert masks(buffer) == MASKED
        buffer.low_latency_update_mask_buffer(DEAD, False)
    assert masks(buffer) == [0] * RANKS and buffer.get_local_buffer_tensor(torch.uint8).data_ptr() == memory
    buffer.connect_ranks(range(RANKS))  # none is disconnected any more
    after(buffer, last, kept["recorded"])


def join(group, port, last):
    use_gpu(DEAD)
    size = Buffer.get_low_latency_rdma_size_hint(M, 512, RANKS, 4 * RANKS)
    buffer = kept["buffer"] = Buffer(
        None, 0, size, True, 4, explicitly_destroy=True, enable_shrink=True, rank=DEAD, num_ranks=RANKS,
        tcp_store_group=dist.TCPStore("127.0.0.1", port, is_master=False),
    )  # fmt: skip
    buffer.connect_ranks(range(RANKS))  # as callers of nixl_ep do: all are connected
    after(buffer, last)


def after(buffer, last, recorded=None):
    case = calls_with(buffer, recorded)
    wait_for_gpu()
    refused((Unsupported, "replaced", lambda: send(buffer, case)))
    if last:
        buffer.destroy()


def test_new_processes_take_the_place_of_dead_ones():
    """Two in turn."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    cluster, newcomers = Cluster(RANKS), [Cluster(1), Cluster(1)]
    try:
        cluster.run(before)
        dying = cluster.processes[DEAD]
        for newcomer in newcomers:
            last = newcomer is newcomers[-1]
            dying.kill()
            cluster.begin(LIVING, replace, server.port, last)
            newcomer.run(join, server.port, last)
            cluster.end(LIVING)
            (dying,) = newcomer.processes
    finally:
        for each in (cluster, newcomers[0]):
            each.close(kill=True)  # gloo would wait for the dead
        newcomers[1].close()


def test_no_process_comes(monkeypatch):
    monkeypatch.setenv("DEEP_EP_TIMEOUT_S", "0.2")
    store = dist.HashStore()
    with pytest.raises(PeerTimeout, match="rank 0 of 3 waited 0.2 s for a new process for rank 1"):
        StoreRanks(store, 0, 3, [1])
    with pytest.raises(PeerTimeout, match="rank 1 of 3 waited 0.2 s for the other ranks to replace it"):
        StoreRanks(store, 1, 3)
    assert not store.check(["deep_ep/join/1"]), "it waits there no longer"
    store.set("deep_ep/join/1", "token")
    ranks = StoreRanks(store, 0, 3, [1])
    with pytest.raises(PeerTimeout, match="rank 0 of 3 waited 0.2 s for rank 1"):
        ranks.allgather(b"x")
    assert not store.check(["deep_ep/token/0/0"]), "a rank that comes later finds no part of this one"


def test_meetings_in_one_store():
    """Ranks that stay may name those to be replaced in any order."""
    store, replaced = dist.HashStore(), {0: [2, 1], 3: [1, 2]}
    for number in range(3):

        def meet(rank):
            ranks = StoreRanks(store, rank, 4, replaced.get(rank, ()))
            return [ranks.allgather(bytes([number, rank, turn])) for turn in range(3)]

        with futures.ThreadPoolExecutor(4) as threads:
            gathered = list(threads.map(meet, range(4)))
        assert gathered == 4 * [[[bytes([number, rank, turn]) for rank in range(4)] for turn in range(3)]]
        assert not store.check(["deep_ep/join/1"]) and not store.check(["deep_ep/join/2"])


def test_arguments():
    store = dist.HashStore()
    refused(
        (InvalidArgument, "num_ranks", lambda: Buffer(None, tcp_store_group=store, rank=0)),
        (InvalidArgument, "rank is 3", lambda: Buffer(None, tcp_store_group=store, rank=3, num_ranks=3)),
        (InvalidArgument, "rank", lambda: Buffer(None, tcp_store_group=store, num_ranks=2)),
        (TypeError, "torch.distributed.Store", lambda: StoreRanks({}, 0, 2)),
    )
