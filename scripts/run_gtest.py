#!/usr/bin/env python3
"""Runs the tests of one GoogleTest program in one process, and survives tests that crash or hang.

usage: run_gtest.py PROGRAM RESULT [--filter FILTER] [--shard I/N] [--seconds S]

A test that ends the process, or takes longer than its limit, fails; the tests behind it go on in a new process. What
a failed test printed is shown, and its name once more in the last lines. RESULT is a JUnit file with every test.
Skipped tests are no failure. --shard 2/4 takes every fourth test from the second on. Without a GPU, tests whose
parameter is a place on GPUs (".../cuda_...") are left out and counted.
"""

import argparse
import collections
import os
import pathlib
import re
import selectors
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree

EVENT = re.compile(r"\[ +(RUN|OK|FAILED|SKIPPED) +\] ([\w/]+\.[\w/]+)")
SANITIZER = re.compile(r"(WARNING: ThreadSanitizer|ERROR: (Address|Leak)Sanitizer|: runtime error: )")
EXHAUSTIVE_FACTOR = 4  # such a test may take that many times as long
BROKEN_PROCESSES = 5  # after so many crashes and hangs the rest is given up


class Case:
    def __init__(self, name):
        self.name = name
        self.state = "not run"  # running, passed, failed, skipped
        self.why = ""
        self.output = []
        self.seconds = 0.0

    def end(self, state, why="", output=()):
        self.state, self.why = state, why
        self.output += output
        return self

    def skip_reason(self):
        """The text of GTEST_SKIP() << "...": the line after "FILE:LINE: Skipped"."""
        match = re.search(r": Skipped\n(.*)", "".join(self.output))
        return match[1].strip() if match and match[1].strip() else "no reason given"


def list_tests(program, filter_):
    text = subprocess.run(
        [program, "--gtest_list_tests", f"--gtest_filter={filter_}"], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    names, suite = [], None
    for line in text.splitlines():
        word = line.split("#")[0].rstrip()
        if line.startswith("  ") and suite:
            names.append(suite + word.strip())
        elif re.fullmatch(r"[\w/]+\.", word):
            suite = word
    return names


def has_gpu():
    try:
        return b"GPU" in subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
    except FileNotFoundError:
        return False


def run_process(program, cases, seconds):
    """Runs the cases until the process ends. Returns how the process broke off ("" if it did not), and a failed case
    for what is wrong with the process as a whole, if anything is."""
    by_name = {case.name: case for case in cases}
    whole = Case(pathlib.Path(program).name + " as a whole")
    command = [program, "--gtest_color=no", "--gtest_filter=" + ":".join(by_name)]
    # A session of its own, so that a test that hangs goes with the processes that it started.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)
    os.set_blocking(process.stdout.fileno(), False)
    selector = selectors.DefaultSelector()
    selector.register(process.stdout, selectors.EVENT_READ)
    running, began, rest, tail = None, time.monotonic(), "", collections.deque(maxlen=200)

    def take(line):
        nonlocal running, began
        match = EVENT.search(line.rstrip("\n"))
        case = by_name.get(match[2]) if match else None
        if case is None or (match[1] != "RUN" and case is not running):
            (running.output if running else tail).append(line)
        elif match[1] == "RUN":
            running, began, case.state = case, time.monotonic(), "running"
        else:
            case.output.append(line[: match.start()])
            case.seconds = time.monotonic() - began
            case.end({"OK": "passed", "FAILED": "failed", "SKIPPED": "skipped"}[match[1]])
            running, began = None, time.monotonic()

    hung = False
    while True:
        limit = seconds * (EXHAUSTIVE_FACTOR if running and "Exhaustive" in running.name else 1)
        hung = hung or time.monotonic() - began > limit
        if hung:
            kill(process)
        if selector.select(timeout=1):
            data = process.stdout.read()
            if not data:  # None is "nothing yet"; the end is empty
                if data is not None:
                    break
                continue
            *lines, rest = (rest + data.decode(errors="replace")).split("\n")
            for line in lines:
                take(line + "\n")
        elif process.poll() is not None:
            break  # what the process left behind holds the pipe
    if rest:
        take(rest)
    try:
        status = process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        hung = True
    kill(process)  # what it may have left behind goes too
    status = process.wait()
    if running:
        running.seconds = time.monotonic() - began
        why = f"no end after {running.seconds:.0f} s" if hung else f"the process ended: {describe(status)}"
        running.end("failed", why)
        return why, []
    if hung:
        return "the process did not end", [whole.end("failed", "no end after its last test", tail)]
    if any(case.state == "not run" for case in cases):
        return f"the process ended early: {describe(status)}: " + "".join(tail), []
    if status == 0:
        return "", []
    # A sanitizer that goes on after a report says so by the status at the end.
    for case in cases:
        if case.state == "passed" and SANITIZER.search("".join(case.output)):
            case.end("failed", "a sanitizer's report")
    if SANITIZER.search("".join(tail)) or not any(case.state == "failed" for case in cases):
        return "", [whole.end("failed", describe(status), tail)]
    return "", []


def kill(process):
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def describe(status):
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"


def write(path, program, cases, left_out):
    suite = ElementTree.Element("testsuite", name=pathlib.Path(program).name, left_out=str(left_out))
    for case in cases:
        node = ElementTree.SubElement(suite, "testcase", name=case.name, time=f"{case.seconds:.3f}")
        if case.state == "skipped":
            ElementTree.SubElement(node, "skipped", message=case.skip_reason())
        elif case.state != "passed":
            text = "".join(c for c in "".join(case.output)[-20000:] if c.isprintable() or c in "\n\t")
            ElementTree.SubElement(node, "failure", message=case.why or case.state).text = text
    path.parent.mkdir(parents=True, exist_ok=True)
    ElementTree.ElementTree(suite).write(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("result", type=pathlib.Path)
    parser.add_argument("--filter", default="*")
    parser.add_argument("--shard", default="1/1", metavar="I/N")
    parser.add_argument("--seconds", type=float, default=180, help="limit for one test")
    arguments = parser.parse_args()

    arguments.result.unlink(missing_ok=True)
    shard, shards = map(int, arguments.shard.split("/"))
    names = list_tests(arguments.program, arguments.filter)
    here = names if has_gpu() else [name for name in names if "/cuda_" not in name]
    left_out = len(names[shard - 1 :: shards]) - len(here[shard - 1 :: shards])
    cases = [Case(name) for name in here[shard - 1 :: shards]]
    if not cases:
        print(f"{arguments.program} has no test to run that matches '{arguments.filter}'")
        return 1
    waiting, broken = list(cases), []
    while waiting and len(broken) < BROKEN_PROCESSES:
        problem, of_process = run_process(arguments.program, waiting, arguments.seconds)
        cases += of_process
        if problem:
            broken.append(problem)
        waiting = [case for case in waiting if case.state == "not run"]
    for case in waiting:
        case.end("failed", "not run, after: " + "; ".join(broken))
    write(arguments.result, arguments.program, cases, left_out)

    states = collections.Counter(case.state for case in cases)
    failed = [case for case in cases if case.state == "failed"]
    for case in failed:
        print(f"---- {case.name}: {case.why or 'failed'}\n{''.join(case.output)}")
    print(f"{states['passed']} passed, {states['failed']} failed, {states['skipped']} skipped")
    if left_out:
        print(f"{left_out} tests on GPUs left out: there is no GPU here")
    for case in failed:
        print(f"FAILED {case.name} {case.why}".rstrip())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
