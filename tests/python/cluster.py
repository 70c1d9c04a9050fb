"""Ranks as processes of this machine: started once, they run one function after the other."""

import functools
import inspect
import os
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from time_scale import scaled


def _serve(rank, size, store, connection):
    # Only a test that hangs waits so long. Ranks of a buffer with masking must have the same, so it does not depend on the load.
    os.environ.setdefault("DEEP_EP_TIMEOUT_S", "80")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    group = dist.new_group(list(range(size)))
    while True:
        message = connection.recv()
        if message is None:
            break
        function, arguments = message
        function = getattr(function, "__wrapped__", function)  # of on_ranks
        try:
            connection.send(("result", function(group, *arguments)))
        except BaseException:
            connection.send(("failure", traceback.format_exc()))
    dist.destroy_process_group()


class Cluster:
    """``size`` ranks in a gloo group. ``run(function, *arguments)`` calls ``function(group, *arguments)`` on each."""

    def __init__(self, size):
        context = mp.get_context("spawn")
        self.size = size
        self.folder = tempfile.TemporaryDirectory()
        self.connections, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, f"{self.folder.name}/store", there), daemon=True)
            process.start()
            there.close()
            self.connections.append(here)
            self.processes.append(process)

    def run(self, function, *arguments, ranks=None):
        """Results of all ranks (``ranks``: only of these). AssertionError with every rank's trace if one fails."""
        ranks = range(self.size) if ranks is None else ranks
        self.begin(ranks, function, *arguments)
        return self.end(ranks)

    def begin(self, ranks, function, *arguments):
        for rank in ranks:
            self.connections[rank].send((function, arguments))

    def end(self, ranks):
        timeout = scaled(150)  # compiled layers take 90 s on GPUs
        results, failures = [], []
        for rank in ranks:
            if not self.connections[rank].poll(timeout):
                failures.append(f"rank {rank} gave no answer within {timeout} s")
                continue
            try:
                kind, value = self.connections[rank].recv()
            except EOFError:
                kind, value = "failure", "the process ended"
            if kind == "failure":
                failures.append(f"rank {rank}:\n{value}")
            results.append(value)
        if failures:
            self.close(kill=True)
        assert not failures, "\n".join(failures)
        return results

    def close(self, kill=False):
        for connection, process in zip(self.connections, self.processes):
            if kill:
                process.kill()
            elif process.is_alive():
                connection.send(None)
        for process in self.processes:
            process.join(scaled(15))
            if process.is_alive():
                process.kill()
                process.join()

    @property
    def usable(self):
        return all(process.is_alive() for process in self.processes)


def on_ranks(size):
    """Makes a test of ``function(group, ...)``, which each rank of a cluster of this size runs."""

    def decorate(function):
        @functools.wraps(function)
        def test(ranks, **arguments):
            ranks(size).run(test, *arguments.values())

        own = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([own, *list(inspect.signature(function).parameters.values())[1:]])
        return test

    return decorate
