"""What `bench --spawn` promises: processes that are ranks, of one host or of several, and that end together with one status.

usage: spawn_test.py TOOL [NAME ...]
"""

import os
import pathlib
import signal
import subprocess
import sys
import time
import unittest

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[1] / folder) for folder in ("python", "support")]
from held_ports import held_ports  # noqa: E402
from time_scale import scaled  # noqa: E402

TOOL = os.path.abspath(sys.argv[1])
PATIENCE = scaled(60)  # seconds for anything; nothing should take more than a few
# Of launchers under which this test itself may run.
OTHERS = ("SLURM_", "OMPI_", "PMI", "MASTER_", "DEEP_EP_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_")
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(OTHERS)}
SIZES = "--device cpu --experts 4 --topk 2 --tokens 4 --hidden 256 --check".split()


def start(*words, **variables):
    command = [TOOL, "bench", *words, *SIZES]
    return subprocess.Popen(command, env=CLEAN | variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def end(process):
    """(status, standard output, standard error)."""
    try:
        out, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    return process.returncode, out, errors


def is_running(process):
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class Spawn(unittest.TestCase):
    def wait_for(self, condition):
        last = time.monotonic() + PATIENCE
        while not condition():
            self.assertLess(time.monotonic(), last)
            time.sleep(0.02)

    def test_ranks_of_one_host(self):
        status, out, errors = end(start("intranode", "--spawn", "2", "--iterations", "2"))
        self.assertEqual(status, 0, errors)
        self.assertIn("2 ranks (processes, TCP)", out)
        self.assertIn("\nEvery checked result is exact.\n", out)

    def test_ranks_of_two_hosts(self):
        with held_ports() as port:
            there = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            hosts = [start("internode", "--spawn=2", "--iterations", "2", RANK=str(node), **there) for node in range(2)]
            (status, out, errors), (status_1, out_1, errors_1) = map(end, hosts)
        self.assertEqual((status, status_1), (0, 0), errors + errors_1)
        self.assertIn("4 ranks (processes, TCP)", out)
        self.assertIn("\nEvery checked result is exact.\n", out)
        self.assertEqual(out_1, "")

    def test_the_first_failure_ends_the_others_and_is_named(self):
        status, _, errors = end(start("low-latency", "--spawn", "3"))
        self.assertEqual(status, 2, errors)
        self.assertIn("deep_ep: --experts 4: must be a multiple of the 3 ranks\n", errors)
        process = start("intranode", "--spawn", "2", "--iterations", "100000")
        ranks = self.ranks_of(process)
        os.kill(ranks[1], signal.SIGKILL)
        status, _, errors = end(process)
        self.assertEqual(status, 128 + signal.SIGKILL, errors)
        self.assertIn("deep_ep: rank 1 ended with signal 9 (Killed); the other ranks of this host are ended\n", errors)
        self.assertFalse(any(map(is_running, ranks)))

    def test_ranks_end_with_the_process_that_started_them(self):
        for given in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
            with self.subTest(given):
                process = start("intranode", "--spawn", "2", "--iterations", "100000")
                ranks = self.ranks_of(process)
                process.send_signal(given)
                self.assertEqual(process.wait(PATIENCE), -given)
                self.wait_for(lambda: not any(map(is_running, ranks)))
                end(process)

    def ranks_of(self, process):
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
        self.wait_for(lambda: len(children.read_text().split()) == 2)
        process.stdout.readline()  # the ranks have met
        return [int(rank) for rank in children.read_text().split()]

    def test_a_rank_starts_no_others(self):
        for rank in (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"},
            {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node0"},
        ):
            status, _, errors = end(start("intranode", "--spawn", "2", **rank))
            text = "deep_ep: --spawn 2: this process is one of several already; leave it out\n"
            self.assertEqual((status, errors), (2, text))


unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
