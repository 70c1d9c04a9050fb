"""A rank that ends while its peer is in a call: what both processes of a cell of the table in test_leaving.py run."""

import faulthandler
import os
import signal
import sys
import time
from unittest import mock

import torch
import torch.distributed as dist

import deep_ep
from deep_ep.errors import InvalidArgument

HIDDEN, TOPK, EXPERTS, MOST = 128, 2, 4, 16


def rows(rank):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(5, HIDDEN, generator=generator).bfloat16()
    idx = torch.rand(5, EXPERTS, generator=generator).topk(TOPK, dim=1).indices
    return x, idx, torch.rand(5, TOPK, generator=generator)


class Calls:
    """The calls of one rank. With ``masks`` they go on without a rank that has left."""

    def __init__(self, group, masks):
        size = deep_ep.Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, 2, EXPERTS)
        options = {"enable_shrink": True} if masks else {}
        self.buffer = deep_ep.Buffer(group, 1 << 20, size, low_latency_mode=True, explicitly_destroy=True, **options)
        self.x, self.idx, self.weights = rows(group.rank())

    def dispatch(self, **options):
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(self.idx, EXPERTS)
        return self.buffer.dispatch(self.x, None, per_rank, None, in_rank, per_expert, self.idx, self.weights, **options)

    def combine(self, received):
        return self.buffer.combine(received[0], received[4])

    def low_latency(self, **options):
        return self.buffer.low_latency_dispatch(self.x, self.idx, MOST, EXPERTS, use_fp8=False, **options)

    def low_latency_combine(self, received):
        return self.buffer.low_latency_combine(received[0], self.idx, self.weights, received[2])


def before(calls, where):
    """What both ranks do first. Returns what rank 0 does next, when rank 1 has ended."""
    if where == "dispatch":
        calls.dispatch()
        return calls.dispatch
    if where == "combine":
        received = calls.dispatch()
        return lambda: calls.combine(received)
    if where == "destroy":
        calls.dispatch()
        return lambda: calls.buffer.destroy()
    received = calls.low_latency()
    if where == "low-latency combine":
        return lambda: calls.low_latency_combine(received)
    return calls.low_latency if where == "low-latency dispatch" else lambda: calls.low_latency(return_recv_hook=True)[4]()


def end(calls, how, where, stay):
    """Rank 1. ``stay()`` returns once rank 0 has ended its call."""
    if how == "exception":
        raise ValueError("a mistake in the program")
    if how == "Ctrl-C":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    if how in ("SIGTERM", "SIGKILL"):
        os.kill(os.getpid(), getattr(signal, how))
        time.sleep(60)
    if how == "_exit":
        os._exit(3)
    if how == "exit with a live buffer":
        sys.modules[__name__].kept = calls
        sys.exit(3)
    if how == "out of memory":
        with mock.patch("deep_ep.results.Results.make_in_heap", side_effect=MemoryError("no memory for results")):
            try:
                calls.dispatch()
            except MemoryError:
                stay()
                try:
                    calls.dispatch()
                except deep_ep.errors.Error as error:
                    return str(error)
        return "no error"
    if how == "refused, then left":
        try:
            calls.buffer.low_latency_dispatch(calls.x, calls.idx, MOST, EXPERTS + 1)
        except InvalidArgument:
            pass
    if how in ("del", "refused, then left"):
        del calls.buffer
        stay()
    if how == "never":
        stay()
    return "left"


def run(rank, store, connection, how, where, masks, deadline):
    os.environ["DEEP_EP_TIMEOUT_S"] = str(deadline)
    sys.stderr = open(f"{store}.{rank}", "w", buffering=1)  # shown if the cell fails
    faulthandler.enable(sys.stderr)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    if where == "constructor":
        if rank == 1:
            return connection.recv() if how == "never" else end(None, how, where, connection.recv)
        begin = time.monotonic()
        try:
            Calls(dist.group.WORLD, masks)
            connection.send((time.monotonic() - begin, "made", None))
        except Exception as error:
            connection.send((time.monotonic() - begin, f"{type(error).__name__}: {error}", None))
        return None
    calls = Calls(dist.group.WORLD, masks)
    call = before(calls, where)
    if rank == 1:
        connection.send("ready")
        connection.recv()
        said = end(calls, how, where, connection.recv)
        connection.send(said)
        return None
    connection.recv()
    begin, status = time.monotonic(), None
    try:
        call()
        said = "returned"
        if masks and where != "destroy":
            status = torch.zeros(2, dtype=torch.int32)
            calls.buffer.low_latency_query_mask_buffer(status)
            status = status.tolist()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    connection.send((time.monotonic() - begin, said, status))
    os._exit(0)  # not behind the end of a group whose ranks have ended
