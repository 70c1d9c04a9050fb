#!/usr/bin/env python3
"""Draws which folder includes which, with counts, and fails on an arrow that the design forbids, on kernels that ask which
target they are compiled for, and on a kernel whose headers are nested deeper than MOST_LEVELS.

usage: include_arrows.py [ROOT]

Every folder knows only the ones below it (docs/explanation/architecture.md), but for one circle of two, named below. A folder
without a line in MAY_INCLUDE is a mistake too, so that a new one is thought about.
"""

import collections
import functools
import os
import pathlib
import re
import sys

# What differs between targets is for the functions of kernels/primitives to hide: other kernel code does not ask.
TARGET = re.compile(r"\b(?:DEEP_EP_TARGET_CUDA|DEEP_EP_BLACKWELL|__CUDA_ARCH__|__CUDACC__)\b")
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')
MOST_LEVELS = 9
SUFFIXES = {".cpp", ".hpp", ".cu", ".cuh", ".h"}
TOP_FOLDERS = ("include", "kernels", "csrc", "machine", "simulation", "oracle", "python", "tools", "examples", "tests")

# What a folder may include besides itself. The first line that fits a folder holds for it; a name stands for all below.
# A family of kernels (what the last line for kernels/ is for) knows no other.
MAY_INCLUDE = {
    "include": [],
    "kernels/primitives": ["include"],
    "kernels/common": ["include", "kernels/primitives"],
    "kernels/normal": ["include", "kernels/primitives", "kernels/common", "kernels/rdma", "kernels/kernel_list.hpp"],
    "kernels/rdma": ["include", "kernels/primitives", "kernels/common", "kernels/kernel_list.hpp"],
    "kernels/elastic": ["include", "kernels/primitives", "kernels/common", "kernels/rows", "kernels/normal",
                        "kernels/kernel_list.hpp"],  # the second interface over the memory of the first
    "kernels/load_balance": ["include", "kernels/primitives", "kernels/common", "kernels/normal", "kernels/kernel_list.hpp"],
    "kernels": ["include", "kernels/primitives", "kernels/common", "kernels/rdma", "kernels/kernel_list.hpp"],
    "csrc/support": ["include"],
    "csrc/bootstrap": ["include", "csrc/support"],
    "csrc/topology": ["include", "csrc/support"],
    # The one circle: an executor makes the heap of its kind, which calls CUDA by the executor's means.
    "csrc/memory": ["include", "csrc/support", "csrc/bootstrap", "csrc/executor"],
    "csrc/executor": ["include", "csrc/support", "csrc/memory", "kernels/primitives", "kernels/kernel_list.hpp"],
    "csrc/control": ["include", "csrc/support", "csrc/bootstrap", "csrc/memory", "kernels/common/control_words.hpp"],
    "csrc/rdma": ["include", "csrc/support", "csrc/bootstrap", "csrc/topology", "csrc/memory", "csrc/executor",
                  "kernels/common", "kernels/rdma", "simulation/simulated_ends.hpp"],  # one kind of ends
    "csrc/buffer": ["include", "csrc", "kernels"],
    "machine": ["include", "csrc/support", "csrc/memory", "csrc/executor", "kernels/primitives", "kernels/kernel_list.hpp"],
    "simulation/kernels": ["include", "kernels/primitives", "kernels/common", "kernels/rdma", "kernels/kernel_list.hpp"],
    "simulation": ["include", "csrc/support", "csrc/bootstrap", "csrc/memory", "csrc/executor", "csrc/rdma", "simulation"],
    "oracle": ["include"],
    "python": ["include"],
    "examples": ["include"],
    "tools": ["include", "kernels", "csrc", "machine", "simulation", "oracle", "tools"],
    "tests": ["include", "kernels", "csrc", "machine", "simulation", "oracle", "tools"],
}


def is_in(path, folder):
    return path == folder or path.startswith(folder + "/")


def room(path):
    """The folder that a file counts for: a family of kernels, a folder of csrc, simulation or tools, else the one at the top."""
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] in ("kernels", "csrc", "simulation", "tools") and len(parts) > 2 else parts[0]


def resolve(root, source, name):
    for folder in ("", "include/", str(pathlib.Path(source).parent) + "/"):
        if (root / folder / name).exists():
            return os.path.normpath(folder + name)
    return "include/" + name if name == "deep_ep/version.hpp" else None  # which CMake writes


def allowed(source, target):
    for folder, targets in MAY_INCLUDE.items():
        if is_in(source, folder):
            return is_in(target, room(source)) or any(is_in(target, one) for one in targets)
    return False


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    arrows, mistakes, included = collections.Counter(), [], collections.defaultdict(set)

    @functools.cache
    def deepest(source):
        return max((deepest(target) for target in included[source]), key=len, default=()) + (source,)

    for top in TOP_FOLDERS:
        for path in sorted((root / top).rglob("*")):
            if path.suffix not in SUFFIXES:
                continue
            source = str(path.relative_to(root))
            for number, line in enumerate(path.read_text().splitlines(), start=1):
                kernel = is_in(source, "simulation/kernels") or room(source).startswith("kernels") and room(source) != "kernels/primitives"
                if TARGET.search(line) and kernel:
                    mistakes.append(f"{source}:{number}: {TARGET.search(line)[0]} belongs in kernels/primitives")
                match = INCLUDE.match(line)
                if not match:
                    continue
                target = resolve(root, source, match[1])
                where = f"{source}:{number}: #include \"{match[1]}\""
                if target is None:
                    mistakes.append(f"{where}: there is no such file")
                    continue
                included[source].add(target)
                if target.endswith(".cpp"):
                    mistakes.append(f"{where}: sources are compiled, not included")
                elif room(source) != room(target):
                    arrows[room(source), room(target)] += 1
                    if not allowed(source, target):
                        mistakes.append(f"{where}: {room(source)} may not know {room(target)}")
    for chain in (deepest(source) for source in list(included) if source.endswith(".cu")):
        if len(chain) - 1 > MOST_LEVELS:
            mistakes.append(f"{len(chain) - 1} levels of headers, allowed: {MOST_LEVELS}: {' < '.join(chain)}")
    for (source, target), count in sorted(arrows.items()):
        print(f"{source:20} -> {target:20} {count:4}")
    for mistake in mistakes:
        print(f"FORBIDDEN {mistake}")
    print(f"{sum(arrows.values())} includes between folders, {len(mistakes)} forbidden")
    return 1 if mistakes or not arrows else 0


if __name__ == "__main__":
    sys.exit(main())
