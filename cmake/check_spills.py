#!/usr/bin/env python3
"""Fails when a kernel keeps anything in local memory: register spills, or a stack frame.

Reads what ptxas reported of each object file given (OBJECT.ptxas, kept by keep_ptxas_report), prints one line a kernel
and GPU, and exits 1 when one of them spills, or when a report is missing or empty (a check of nothing is no check).
"""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys

ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)' for '(?P<arch>[^']+)'")
FUNCTION = re.compile(r"Function properties for (?P<name>\S+)")
MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")


def demangle(names):
    tool = shutil.which("c++filt")
    if not tool or not names:
        return {name: name for name in names}
    text = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return dict(zip(names, text.splitlines()))


def read(report):
    """Yields [function, arch, registers, stack, stores, loads] for each function of one report."""
    arch, row = "?", None
    for line in report.read_text().splitlines():
        if match := ENTRY.search(line):
            arch = match["arch"]
        elif match := FUNCTION.search(line):
            if row:
                yield row
            row = [match["name"], arch, 0, 0, 0, 0]
        elif row and (match := MEMORY.search(line)):
            row[3:] = map(int, match.groups())
        elif row and (match := REGISTERS.search(line)):
            row[2] = int(match[1])
    if row:
        yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("object", nargs="+", type=pathlib.Path)
    parser.add_argument("--quiet", action="store_true", help="print only kernels that spill")
    arguments = parser.parse_args()

    rows = []
    for path in arguments.object:
        report = path.with_name(path.name + ".ptxas")
        found = list(read(report)) if report.exists() else []
        if not found:
            print(f"{path}: no report of ptxas")
            return 1
        rows += found
    names = demangle(sorted({row[0] for row in rows}))
    bad = 0
    for name, arch, registers, stack, stores, loads in rows:
        spills = bool(stack or stores or loads)
        bad += spills
        if spills or not arguments.quiet:
            print(
                f"{'SPILLS' if spills else 'ok':6} {arch:8} {registers:3} registers, stack {stack} B, "
                f"spill stores {stores} B, loads {loads} B: {names[name].split('(')[0]}"
            )
    print(f"{len(rows)} functions checked, {bad} with local memory")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
