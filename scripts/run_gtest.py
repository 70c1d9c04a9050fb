#!/usr/bin/env python3
"""Runs the tests of one GoogleTest program in one process, and survives tests that crash or hang.

usage: run_gtest.py PROGRAM RESULT [--filter FILTER] [--shard I/N] [--at-once N] [--seconds S] [--deadline S]

A test that ends the process, or takes longer than its limit, fails; the tests behind it go on in a new process. A
process that ends between two tests, or a sanitizer's report anywhere, is a failure, too. At the deadline, or when this
script is told to stop, what has not run fails. What a failed test printed is shown, and its name once more in the last
lines. RESULT is a JUnit file with every test. Skipped tests are no failure. --shard 2/4 takes every fourth test from
the second on. --at-once 8 gives no process more than 8 tests: ThreadSanitizer never gives back all that it took for
threads that have ended, until the kernel has no mapping left for the process. Without a GPU, tests whose parameter is a place on GPUs (".../cuda_...") are left out and counted.

A test whose expectations fail while the whole machine stands still (a virtual machine that is not scheduled for half a
second) says nothing of the code that waits: it runs once more at the end, and that result holds. It is printed which.
"""

import argparse
import collections
import ctypes
import os
import pathlib
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree

EVENT = re.compile(r"\[ +(RUN|OK|FAILED|SKIPPED) +\] ([\w/]+\.[\w/]+)")
SANITIZER = re.compile(r"(WARNING: ThreadSanitizer|ERROR: (Address|Leak)Sanitizer|: runtime error: )")
GOOGLETEST_ENDS = re.compile(r"\[=+\] \d+ tests? from .* ran\.")
EXHAUSTIVE_FACTOR = 4  # such a test may take that many times as long
BROKEN_PROCESSES = 5  # after so many crashes and hangs the rest is given up
SECONDS_TO_DIE = 10  # after SIGKILL; a process that a driver holds may take longer, and is left alone
PR_SET_PDEATHSIG = 1
STANDSTILL = 0.5  # seconds in which not even a thread that only sleeps was woken


class Deadline:
    """When the run as a whole must end. A signal brings it forward to now."""

    def __init__(self, seconds):
        self.end = time.monotonic() + seconds
        self.why = f"the deadline of {seconds:g} s for all tests came"
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self.stop)

    def stop(self, number, _):
        self.end, self.why = time.monotonic(), f"{signal.Signals(number).name} came"

    def came(self):
        return time.monotonic() >= self.end


class Standstills:
    """When this machine, or at least this process, did not run. Deadlines in tests come from how busy the machine is;
    no load average shows a pause of it all."""

    def __init__(self):
        self.seen = []  # (end, seconds)
        self.looked = 0.0
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self):
        while True:
            before = time.monotonic()
            time.sleep(0.02)
            now = time.monotonic()
            if now - before > STANDSTILL:
                self.seen.append((now, now - before))
            self.looked = now

    def longest_since(self, began):
        asked = time.monotonic()
        while self.looked < asked and time.monotonic() < asked + 10:  # the watch is behind where many threads want to run
            time.sleep(0.01)
        return max((seconds for end, seconds in self.seen if end > began), default=0.0)


class Case:
    def __init__(self, name):
        self.name = name
        self.state = "not run"  # running, passed, failed, skipped
        self.why = ""
        self.output = []
        self.seconds = 0.0
        self.stood_still = 0.0

    def end(self, state, why="", output=()):
        self.state, self.why = state, why
        self.output += output
        return self

    def failed_in_a_standstill(self):
        """Expectations failed, nothing crashed, hung or was reported by a sanitizer, and the machine did not run."""
        failed = self.state == "failed" and not self.why and not SANITIZER.search("".join(self.output))
        return failed and self.stood_still > 0

    def skip_reason(self):
        """The text of GTEST_SKIP() << "...": the line after "FILE:LINE: Skipped"."""
        match = re.search(r": Skipped\n(.*)", "".join(self.output))
        return match[1].strip() if match and match[1].strip() else "no reason given"


def list_tests(program, filter_):
    text = subprocess.run(
        [program, "--gtest_list_tests", f"--gtest_filter={filter_}"],
        stdout=subprocess.PIPE, errors="replace", check=True, timeout=120, preexec_fn=die_with_parent
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


def die_with_parent():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run_process(program, cases, seconds, deadline, standstills):
    """Runs the cases until the process ends. Returns how the process broke off ("" if it did not), and a failed case
    for what is wrong with the process as a whole, if anything is."""
    by_name = {case.name: case for case in cases}
    whole = Case(pathlib.Path(program).name + " as a whole")
    command = [program, "--gtest_color=no", "--gtest_filter=" + ":".join(by_name)]
    # A session of its own, so that a test that hangs goes with the processes that it started.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent)
    os.set_blocking(process.stdout.fileno(), False)
    selector = selectors.DefaultSelector()
    selector.register(process.stdout, selectors.EVENT_READ)
    running, began, rest, tail, finished = None, time.monotonic(), "", collections.deque(maxlen=200), False
    ready = began  # the end of the test before: that one began is only known when its line has been read

    def take(line):
        nonlocal running, began, ready, finished
        finished = finished or (running is None and GOOGLETEST_ENDS.search(line) is not None)
        match = EVENT.search(line.rstrip("\n"))
        case = by_name.get(match[2]) if match else None
        if case is None or (match[1] != "RUN" and case is not running):
            (running.output if running else tail).append(line)
        elif match[1] == "RUN":
            ready, running, began, case.state = began, case, time.monotonic(), "running"
        else:
            case.output.append(line[: match.start()])
            case.seconds = time.monotonic() - began
            case.end({"OK": "passed", "FAILED": "failed", "SKIPPED": "skipped"}[match[1]])
            if case.state == "failed":
                case.stood_still = standstills.longest_since(ready)
            running, began = None, time.monotonic()

    hung = ""
    while not hung:
        limit = seconds * (EXHAUSTIVE_FACTOR if running and "Exhaustive" in running.name else 1)
        if time.monotonic() - began > limit:
            hung = f"no end after {time.monotonic() - began:.0f} s"
        elif deadline.came():
            hung = deadline.why
        if hung:
            kill(process)
        ended = process.poll() is not None  # asked before reading, so that nothing it wrote is missed
        data = process.stdout.read() if selector.select(timeout=min(1, limit)) else None
        if data:
            *lines, rest = (rest + data.decode(errors="replace")).split("\n")
            for line in lines:
                take(line + "\n")
        elif data is not None or ended:
            break  # the end of the pipe, or something that the process left behind holds it
    if rest:
        take(rest)
    try:
        status = process.wait(timeout=SECONDS_TO_DIE)
    except subprocess.TimeoutExpired:
        hung = hung or "it closed its output and did not end"
    kill(process)  # what it may have left behind goes too
    try:
        status = process.wait(timeout=SECONDS_TO_DIE)
    except subprocess.TimeoutExpired:
        status = -signal.SIGKILL

    # A sanitizer may let the test go on after a report, and the process end well.
    for case in cases:
        if case.state in ("passed", "skipped") and SANITIZER.search("".join(case.output)):
            case.end("failed", "a sanitizer's report")
    how = hung or f"the process ended: {describe(status)}"
    if running:
        running.seconds = time.monotonic() - began
        running.end("failed", how)
    broke = how if hung or running or not finished or any(case.state == "not run" for case in cases) else ""
    reported = SANITIZER.search("".join(tail)) is not None
    unexplained = status != 0 and not any(case.state == "failed" for case in cases)
    if reported or (not running and (broke or unexplained)):
        why = "a sanitizer's report" if reported else how
        return broke, [whole.end("failed", why + ", outside of tests", tail)]
    return broke, []


def kill(process):
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def describe(status):
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"


def printable(text):
    """Neither XML nor a terminal takes every character."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t")


def write(path, program, cases, left_out):
    suite = ElementTree.Element("testsuite", name=pathlib.Path(program).name, left_out=str(left_out))
    for case in cases:
        node = ElementTree.SubElement(suite, "testcase", name=case.name, time=f"{case.seconds:.3f}")
        if case.state == "skipped":
            ElementTree.SubElement(node, "skipped", message=printable(case.skip_reason()))
        elif case.state != "passed":
            failure = ElementTree.SubElement(node, "failure", message=printable(case.why or case.state))
            failure.text = printable("".join(case.output)[-20000:])
    path.parent.mkdir(parents=True, exist_ok=True)
    ElementTree.ElementTree(suite).write(path)


def share(text):
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"it is '{text}', and must be I/N with 1 <= I <= N")
    return int(match[1]), int(match[2])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("result", type=pathlib.Path)
    parser.add_argument("--filter", default="*")
    parser.add_argument("--shard", type=share, default=(1, 1), metavar="I/N")
    parser.add_argument("--at-once", type=int, default=sys.maxsize, metavar="N")
    parser.add_argument("--seconds", type=float, default=600, help="limit for one test")
    parser.add_argument("--deadline", type=float, default=2400, help="limit for all tests together")
    arguments = parser.parse_args()

    sys.stdout.reconfigure(errors="replace")
    deadline = Deadline(arguments.deadline)
    arguments.result.unlink(missing_ok=True)
    shard, shards = arguments.shard
    names = list_tests(arguments.program, arguments.filter)
    here = names if has_gpu() else [name for name in names if "/cuda_" not in name]
    left_out = len(names[shard - 1 :: shards]) - len(here[shard - 1 :: shards])
    cases = [Case(name) for name in here[shard - 1 :: shards]]
    if not cases:
        print(f"{arguments.program} has no test to run that matches '{arguments.filter}'")
        return 1
    waiting, broken = list(cases), []
    standstills = Standstills()
    while waiting and len(broken) < BROKEN_PROCESSES and not deadline.came():
        problem, of_process = run_process(arguments.program, waiting[: arguments.at_once], arguments.seconds, deadline,
                                          standstills)
        cases += of_process
        if problem:
            broken.append(problem)
        waiting = [case for case in waiting if case.state == "not run"]
    over = bool(broken) or deadline.came()
    again = [case for case in cases if case.failed_in_a_standstill() and not over]
    if again:
        for case in again:
            print(printable(f"---- {case.name}: failed while the machine stood still for {case.stood_still:.1f} s\n"
                            f"{''.join(case.output)}"))
            case.__init__(case.name)
        problem, of_process = run_process(arguments.program, again, arguments.seconds, deadline, standstills)
        cases += of_process
        broken += [problem] if problem else []
        waiting = [case for case in again if case.state == "not run"]
    for case in waiting:
        case.end("failed", "not run: " + (deadline.why if deadline.came() else "; ".join(broken)))
    write(arguments.result, arguments.program, cases, left_out)

    states = collections.Counter(case.state for case in cases)
    failed = [case for case in cases if case.state == "failed"]
    for case in failed:
        print(printable(f"---- {case.name}: {case.why or 'failed'}\n{''.join(case.output)}"))
    print(f"{states['passed']} passed, {states['failed']} failed, {states['skipped']} skipped")
    if again:
        print(f"{len(again)} of them ran once more, as the machine stood still: {', '.join(case.name for case in again)}")
    if left_out:
        print(f"{left_out} tests on GPUs left out: there is no GPU here")
    for case in failed:
        print(f"FAILED {case.name} {case.why}".rstrip())
    return 1 if failed or broken else 0


if __name__ == "__main__":
    sys.exit(main())
