"""Processes that have died are replaced by new ones, which meet the others in a store."""

import os
import signal
import threading
import time

import low_latency_reference as reference
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from low_latency_calls import M, combine, dispatch, ll_case, make_buffer, outputs_of
from test_calls import send
from time_scale import scaled

from deep_ep import Buffer
from deep_ep.errors import InvalidArgument, PeerTimeout, Unsupported
from deep_ep.meetings import StoreRanks

RANKS = 3
DYING = [1, 0, 1]  # the third is a process that has taken a place itself


def calls_with(buffer, case, outputs, times):
    rank = buffer.rank
    for _ in range(times):
        result = dispatch(buffer, case, use_fp8=False)
        reference.check_dispatched(case, rank, M, result)
        back = combine(buffer, case, outputs[rank], result[2])[0]
        reference.close(back, reference.combined(case, rank, outputs))


def masks(buffer):
    status = torch.full((RANKS,), 7, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    return status.tolist()


def call_until_masked(buffer, case, dying):
    """All ranks that live make equally many calls."""
    for _ in range(20):
        dispatch(buffer, case)
    assert masks(buffer) == [1 if rank == dying else 0 for rank in range(RANKS)]


def new_buffer(store, rank):
    size = Buffer.get_low_latency_rdma_size_hint(M, 512, RANKS, 12)
    return Buffer(
        None, 0, size, True, 4, explicitly_destroy=True, enable_shrink=True, tcp_store_group=store, rank=rank, num_ranks=RANKS
    )


def live(process, folder, port, done, timeout_s):
    os.environ["DEEP_EP_TIMEOUT_S"] = str(timeout_s)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    case = ll_case([3, 4, 2])
    outputs = outputs_of(case)
    first = max(0, process - RANKS + 1)
    rank = process if first == 0 else DYING[first - 1]
    if first == 0:
        dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=RANKS)
        buffer = make_buffer(dist.group.WORLD, enable_shrink=True, explicitly_destroy=True)
    else:
        buffer = new_buffer(store, rank)
        buffer.connect_ranks(range(RANKS))  # as callers of nixl_ep do: all are connected
    memory = buffer.get_local_buffer_tensor(torch.uint8).data_ptr()
    for number in range(first, len(DYING) + 1):
        calls_with(buffer, case, outputs, 3)
        assert buffer.get_local_buffer_tensor(torch.uint8).data_ptr() == memory
        if number == len(DYING):
            break
        dying = DYING[number]
        store.add(f"calls before {number}", 1)  # no rank is in a call that the dying rank has left
        while store.add(f"calls before {number}", 0) < RANKS:
            time.sleep(1e-3)
        if rank == dying:
            if number == 1:  # in the middle of a call
                dispatch(buffer, case)
                dispatch(buffer, case, return_recv_hook=True)
            os.kill(os.getpid(), signal.SIGKILL)
        call_until_masked(buffer, case, dying)
        with pytest.raises(InvalidArgument, match="remote_ranks"):
            buffer.connect_ranks([RANKS])
        buffer.disconnect_ranks([dying])
        buffer.set_tcp_store_group(store)
        begin = time.monotonic()
        buffer.connect_ranks([dying], activate=number != 2)
        if rank == 2:
            print(f"rank {dying} was replaced in {1e3 * (time.monotonic() - begin):.0f} ms")
        if number == 2:
            assert masks(buffer)[dying] == 1
            buffer.low_latency_update_mask_buffer(dying, False)
        assert masks(buffer) == [0] * RANKS
    with pytest.raises(Unsupported, match="replaced"):
        send(buffer, case)
    buffer.destroy()
    done.put(process)
    done.close()
    done.join_thread()
    os._exit(0)  # gloo would wait for the dead


def test_three_in_turn(tmp_path):
    context = mp.get_context("spawn")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    done = context.Queue()
    timeout_s = scaled(60)  # of all, however busy the machine is when they start
    processes = [
        context.Process(target=live, args=(process, str(tmp_path), server.port, done, timeout_s), daemon=True)
        for process in range(RANKS + len(DYING))
    ]
    dead = [1, 0, RANKS]  # the processes of those ranks
    try:
        for process in processes[:RANKS]:
            process.start()
        for number, victim in enumerate(dead):
            processes[victim].join(scaled(60))
            processes[RANKS + number].start()
        for process in processes:
            process.join(scaled(60))
        ends = [process.exitcode for process in processes]
        assert ends == [-signal.SIGKILL if number in dead else 0 for number in range(len(processes))]
        assert sorted(done.get(timeout=scaled(10)) for _ in range(RANKS)) == [2, 4, 5]
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()


@pytest.fixture
def short_deadline(monkeypatch):
    monkeypatch.setenv("DEEP_EP_TIMEOUT_S", "0.2")


def test_no_process_comes(short_deadline):
    store = dist.HashStore()
    with pytest.raises(PeerTimeout, match="rank 0 of 3 waited 0.2 s for a new process for rank 1"):
        StoreRanks.replace(store, 0, 3, [1])
    with pytest.raises(PeerTimeout, match="rank 1 of 3 waited 0.2 s for the other ranks to replace it"):
        StoreRanks.join(store, 1, 3)
    assert not store.check(["deep_ep/join/1"]), "it waits there no longer"
    store.set("deep_ep/join/1", "token")
    ranks = StoreRanks.replace(store, 0, 3, [1])
    with pytest.raises(PeerTimeout, match="rank 0 of 3 waited 0.2 s for rank 1"):
        ranks.allgather(b"x")


def test_meetings_in_one_store():
    store = dist.HashStore()
    for number in range(3):
        gathered = {}

        def meet(rank, make):
            ranks = make()
            gathered[rank] = [ranks.allgather(bytes([number, rank, turn])) for turn in range(3)]

        others = [threading.Thread(target=meet, args=(rank, lambda rank=rank: StoreRanks.join(store, rank, 3))) for rank in (1, 2)]
        for one in others:
            one.start()
        meet(0, lambda: StoreRanks.replace(store, 0, 3, [2, 1]))
        for one in others:
            one.join()
        wanted = [[bytes([number, rank, turn]) for rank in range(3)] for turn in range(3)]
        assert gathered == {rank: wanted for rank in range(3)}
        assert not store.check(["deep_ep/join/1"]) and not store.check(["deep_ep/join/2"])


def test_arguments():
    store = dist.HashStore()
    for given, match in (({"rank": 0}, "num_ranks"), ({"rank": 3, "num_ranks": 3}, "rank is 3"), ({"num_ranks": 2}, "rank")):
        with pytest.raises(InvalidArgument, match=match):
            Buffer(None, tcp_store_group=store, **given)
    with pytest.raises(TypeError, match="torch.distributed.Store"):
        StoreRanks.join({}, 0, 2)
