#!/usr/bin/env python3
"""Adds up what ctest (--output-junit) and pytest (--junitxml) wrote for several builds, says what was skipped and why, and judges.

usage: test_summary.py NAME=FILE...
Exits 0 only when every file is there, something passed in each, and nothing failed anywhere.
"""

import collections
import pathlib
import re
import sys
import xml.etree.ElementTree as ElementTree


def skip_reason(output):
    """The text of GTEST_SKIP() << "...": the line after "FILE:LINE: Skipped"."""
    match = re.search(r": Skipped\n(.*)", output)
    return match[1].strip() if match and match[1].strip() else "no reason given"


def read(path):
    """Returns (names passed, names failed, {reason: names skipped}, seconds)."""
    passed, failed, skipped, seconds = [], [], collections.defaultdict(list), 0.0
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = case.get("name")
        seconds += float(case.get("time") or 0)
        message = case.find("skipped")
        if case.get("status") is None:  # pytest
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append(name)
            elif message is not None:
                skipped[message.get("message") or "no reason given"].append(name)
            else:
                passed.append(name)
            continue
        if case.get("status") == "run":
            passed.append(name)
        elif message is not None and message.get("message", "").startswith("SKIP_"):
            skipped[skip_reason(case.findtext("system-out") or "")].append(name)
        else:
            # Failed, timed out, or could not be started: all the same to whoever waits for green.
            failed.append(name)
    return passed, failed, skipped, seconds


def main():
    total = collections.Counter()
    broken = []
    print()
    for argument in sys.argv[1:]:
        build, _, path = argument.partition("=")
        if not pathlib.Path(path).exists():
            print(f"{build}: no result, the run broke off")
            broken.append(build)
            continue
        passed, failed, skipped, seconds = read(path)
        count = sum(map(len, skipped.values()))
        print(f"{build}: {len(passed)} passed, {len(failed)} failed, {count} skipped in {seconds:.0f} s of tests")
        for name in failed:
            print(f"  FAILED {name}")
        for reason, names in sorted(skipped.items()):
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            print(f"  skipped, {reason}: {', '.join(names[:3])}{more}")
        if not passed:
            print("  nothing passed: that is no success")
            broken.append(build)
        total.update(passed=len(passed), failed=len(failed), skipped=count)
    print(f"\n{total['passed']} passed, {total['failed'] + len(broken)} failed, {total['skipped']} skipped")
    return 1 if broken or total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
