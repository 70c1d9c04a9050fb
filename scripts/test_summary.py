#!/usr/bin/env python3
"""Adds up what ctest (--output-junit) and pytest (--junitxml) wrote for several builds, says what was skipped and why, and judges.

usage: test_summary.py [--left-out=TEXT...] NAME=FILE...
Several files of the same name are added up. A run of scripts/run_gtest.py is one test to ctest: its own tests are read from test_results/ beside FILE.
A line for each failed test has the command that runs it again.
Exits 0 only when every file is there, something passed in each, and nothing failed anywhere.
"""

import collections
import pathlib
import re
import shlex
import sys
import xml.etree.ElementTree as ElementTree


class Results:
    def __init__(self):
        self.passed, self.failed, self.skipped = [], [], collections.defaultdict(list)
        self.seconds, self.left_out = 0.0, 0

    def read(self, path):
        """Adds a file of ctest, pytest or run_gtest.py. Returns how many of its tests failed; an unreadable file is one."""
        try:
            root = ElementTree.parse(path).getroot()
        except ElementTree.ParseError as error:
            self.failed.append(f"{path} is not readable: {error}")
            return 1
        failed_before, program = len(self.failed), root.get("name")
        self.left_out += int(root.get("left_out") or 0)
        for case in root.iter("testcase"):
            name, message = case.get("name"), case.find("skipped")
            details = path.parent / "test_results" / f"{name}.xml"
            if details.exists():
                if self.read(details) == 0 and case.get("status") != "run":
                    self.fail(name, f"ctest --preset {path.parent.name} -R '^{name}$'")  # all its tests passed, and yet
                continue
            self.seconds += float(case.get("time") or 0)
            of_ctest = case.get("status")
            broken = case.find("failure") is not None or case.find("error") is not None
            if of_ctest is None and message is not None:
                self.skipped[message.get("message") or "no reason given"].append(name)
            elif of_ctest == "run" or (of_ctest is None and not broken):
                self.passed.append(name)
            elif message is not None and message.get("message", "").startswith("SKIP_"):
                self.skipped[skip_reason(case.findtext("system-out") or "")].append(name)
            else:
                # Failed, timed out, or could not be started.
                folder = path.parent.parent
                if path.parent.name == "test_results":
                    alone = "" if name.startswith(program + " ") else f" --gtest_filter={shlex.quote(name)}"
                    self.fail(name, f"{'setarch -R ' if folder.name == 'tsan' else ''}{folder}/bin/{program}{alone}")
                elif of_ctest is not None:
                    self.fail(name, f"ctest --preset {path.parent.name} -R {shlex.quote(f'^{re.escape(name)}$')}")
                else:
                    self.fail(name, f"make test T={shlex.quote(name)}")
        return len(self.failed) - failed_before

    def fail(self, name, again):
        self.failed.append(f"{name}   again: {again}")


def skip_reason(output):
    """The line after "...: Skipped", as tests under ctest print it."""
    match = re.search(r": Skipped\n(.*)", output)
    return match[1].strip() if match and match[1].strip() else "no reason given"


def main():
    total = collections.Counter()
    broken = []
    files = collections.defaultdict(list)
    notes = []
    for argument in sys.argv[1:]:
        build, _, path = argument.partition("=")
        if build == "--left-out":
            notes.append(path)
            continue
        files[build].append(pathlib.Path(path))
    print()
    for build, paths in files.items():
        if not all(path.exists() for path in paths):
            print(f"{build}: no result: it was not built, or the run was interrupted")
            broken.append(build)
            continue
        results = Results()
        for path in paths:
            results.read(path)
        passed, failed = len(results.passed), len(results.failed)
        skipped = sum(map(len, results.skipped.values()))
        print(f"{build}: {passed} passed, {failed} failed, {skipped} skipped in {results.seconds:.0f} s of tests")
        for name in results.failed:
            print(f"  FAILED {name}")
        if results.left_out:
            print(f"  left out, there is no GPU here: {results.left_out} tests on GPUs")
        for reason, names in sorted(results.skipped.items()):
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            print(f"  skipped, {reason}: {', '.join(names[:3])}{more}")
        if not passed:
            print("  nothing passed: that is not a success")
            if not failed:
                broken.append(build)
        total.update(passed=passed, failed=failed, skipped=skipped)
    for note in notes:
        print(f"left out: {note}")
    print(f"\n{total['passed']} passed, {total['failed'] + len(broken)} failed, {total['skipped']} skipped")
    return 1 if broken or total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
