#!/usr/bin/env python3
"""scripts/first_hour with a stand-in for the command, and two of it with the command itself.

usage: first_hour_test.py [TOOL]
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from held_ports import held_ports  # noqa: E402

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts/first_hour"
TOOL = sys.argv.pop() if len(sys.argv) > 1 else None
STAND_IN = r"""#!/bin/bash
echo "$RANK/$WORLD_SIZE $MASTER_ADDR $MASTER_PORT lanes=$DEEP_EP_INTERNODE_LANES: $*" >>"$LOG"
case "$*" in
  *--report) printf 'deep_ep           0.2.0\nGPUs              %s\nNICs              %s\n' "$GPUS" "$NICS" ;;
  *--bundle*) echo "the bundle" >"${@: -1}" ;;
  *--listen* | *--peer*)
    if [ ! -e "$LOG.tried" ] || [ -n "$ALONE" ]; then
      touch "$LOG.tried"
      echo "deep_ep: bootstrap over TCP: rank 0 waited 45 s for the others to call"
      exit 1
    fi ;;
  *--nic-test)
    printf '  FAIL atomics     lost\n       meaning: sums are wrong\n       to do:   change the cable\n' && exit 1 ;;
esac
"""


class FirstHour(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.top = pathlib.Path(self.folder.name)
        self.tool = self.top / "deep_ep"
        self.tool.write_text(STAND_IN)
        self.tool.chmod(0o755)

    def run_it(self, *options, **more):
        environment = {"LOG": str(self.top / "log"), "GPUS": "none", "NICS": "none", "DEEP_EP": str(self.tool), **more}
        done = subprocess.run([SCRIPT, *options], env={**os.environ, **environment}, capture_output=True, text=True)
        log = self.top / "log"
        calls = log.read_text().splitlines() if log.exists() else []
        return done, [call for call in calls if "--report" not in call and "--version" not in call]

    def test_without_gpu_and_nic_it_says_what_it_skips(self):
        report = self.top / "report"
        done, calls = self.run_it(report)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(
            [call.split(": ")[1] for call in calls[:-1]],
            ["doctor", "bench selftest", "bench intranode --check --quick", "bench low-latency --check --quick"],
        )
        self.assertEqual(len(re.findall(r"skipped: no RDMA device", done.stdout)), 1)
        self.assertEqual(len(re.findall(r"skipped: one machine", done.stdout)), 4)
        self.assertIn("the bundle", report.read_text())
        self.assertEqual(report.stat().st_mode & 0o077, 0)

    def test_a_failure_counts_and_the_next_steps_run(self):
        done, calls = self.run_it(self.top / "report", GPUS="8 x NVIDIA B200", NICS="8 x 400 Gb/s RoCE (mlx5_core)")
        self.assertEqual(done.returncode, 1)
        self.assertIn("[5/9] each NIC by itself           FAILED (exit status 1)", done.stdout)
        self.assertIn("to do:   change the cable", done.stdout)
        self.assertTrue(any(call.endswith(": bench intranode --check") for call in calls), calls)
        self.assertIn("1 of 9 steps failed", done.stdout)

    def test_two_machines_meet_at_the_same_ports(self):
        found = {}
        for role in (["--listen"], ["--peer", "node0"]):
            (self.top / "log").unlink(missing_ok=True)
            (self.top / "log.tried").unlink(missing_ok=True)
            done, calls = self.run_it(self.top / role[0], *role, "--port", "20000", GPUS="8 x H200", NICS="8 x mlx5")
            found[role[0]] = calls[5:-1]
            self.assertIn("NICs between the machines    ok", done.stdout)
        tests = [call.split(": ")[1] for calls in found.values() for call in calls if "nic-test" in call]
        # The other machine is not there at first.
        self.assertEqual(tests, 2 * ["doctor --nic-test --listen --port 20000"] + 2 * ["doctor --nic-test --peer node0:20000"])
        first = [call for call in found["--listen"] if "nic-test" not in call]
        second = [call for call in found["--peer"] if "nic-test" not in call]
        self.assertEqual([call.split(": ")[0].split()[2:] for call in first],
                         [["20001", "lanes="], ["20002", "lanes=1"], ["20003", "lanes=2"], ["20005", "lanes=4"], ["20006", "lanes="]])  # fmt: skip
        self.assertEqual([re.sub("^0/2 127.0.0.1", "1/2 node0", call) for call in first], second)
        self.assertRegex(first[0], r"doctor --nic-counters -- \S+/deep_ep bench internode --nodes 2 --check$")
        self.assertRegex(first[-1], r": bench low-latency --nodes 2 --check$")

    def test_a_machine_that_does_not_answer_is_waited_for_once(self):
        done, calls = self.run_it(self.top / "report", "--peer", "node0", "--wait", "0", GPUS="8 x H200", NICS="8 x mlx5", ALONE="yes")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(len(re.findall("skipped: the other machine did not answer within 0 s", done.stdout)), 3)
        self.assertFalse([call for call in calls if "--nodes" in call])

    def test_a_wrong_command_line_writes_nothing(self):
        old = self.top / "old"
        old.write_text("of yesterday")
        for options, text in (([], "REPORT"), ([old], "exists"), (["r", "--port", "80"], "--port is 80"), (["r", "--listn"], "--listn")):
            with self.subTest(options=options):
                done, calls = self.run_it(*options)
                self.assertEqual(done.returncode, 2)
                self.assertIn(text, done.stderr)
                self.assertEqual(calls, [])
        self.assertEqual(old.read_text(), "of yesterday")

    @unittest.skipUnless(TOOL, "needs the command")
    def test_two_of_this_host(self):
        environment = {**os.environ, "DEEP_EP": TOOL, "DEEP_EP_RDMA_WIRE": "local"}
        with held_ports(10) as port:
            both = [
                subprocess.Popen([SCRIPT, self.top / role[0], *role, "--quick", "--port", str(port)], env=environment, stdout=subprocess.PIPE, text=True)
                for role in (["--listen"], ["--peer", "127.0.0.1"])
            ]
            ended = [(process, process.communicate()[0]) for process in both]
        for process, text in ended:
            self.assertEqual(process.returncode, 0, text)
            self.assertIn("0 of 9 steps failed", text)
            self.assertNotIn("skipped", text)


if __name__ == "__main__":
    unittest.main()
