"""scripts/test with stand-ins for all that it starts: what runs beside what, and what is left when something fails."""

import fnmatch
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

# Each writes when it begins and ends. A compiler that hangs is in a process group of its own, as under ninja. Tests of asan
# and tsan end when the next preset has been built, or is being built. All waits are long: beside other work, what is built
# ahead (nice 19) may not run for half a minute.
NOTE = 'note() { echo "$*" >>"$LOG"; }; seen() { for _ in $(seq 1800); do grep -qx "$1" "$LOG" && return; sleep 0.05; done; exit 9; }'
BUILD = f"""#!/bin/bash
{NOTE}
note "build $*"
[ "$1" != cuda ] || note "for ${{DEEP_EP_CUDA_ARCHITECTURES:-all}}"
[ "$1" != "$HANGS" ] || {{ set -m; sleep 600 & note "pid $!"; wait; }}
[ "$1" != "$FAILS" ] || {{ echo "no compiler for $1"; exit 3; }}
note "nice $(nice) $1"
note "built $1"
"""
CTEST = f"""#!/bin/bash
{NOTE}
preset=$2
if [ "$3 $4" = "--label-regex rxe" ]; then
  echo "<testsuite skipped=\\"${{RXE_SKIPPED:-0}}\\"><testcase name='two' status='run' time='1'/></testsuite>" >"build/$preset/$6"
  note "ran rxe"
  exit
fi
note "run $preset"
note "faults ${{DEEP_EP_TEST_FAULTS:-}} $preset"
[ -z "${{DEEP_EP_CUDA_ARCHITECTURES:-}}" ] || note "architectures leak"
while [ $# -gt 0 ]; do [ "$1" != --label-exclude ] || note "leaves out $2 $preset"; shift; done
case $preset in
  asan) seen "${{AWAITED:-built tsan}}" ;;
  tsan) seen "built cuda" ;;
esac
mkdir -p build/$preset
echo '<testsuite><testcase name="one" status="run" time="1"/></testsuite>' >build/$preset/tests.xml
note "ran $preset"
"""
# The file "verified" names what has run.
VERIFIED = f"""#!/bin/bash
{NOTE}
[ "$1" = record ] && note "record $2 $3" && exit
[ "$1" = show ] && echo "hash_of_$2" && exit
grep -qx "$2" verified 2>/dev/null
"""


class ScriptsTest(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        (self.folder / "scripts").mkdir()
        (self.folder / "bin").mkdir()
        for name in ("test", "test_summary.py"):
            shutil.copy(ROOT / "scripts" / name, self.folder / "scripts")
        stubs = {"scripts/setup": "#!/bin/sh\n", "scripts/verified": VERIFIED, "scripts/build": BUILD, "bin/ctest": CTEST,
                 "bin/nvidia-smi": "#!/bin/sh\nexit 1\n"}
        for name, text in stubs.items():
            path = self.folder / name
            path.write_text(text)
            path.chmod(0o755)
        self.log = self.folder / "log"
        self.log.touch()

    def start(self, *presets, **variables):
        environment = dict(os.environ, LOG=str(self.log), PATH=f"{self.folder}/bin:{os.environ['PATH']}", FAILS="", HANGS="")
        return subprocess.Popen([self.folder / "scripts/test", *presets], env=environment | variables, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def lines(self):
        return self.log.read_text().splitlines()

    def test_the_quick_tier_leaves_out_what_ran_and_has_not_changed(self):
        (self.folder / "verified").write_text("rxe\ncuda\n")
        process = self.start("--quick", "host", "asan", "tsan", "cuda")
        output, _ = process.communicate(timeout=90)
        self.assertEqual(process.returncode, 0, output)
        self.assertIn("RoCE in emulated machines is left out", output)
        lines = self.lines()
        self.assertEqual([line for line in lines if line.startswith("ran ")], ["ran host", "ran asan", "ran tsan", "ran cuda"])
        self.assertEqual([line for line in lines if line.startswith("build ")],
                         [f"build {preset} deep_ep_quick" for preset in ("host", "asan", "tsan", "cuda")])
        self.assertIn("for 90a-real", lines)
        self.assertNotIn("architectures leak", lines)  # programs warn of variables that they do not know
        self.assertIn("faults 300 host", lines)
        self.assertEqual([line for line in lines if line.startswith("leaves out ")],
                         [f"leaves out ^(rxe|full)$ {preset}" for preset in ("host", "asan", "tsan", "cuda")])
        self.assertFalse([line for line in lines if line.startswith("record")])

    def test_the_quick_tier_runs_and_records_what_has_changed(self):
        process = self.start("--quick", "host", "asan", "tsan", "cuda")
        output, _ = process.communicate(timeout=90)
        self.assertEqual(process.returncode, 0, output)
        lines = self.lines()
        self.assertIn("build host deep_ep_quick deep_ep_rxe_tests deep_ep_rxe_machine", lines)
        self.assertIn("ran rxe", lines)
        self.assertIn("for all", lines)
        self.assertEqual([line for line in lines if line.startswith("record")], ["record rxe hash_of_rxe", "record cuda hash_of_cuda"])

    def test_under_thread_sanitizer_the_quick_tier_has_the_tests_that_mistakes_need(self):
        """tests/mutants: mistakes that only ThreadSanitizer sees."""
        text = (ROOT / "tests/CMakeLists.txt").read_text()
        patterns = re.search(r"string\(JOIN \":\" quick_filter\s+(.*?)\)", text, re.DOTALL)[1].split()
        wanted = [line.split()[-1] for file in (ROOT / "tests/mutants").glob("*.txt") for line in file.read_text().splitlines()
                  if re.match(r"[a-z0-9-]+: cluster tsan ", line)]
        self.assertGreater(len(wanted), 5)
        for test in wanted:
            self.assertTrue(any(fnmatch.fnmatch(test, pattern) for pattern in patterns), test)

    def test_a_build_beside_tests_that_fails_ends_all_and_is_shown(self):
        process = self.start("asan", "tsan", "cuda", FAILS="tsan", AWAITED="build tsan")
        output, _ = process.communicate(timeout=90)
        self.assertEqual(process.returncode, 3, output)
        self.assertIn("no compiler for tsan", output)
        self.assertNotIn("run tsan", self.lines())

    def test_nothing_is_left_of_a_build_beside_tests(self):
        process = self.start("asan", "tsan", HANGS="tsan", AWAITED="build tsan")
        until = time.monotonic() + 100
        builder = None
        while builder is None or "ran asan" not in self.lines():
            self.assertLess(time.monotonic(), until)
            time.sleep(0.05)
            builder = next((int(line.split()[1]) for line in self.lines() if line.startswith("pid ")), None)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=100)
        self.assertEqual(process.returncode, 143)
        until = time.monotonic() + 100
        while pathlib.Path(f"/proc/{builder}/cmdline").exists() and pathlib.Path(f"/proc/{builder}/cmdline").read_text():
            self.assertLess(time.monotonic(), until)
            time.sleep(0.05)


if __name__ == "__main__":
    unittest.main()
