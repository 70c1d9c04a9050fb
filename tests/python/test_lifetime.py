"""How long things live: tensors without their buffer, garbage in any order, buffers side by side, threads, exit."""

import contextlib
import gc
import threading
import time
import types
import weakref
from concurrent import futures

import pytest
import reference
import torch
from cluster import on_ranks
from common import run_program
from normal_mode import CONFIG, check_received, equal, send
from reference import make_case
from test_errors import Alone, refused
from time_scale import scaled

from deep_ep import Buffer, ElasticBuffer
from deep_ep.errors import InvalidArgument
from deep_ep.exchanges import bootstrap_of, timeout_s


@on_ranks(3)
def test_tensors_outlive_the_buffer(group):
    case = make_case([20, 30, 10])
    expected = [reference.dispatched(case, r) for r in range(case.num_ranks)]
    mine = expected[group.rank()]
    results = []
    for explicitly in (True, False, False):
        buffer = Buffer(group, 1 << 22, explicitly_destroy=explicitly)
        results.append(send(buffer, case))
        if explicitly:
            buffer.destroy()
        del buffer
        gc.collect()
    for result in results:
        check_received(result, mine, group.rank())
    # A handle is used with another buffer of the same number of ranks.
    buffer = Buffer(group, 1 << 22)
    equal(buffer.dispatch(case.x[buffer.rank], handle=results[0][4], config=CONFIG)[0], mine.x, "rows")


def test_a_group_has_one_bootstrap():
    """It counts the group's buffers, and goes with the group."""
    group = Alone()
    of_group = bootstrap_of(group)
    assert bootstrap_of(group) is of_group and bootstrap_of(Alone()) is not of_group
    end = weakref.ref(group)
    del group
    assert end() is None


def test_exchanges_of_destroy_have_a_deadline(monkeypatch):
    """Those that make a buffer wait for as long as the group does."""
    limits = []

    class Watched(Alone):
        @staticmethod
        def allgather(value):
            limits.append(timeout_s.get())
            return [value]

    buffer = Buffer(None, comm=Watched, explicitly_destroy=True)
    made = len(limits)
    monkeypatch.setenv("DEEP_EP_TIMEOUT_S", "7")
    buffer.destroy()
    assert 0 < made < len(limits) and set(limits[:made]) == {0.0} and set(limits[made:]) == {7.0}


@on_ranks(2)
def test_asleep(group):
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=4, hidden=128, num_topk=1, explicitly_destroy=True)
    x, idx = torch.ones(4, 128, dtype=torch.bfloat16), torch.zeros(4, 1, dtype=torch.int64)
    rows, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=group.size())
    buffer.suspend()
    refused((InvalidArgument, "the buffer is suspended, allowed: resume", lambda: buffer.combine(rows, handle)))
    buffer.resume()
    assert buffer.combine(rows, handle)[0].sum() == 4 * 128
    buffer.destroy()


class Threads:
    """A communicator whose ranks are threads."""

    def __init__(self, size):
        self.barrier, self.values, self.size = threading.Barrier(size), [None] * size, size

    def rank(self, rank):
        def allgather(value):
            self.values[rank] = value
            self.barrier.wait(scaled(60))
            gathered = list(self.values)
            self.barrier.wait(scaled(60))
            return gathered

        return types.SimpleNamespace(Get_rank=lambda: rank, Get_size=lambda: self.size, allgather=allgather)


def test_other_threads_run_while_a_call_waits():
    case = make_case([10, 10])
    comm = Threads(2)
    calls = threading.Event()

    def work(rank):
        buffer = Buffer(None, 1 << 22, comm=comm.rank(rank))
        if rank == 1:
            # The other rank waits meanwhile, in the same interpreter: if it kept the interpreter to itself, its
            # deadline would pass before the loop ends.
            calls.wait()
            for _ in range(30):
                time.sleep(0.01)
        else:
            calls.set()
        check_received(send(buffer, case), reference.dispatched(case, rank), rank)

    with futures.ThreadPoolExecutor(2) as threads:
        list(threads.map(work, range(2)))


def test_a_buffer_is_not_destroyed_under_a_call():
    comm = Threads(2)
    in_call, refusal = threading.Event(), threading.Event()
    buffers = {}

    def work(rank):
        if rank == 2:
            assert in_call.wait(scaled(60))
            with pytest.raises(RuntimeError, match="in use by another thread"):
                buffers[0].destroy()
            assert buffers[0].runtime is not None
            return refusal.set()
        ranks = comm.rank(rank)
        gather = ranks.allgather

        def allgather(value):
            if rank == 0 and rank in buffers:  # its call asks for what rank 1 gives once the refusal has come
                in_call.set()
            return gather(value)

        ranks.allgather = allgather
        buffer = Buffer(None, 1 << 22, comm=ranks, explicitly_destroy=True)
        buffers[rank] = buffer
        assert rank == 0 or refusal.wait(scaled(60))
        buffer.suspend()
        buffer.resume()
        case = make_case([10, 10])
        check_received(send(buffer, case), reference.dispatched(case, rank), rank)
        buffer.destroy()
        assert buffer.runtime is None
        buffer.destroy()

    with futures.ThreadPoolExecutor(3) as threads:
        list(threads.map(work, range(3)))


EXIT = """
import torch, threading
from test_lifetime import Threads, make_case, send
from deep_ep import Buffer
buffers, results = [None, None], [None, None]
comm = Threads(2)
def work(rank):
    buffers[rank] = Buffer(None, 1 << 22, comm=comm.rank(rank), explicitly_destroy={explicitly})
    results[rank] = send(buffers[rank], make_case([5, 6]))
threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print("leaving", results[0][0].shape[0] > 0)
"""


@pytest.mark.parametrize("explicitly", [True, False])
def test_exit_with_live_buffers(explicitly):
    done = run_program(EXIT.format(explicitly=explicitly))
    assert "leaving True" in done.stdout and "destroyed" not in done.stdout
    said = [line for line in done.stderr.splitlines() if "ResourceWarning: deep_ep: rank" in line]
    assert len(said) == (2 if explicitly else 0) and all("never destroyed" in line for line in said), done.stderr


@pytest.mark.filterwarnings("error:deep_ep:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_dropped_buffer_warns_and_its_memory_goes(capsys):
    says = pytest.warns(ResourceWarning, match="rank 0: Buffer made with explicitly_destroy=True was never destroyed")
    for seen in (says, contextlib.nullcontext()):  # a filter that makes exceptions of warnings keeps no memory
        buffer = Buffer(None, 1 << 22, comm=Alone, explicitly_destroy=True)
        runtime = buffer.runtime
        with seen:
            del buffer
            gc.collect()
        with pytest.raises(RuntimeError, match="after destroy"):
            runtime.num_nodes()
    assert capsys.readouterr().out == ""


def test_a_forked_child_leaves_the_buffer_alone():
    # Collected, used, and at exit: in each case the child's threads are gone, and the child must not wait for them.
    program = """
import os, sys, torch, deep_ep
from test_errors import Alone
topk = torch.zeros(3, 2, dtype=torch.int64)
kept = deep_ep.Buffer(None, comm=Alone, explicitly_destroy=True)
dropped = deep_ep.Buffer(None, comm=Alone)
layout = kept.get_dispatch_layout(topk, 4), dropped.get_dispatch_layout(topk, 4)
child = os.fork()
if child == 0:
    for call in [lambda: kept.runtime.check(True)] + [kept.destroy] * (len(sys.argv) > 1):
        try:
            call()
            os._exit(1)
        except RuntimeError as error:
            assert "forked" in str(error), error
    assert deep_ep.metrics()["buffers"] == []
    del dropped, layout
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
kept.get_dispatch_layout(topk, 4)
kept.destroy()
"""
    for arguments in ([], ["destroy"]):
        done = run_program(program, *arguments)
        assert done.stdout == "" and "deep_ep" not in done.stderr, done.stderr
