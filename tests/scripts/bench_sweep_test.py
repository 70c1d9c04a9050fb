"""scripts/bench_sweep.py with the tool itself, and with stand-ins for one that fails.

usage: bench_sweep_test.py TOOL
"""

import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts/bench_sweep.py"
TOOL = sys.argv.pop()


class BenchSweep(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.file = self.folder / "sweep.csv"

    def sweep(self, *options, status=0, tool=TOOL):
        command = [SCRIPT, "--deep-ep", tool, "--out", self.file, "--quick", "--device", "cpu", *options]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        self.assertEqual(done.returncode, status, done.stderr)
        return (done.stdout or done.stderr).strip().removeprefix(f"{self.file}: ")

    def stand_in(self, body):
        path = self.folder / "deep_ep"
        path.write_text(f'#!/bin/sh\n[ "$1" != --version ] || {{ echo 1.2.3; exit; }}\n{body}\n')
        path.chmod(0o755)
        return path

    def test_it_goes_on_where_it_was_interrupted(self):
        words = ("--mode", "intranode", "--topk", "4,32")
        all_new = "1 shapes measured, 1 impossible, 0 failed, 0 were there already"
        self.assertEqual(self.sweep(*words), all_new)
        whole = self.file.read_text()
        self.assertIn("skipped,--topk 32", whole)
        self.assertRegex(whole, r"(?m)^intranode,dispatch,fp8,cached,.*,cpu,")
        for key in ("source", "date", "hardware", "software", "command", "gb_per_s"):
            self.assertIn(f"# {key}: ", whole)
        self.assertEqual(self.sweep(*words), "0 shapes measured, 0 impossible, 0 failed, 2 were there already")
        self.assertEqual(self.file.read_text(), whole)
        # Cut within a line: nobody knows whether all lines of the shape before are there.
        for cut in (whole[:-10], "".join(whole.splitlines(keepends=True)[:-1])[:-10]):
            self.file.write_text(cut)
            self.assertEqual(self.sweep(*words), all_new)
            self.assertEqual(len(self.file.read_text().splitlines()), len(whole.splitlines()))

    def test_what_another_device_did_is_measured_here(self):
        words = ("--mode", "intranode", "--topk", "4")
        self.sweep(*words)
        elsewhere = self.file.read_text().replace(",cpu,", ",cuda,")
        self.file.write_text(elsewhere)
        self.assertEqual(self.sweep(*words), "1 shapes measured, 0 impossible, 0 failed, 0 were there already")
        self.assertTrue(self.file.read_text().startswith(elsewhere), "nothing is lost")

    def test_failures_are_said_and_tried_again(self):
        words = ("--mode", "low-latency", "--topk", "4")
        for body, why in (
            ("echo 'deep_ep: no such luck' >&2; exit 1", "no such luck"),
            ("exit 7", "it ended with status 7"),
            ("echo nothing", "the benchmark printed no measurement"),
            ("sleep 1000 & sleep 1000", "it took too long"),
            ("echo 'deep_ep: --iterationz: what?' >&2; exit 2", "--iterationz: what?"),
            # As many ranks as the launcher starts: a mistake in the command, not in the shape.
            ("echo 'deep_ep: --ranks 4: 2 processes were started' >&2; exit 2", "--ranks 4: 2 processes were started"),
        ):
            failed = "0 shapes measured, 0 impossible, 1 failed, 0 were there already"
            seconds = ("--seconds", "1") if "sleep" in body else ()
            self.assertEqual(self.sweep(*words, *seconds, tool=self.stand_in(body), status=1), failed)
            rows = [line for line in self.file.read_text().splitlines() if line.startswith("low-latency")]
            self.assertEqual(len(rows), 1, "the failure before is gone")
            self.assertIn(f"failed,{why}", rows[0])

    def test_shapes_options_and_launcher(self):
        note = self.stand_in(f'echo "$*" >>{self.folder}/calls; exit 1')
        self.sweep("--mode", "intranode,internode", "--hidden", "256,512", "--topk", "4", "--experts-per-node", "8", "--groups", "1,2",
                   "--tokens", "8,16", "--ranks", "4", "--launcher", "env A=1", "--", "--iterations", "3", tool=note, status=1)  # fmt: skip
        calls = (self.folder / "calls").read_text().splitlines()
        self.assertEqual(len(calls), 2 * 2 + 2 * 2 * 2)
        self.assertEqual(
            calls[0], "bench intranode --csv --device cpu --ranks 4 --tokens 8 --hidden 256 --topk 4 --experts 8 --iterations 3"
        )
        self.assertEqual(
            calls[-1],
            "bench internode --csv --device cpu --ranks 4 --nodes 2 --tokens 16 --hidden 512 --topk 4 --experts 16 --groups 2 --iterations 3",
        )

    def test_what_it_refuses(self):
        self.assertIn("--launcher: --ranks is missing", self.sweep("--launcher", "mpirun", status=2))
        self.assertIn("argument --topk: '4;8', allowed: whole numbers", self.sweep("--topk", "4;8", status=2))
        self.assertIn(
            "argument --mode: 'all', allowed: intranode, internode, low-latency", self.sweep("--mode", "all", status=2)
        )
        self.assertIn("--deep-ep /nonexistent: ", self.sweep(status=2, tool="/nonexistent"))
        self.file.write_text("what,is,this\n")
        self.assertIn("its columns are not those of", self.sweep(status=2))
        self.assertEqual(self.file.read_text(), "what,is,this\n")


if __name__ == "__main__":
    unittest.main()
