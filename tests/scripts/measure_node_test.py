#!/usr/bin/env python3
"""scripts/measure_node: what it builds for, that it goes on where it was interrupted, and, given the command, all it measures
on CPU ranks. Stand-ins play nvidia-smi, CMake and, where only the order counts, the command."""

import csv
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts/measure_node"
TOOL = sys.argv.pop() if len(sys.argv) > 1 and not sys.argv[-1].startswith("-") else ""
NVIDIA_SMI = r"""
[ -n "$GPU" ] || exit 9
case "$*" in
  *=name*) printf '%s\n%s\n' "$GPU" "$GPU" ;;
  *=compute_cap*) printf '%s\n%s\n' "$CAPABILITY" "$CAPABILITY" ;;
  *=driver_version*) printf '580.1\n580.1\n' ;;
esac
"""
# Low-latency calls end badly, and those with masks stay as long as the file `stuck` is there.
COMMAND = 'echo "$*" >> calls; case "$*" in *masking*) [ ! -f stuck ] || exec sleep 100 ;; *low-latency*) echo wrong >&2; exit 7 ;; esac\necho benchmark\n'


class MeasureNode(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.top = pathlib.Path(folder.name)
        (self.top / "scripts").mkdir()
        shutil.copy(SCRIPT, self.top / "scripts")
        programs = {"scripts/cuda_environment": "", "cmake": "exit $STATUS", "nvidia-smi": NVIDIA_SMI, "deep_ep": COMMAND,
                    "mpirun": 'while [ "${1##*/}" != deep_ep ]; do shift; done; exec "$@"'}  # fmt: skip
        for name, script in programs.items():
            (self.top / name).write_text("#!/bin/bash\n" + script)
            (self.top / name).chmod(0o755)

    def start(self, *arguments, **variables):
        environment = {**os.environ, "PATH": f"{self.top}:{os.environ['PATH']}", "BIN": str(self.top), "COMMIT": "abc", **variables}
        command = [self.top / "scripts/measure_node", self.top / "out", *arguments]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run_it(self, *arguments, status=0, **variables):
        process = self.start(*arguments, **variables)
        said = process.communicate()[0]
        self.assertEqual(process.returncode, status, said)
        return said

    def calls(self):
        return (self.top / "calls").read_text().splitlines()

    def test_it_builds_for_the_gpus_that_are_there(self):
        for gpu, capability, architecture in (("NVIDIA B200", "10.0", "100a-real"), ("NVIDIA H200", "9.0", "90a-real")):
            (self.top / "cmake").write_text('#!/bin/bash\necho "$@"; exit $STATUS\n')
            said = self.run_it("build", GPU=gpu, CAPABILITY=capability, STATUS="0", CMAKE_ARGUMENTS="-DX=1 -DY=2")
            self.assertIn(f"2 x {gpu} of one host\ndeep_ep, commit abc; driver 580.1\n", said)
            configured = (self.top / "out/build_configure.log").read_text()
            self.assertIn(f"-DDEEP_EP_GIT_HASH=abc -DCMAKE_CUDA_ARCHITECTURES={architecture} -DX=1 -DY=2", configured)
        self.assertRegex(self.run_it("build", status=1, GPU=gpu, STATUS="3"), r"build +configure +FAILED \(3\)")
        self.assertIn("nvidia-smi shows no GPU", self.run_it(status=2, GPU=""))
        self.assertIn("there is no part 'bench', allowed: build, tests", self.run_it("bench", status=2))

    def test_the_programs_of_tests_are_built(self):
        for file in SCRIPT.parents[1].glob("tests/**/CMakeLists.txt"):
            for name in re.findall(r"^deep_ep_add_test_program\((\w+)", file.read_text(), re.M):
                (self.top / name).symlink_to("/bin/true")
        self.assertRegex(self.run_it("tests", GPU="NVIDIA B200", CAPABILITY="10.0"), "tests +cluster +ok")

    def test_it_goes_on_behind_an_interruption(self):
        (self.top / "stuck").touch()
        process = self.start("low_latency", PRESET="host")
        while not (self.top / "calls").exists() or len(self.calls()) < 2:
            self.assertIsNone(process.poll())
            time.sleep(0.05)
        process.terminate()
        process.communicate()
        state = json.loads((self.top / "out/state.json").read_text())
        self.assertEqual([word for word, _, _ in state["low_latency"].values()], ["FAILED (7)"])
        (self.top / "stuck").unlink()
        self.assertRegex(self.run_it("low_latency", PRESET="host", status=1), r"calls +FAILED \(7\) +0 s   wrong\nlow_latency +masking +ok")
        self.assertEqual(len(self.calls()), 3)  # only the one that had not ended
        self.run_it(PRESET="host", status=1)
        self.assertFalse([call for call in self.calls()[3:] if "masking" in call])  # the part has ended
        before = len(self.calls())
        self.run_it("low_latency", PRESET="host", status=1)
        self.assertEqual(len(self.calls()), before + 2)  # named, it begins again
        self.assertRegex(self.run_it("between", PRESET="host", RANKS="1", status=1), "between +2x1_25 +skipped .*needs 2 GPUs or more")

    @unittest.skipUnless(TOOL, "needs the command")
    def test_all_that_needs_no_gpu(self):
        (self.top / "mpirun").unlink()
        said = self.run_it(PRESET="host", BIN=str(pathlib.Path(TOOL).parent))
        self.assertIn("measure_node: done; to send: tar czf", said)
        shapes = {}
        for file in (self.top / "out").glob("*.csv"):
            head, rows = [], list(csv.DictReader(line for line in file.read_text().splitlines() if not line.startswith("#")))
            head = [line[2:].split(": ")[0] for line in file.read_text().splitlines() if line.startswith("#")]
            self.assertEqual(head, ["source", "date", "hardware", "software", "command", "gb_per_s"])
            self.assertEqual({row["status"] for row in rows}, {"ok"})
            shapes[file.stem] = {(row["ranks"], row["nodes"], row["tokens"]) for row in rows}
        self.assertEqual(shapes, {
            "normal_2": {("2", "1", "2")}, "normal_4": {("2", "1", "4")}, "low_latency_calls": {("2", "1", "1"), ("2", "1", "3")},
            "low_latency_masking": {("2", "1", "1"), ("2", "1", "3")}, "between_2x1_25": {("2", "2", "4")},
            "between_2x1_50": {("2", "2", "4")}, "between_2x1_low_latency_never": {("2", "2", "3")},
        })  # fmt: skip
        self.assertIn("simulated:rate=50", (self.top / "out/between_2x1_50.csv").read_text())


if __name__ == "__main__":
    unittest.main()
