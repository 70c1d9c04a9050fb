"""The script that measures what calls cost: every call of it works, and its numbers add up."""

import call_times
import torch.multiprocessing as mp
from common import free_port


def test_on_cpu_ranks(monkeypatch, capfd):
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    mp.spawn(call_times.run_rank, args=(call_times.parse(["--num-processes", "2"]),), nprocs=2)
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("[host] ")]
    names = [line.partition(": ")[0] for line in lines]
    assert len(names) == len(set(names)) == 11
    for line in lines:
        whole, python = (float(part.split()[-2]) for part in line.partition(": ")[2].replace(" a call", "").split(", of which"))
        assert 0 < python < 1e6 and 0 < whole < 1e7, line


def test_native_calls_are_counted():
    class Native:
        size = 3

        def add(self, a, b):
            return a + b

    timed = call_times.Timed(Native())
    assert timed.size == 3 and timed.seconds == 0.0
    assert timed.add(1, 2) == 3
    once = timed.seconds
    assert once > 0.0 and timed.add(2, 2) == 4 and timed.seconds > once
