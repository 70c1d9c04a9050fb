#!/usr/bin/env python3
"""scripts/run_gtest.py with programs that look like GoogleTest's and go wrong in many ways."""

import pathlib
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"

# Runs `tests`, a dictionary from the names of tests of the suite S to code, as GoogleTest would.
PROGRAM = """#!{python}
import os, signal, sys, time
tests, between, after, status = {tests!r}, {between!r}, {after!r}, {status}
def say(*text):
    print(*text, flush=True)
if "--gtest_list_tests" in sys.argv:
    say("S." if tests else "", *("\\n  " + name for name in tests))
    sys.exit(0)
chosen = [a.split("=")[1].split(":") for a in sys.argv if a.startswith("--gtest_filter=")][0]
mine = [name for name in tests if "S." + name in chosen]
for name in mine:
    say("[ RUN      ] S." + name)
    end = "      OK"
    exec(tests[name])
    say(f"[ {{end}} ] S.{{name}} (0 ms)")
    exec(between)
say(f"[==========] {{len(mine)}} tests from 1 test suite ran. (0 ms total)")
exec(after)
sys.exit(status)
"""
FAIL = "end = ' FAILED '; status = 1"
SKIP = "end = ' SKIPPED'; say('a_test.cpp:1: Skipped\\n' + {!r})"
SLEEP = "time.sleep(60)"
KILL = "os.kill(os.getpid(), signal.SIGSEGV)"
REPORT = "say('x.cpp:1:2: runtime error: signed integer overflow')"


class RunGtestTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.result = self.folder / "test_results" / "program.xml"

    def command(self, tests, *options, between="", after="", status=0):
        program = self.folder / "program"
        program.write_text(
            PROGRAM.format(python=sys.executable, tests=tests, between=between, after=after, status=status)
        )
        program.chmod(0o755)
        return [sys.executable, "-B", SCRIPTS / "run_gtest.py", program, self.result, *options]

    def run_it(self, *arguments, **how):
        """Returns the exit status and {name: "passed", "skipped: why" or "failed: why"}, and keeps what was printed."""
        process = subprocess.run(self.command(*arguments, **how), capture_output=True, text=True, timeout=60)
        self.printed = process.stdout + process.stderr
        return process.returncode, self.states()

    def states(self):
        states = {}
        for case in ElementTree.parse(self.result).getroot().iter("testcase"):
            node = next(iter(case), None)
            states[case.get("name")] = "passed" if node is None else f"{node.tag}: {node.get('message')}"
        return states

    def test_every_end(self):
        """Of tests, and of the program outside of them: what run_gtest.py makes of it. P: passed."""
        whole, ended, report = "program as a whole", "failure: the process ended: ", "failure: a sanitizer's report"
        late = ["--seconds", "1"]
        for tests, options, how, states in (
            ({"A": "", "B": ""}, [], {}, {"S.A": "P", "S.B": "P"}),
            ({"A": FAIL, "B": ""}, [], {}, {"S.A": "failure: failed", "S.B": "P"}),
            ({"A": SKIP.format("no NIC")}, [], {}, {"S.A": "skipped: no NIC"}),
            ({"A": "", "B": KILL, "C": ""}, [], {}, {"S.A": "P", "S.B": ended + "signal SIGSEGV", "S.C": "P"}),
            ({"A": "os._exit(0)", "B": ""}, [], {}, {"S.A": ended + "status 0", "S.B": "P"}),
            ({"A": ""}, [], {"between": "os._exit(0)"}, {"S.A": "P", whole: ended + "status 0, outside of tests"}),
            ({"A": ""}, [], {"between": KILL}, {"S.A": "P", whole: ended + "signal SIGSEGV, outside of tests"}),
            ({"A": ""}, [], {"status": 66}, {"S.A": "P", whole: ended + "status 66, outside of tests"}),
            ({"A": REPORT, "B": ""}, [], {}, {"S.A": report, "S.B": "P"}),
            ({"A": REPORT, "B": "", "C": KILL}, [], {}, {"S.A": report, "S.B": "P", "S.C": ended + "signal SIGSEGV"}),
            ({"A": ""}, [], {"after": REPORT}, {"S.A": "P", whole: report + ", outside of tests"}),
            ({"A": SLEEP, "B": ""}, late, {}, {"S.A": "failure: no end after 1 s", "S.B": "P"}),
            ({"A": ""}, late, {"after": SLEEP}, {"S.A": "P", whole: "failure: no end after 1 s, outside of tests"}),
        ):
            with self.subTest(states):
                status, seen = self.run_it(tests, *options, **how)
                self.assertEqual(status, int(any(state.startswith("failure") for state in states.values())))
                self.assertEqual(set(seen), set(states))
                for name, state in states.items():
                    self.assertIn("passed" if state == "P" else state, seen[name])
        self.run_it({"A": "", "B": ""}, between="say('last words')\nif name == 'A': os._exit(1)")
        self.assertIn("last words", self.printed)

    def test_no_process_gets_more_than_so_many_tests(self):
        note = f"print(os.getpid(), file=open('{self.folder}/pids', 'a'))"
        tests = {name: note for name in "ABCDE"}
        status, states = self.run_it(tests, "--at-once", "2")
        pids = (self.folder / "pids").read_text().split()
        self.assertEqual((status, states), (0, {f"S.{name}": "passed" for name in "ABCDE"}))
        self.assertEqual([pids.count(pid) for pid in dict.fromkeys(pids)], [2, 2, 1])

    def test_the_deadline_names_what_did_not_run(self):
        status, states = self.run_it({"A": "", "B": SLEEP, "C": ""}, "--deadline", "2")
        why = "the deadline of 2 s for all tests came"
        self.assertEqual(
            (status, states), (1, {"S.A": "passed", "S.B": f"failure: {why}", "S.C": f"failure: not run: {why}"})
        )


if __name__ == "__main__":
    unittest.main()
