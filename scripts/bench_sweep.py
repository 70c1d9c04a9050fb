#!/usr/bin/env python3
"""Measures many shapes by `deep_ep bench`, each by a process of its own, into one CSV file.

A shape that fails, crashes or hangs becomes a line with status `failed` and the reason; one that cannot be (top-32 of 16
experts) is `skipped`. Started again, the sweep goes on: what is in the file is not measured again, failures are, and a file
whose last line was cut is repaired. The exit status is 1 if a shape failed. Options for each benchmark come behind --, as in

    bench_sweep.py --out big.csv --ranks 16 --launcher "mpirun -np 16" -- --iterations 30
"""

import argparse
import csv
import datetime
import itertools
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys

MODES = ("intranode", "internode", "low-latency")
SHAPE = ("benchmark", "ranks", "nodes", "tokens", "hidden", "topk", "experts", "groups")
# With status 2, deep_ep says so of a shape that cannot be.
IMPOSSIBLE = re.compile(r"deep_ep: (--(?:topk|experts|nodes|groups|hidden|tokens)\b.*)")
# Full axes are for GPUs: on the CPU one shape of them takes minutes.
FULL = {"mode": MODES, "hidden": range(1024, 7169, 1024), "topk": (4, 8, 16, 32), "experts_per_node": (32, 64, 128, 256),
        "groups": (1, 2), "tokens": (128, 4096)}  # fmt: skip
QUICK = {"mode": MODES[:2], "hidden": (256,), "topk": (4, 8), "experts_per_node": (16,), "groups": (2,), "tokens": (8,)}


def numbers(text):
    """ "4,8": what argparse makes of it."""
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", text):
        raise argparse.ArgumentTypeError(f"'{text}', allowed: whole numbers with commas between")
    return [int(word) for word in text.split(",")]


def modes(text):
    if not set(text.split(",")) <= set(MODES):
        raise argparse.ArgumentTypeError(f"'{text}', allowed: {', '.join(MODES)}")
    return text.split(",")


def find_tool():
    """The command of the installation, or of the source tree, that this script is part of; or the one on PATH."""
    here = pathlib.Path(__file__).resolve().parent
    for path in (
        here.parents[2] / "bin/deep_ep",
        *(here.parent / f"build/{preset}/bin/deep_ep" for preset in ("cuda", "host")),
    ):
        if os.access(path, os.X_OK):
            return str(path)
    return shutil.which("deep_ep") or "deep_ep"


def count_gpus():
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([word for word in visible.split(",") if word and word != "-1"])
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.count("GPU ")
    except OSError:
        return 0


def shapes(arguments):
    """By SHAPE, as texts: as the file has them."""
    for mode, ranks, hidden, topk, experts in itertools.product(
        arguments.mode, arguments.ranks, arguments.hidden, arguments.topk, arguments.experts_per_node
    ):
        between = mode == "internode"
        nodes = arguments.nodes if between else 1
        for groups, tokens in itertools.product(arguments.groups if between else (0,), arguments.tokens):
            yield tuple(str(value) for value in (mode, ranks, nodes, tokens, hidden, topk, experts * nodes, groups))


def shape_of(row):
    """Low latency has no groups: an empty field says the same as 0."""
    return tuple(row.get(name) or "0" for name in SHAPE)


class Refused(Exception):
    """The file is no sweep's, or there is no command to run."""


class File:
    """A sweep's file: comments, columns, and a row for each measurement."""

    def __init__(self, path, comments):
        self.path, self.comments, self.columns, self.rows = path, comments, list(SHAPE) + ["device", "status", "note"], []
        if not path.exists():
            return
        text = path.read_text(encoding="utf-8")
        torn = bool(text) and not text.endswith("\n")
        lines = text.splitlines()[: -1 if torn else None]
        self.comments = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
        reader = csv.DictReader(lines[len(self.comments) :], strict=True)
        if not set(SHAPE) <= set(reader.fieldnames or ()):
            raise Refused(f"{path}: its columns are not those of `deep_ep bench --csv`")
        self.columns = list(reader.fieldnames)
        self.rows = list(reader)
        if torn and self.rows:  # the last shape's lines may not all be there
            last = shape_of(self.rows[-1])
            self.rows = [row for row in self.rows if shape_of(row) != last]
        self.rows = [row for row in self.rows if row.get("status") != "failed"]

    def done(self, device):
        """Shapes that this device has measured. Those of another device stay in the file, and are measured here."""
        return {shape_of(row) for row in self.rows if row.get("device") in ("", None, device)}

    def add(self, rows, columns=()):
        if columns and not self.rows:
            self.columns = list(columns)
        self.columns += [name for name in columns if name not in self.columns]
        self.rows += rows
        self.write()

    def write(self):
        """Beside the file, then renamed: whenever this program is killed, there are whole shapes in it."""
        beside = self.path.with_name(f"{self.path.name}.{os.getpid()}.new")
        with open(beside, "w", encoding="utf-8", newline="") as out:
            out.writelines(line + "\n" for line in self.comments)
            writer = csv.DictWriter(out, self.columns, restval="", extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)
        beside.replace(self.path)


def run(command, seconds):
    """Its status (None: took too long), output and errors. Processes that it has started end with it."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output, errors = child.communicate(timeout=seconds)
        return child.returncode, output, errors
    except subprocess.TimeoutExpired:
        return None, "", ""
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()


def measure(shape, arguments):
    """Rows, columns, status and why."""
    names = [name for name in SHAPE[1:] if shape[0] == "internode" or name not in ("nodes", "groups")]
    values = dict(zip(SHAPE, shape))
    command = [*shlex.split(arguments.launcher), arguments.deep_ep, "bench", shape[0], "--csv", "--device", arguments.device]
    for name in names:
        command += [f"--{name}", values[name]]
    status, output, errors = run(command + arguments.options, arguments.seconds)
    impossible = IMPOSSIBLE.search(errors)
    if status == 2 and impossible:
        return [], (), "skipped", impossible[1]
    if status is None:
        return [], (), "failed", "it took too long"
    if status != 0:
        said = (errors.strip().splitlines() or [f"it ended with status {status}"])[-1]
        return [], (), "failed", said.removeprefix("deep_ep: ")
    reader = csv.DictReader(line for line in output.splitlines() if not line.startswith("#"))
    rows = list(reader)
    if not rows or not set(SHAPE) <= set(reader.fieldnames):
        return [], (), "failed", "the benchmark printed no measurement"
    return rows, reader.fieldnames, "measured", ""


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("sweep.csv"), help="the CSV file (sweep.csv)")
    parser.add_argument("--mode", type=modes, help=f"{','.join(MODES)} (all)")
    parser.add_argument("--hidden", type=numbers, help="channels of a token (1024 to 7168 by 1024)")
    parser.add_argument("--topk", type=numbers, help="experts of each token (4,8,16,32)")
    parser.add_argument("--experts-per-node", type=numbers, help="32,64,128,256")
    parser.add_argument("--groups", type=numbers, help="internode: nodes that a token's experts are on (1,2); 0 = any")
    parser.add_argument("--tokens", type=numbers, help="of each rank (128,4096)")
    parser.add_argument("--ranks", type=numbers, help="one or several numbers (one for every GPU; 4 on the CPU)")
    parser.add_argument("--nodes", type=int, default=2, help="internode: nodes that the ranks play (2)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--launcher", default="", help="words in front of each benchmark: 'mpirun -np 16'")
    parser.add_argument("--seconds", type=float, default=600, help="how long a shape may take (600)")
    parser.add_argument("--quick", action="store_true", help="small shapes, few rounds, every result checked: does it work?")
    parser.add_argument("--deep-ep", default=find_tool(), help="the command (%(default)s)")
    own, dashes, options = sys.argv[1:], [], []
    if "--" in own:
        own, options = own[: own.index("--")], own[own.index("--") + 1 :]
    arguments = parser.parse_args(own + dashes)
    for name, values in (QUICK if arguments.quick else FULL).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, values)
    gpus = 0 if arguments.device == "cpu" else count_gpus()
    if arguments.launcher and not arguments.ranks:
        parser.error("--launcher: --ranks is missing, the ranks that it starts")
    arguments.on = "cuda" if gpus else "cpu"
    arguments.ranks = arguments.ranks or [gpus if gpus > 1 else 4]
    arguments.options = options or (["--iterations", "2", "--warmup", "1", "--check"] if arguments.quick else [])
    return arguments


def first_comments(arguments):
    try:
        said = subprocess.run([arguments.deep_ep, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise Refused(f"--deep-ep {arguments.deep_ep}: {error}") from None
    version = said.split("\n")[0]
    return [
        "# source: scripts/bench_sweep.py", f"# date: {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}",
        f"# hardware: {'GPUs of this host' if arguments.on == 'cuda' else 'CPU, not a measure of speed'}",
        f"# software: deep_ep {version}", f"# command: {shlex.join(['bench_sweep.py', *sys.argv[1:]])}",
        "# gb_per_s: as DeepEP's tests count, see docs/reference/bench.md",
    ]  # fmt: skip


def main():
    arguments = parse_arguments()
    try:
        file = File(arguments.out, first_comments(arguments))
        file.write()
    except (OSError, Refused, csv.Error) as error:
        print(f"bench_sweep: {error}", file=sys.stderr)
        return 2
    done = file.done(arguments.on)
    counts = {"measured": 0, "skipped": 0, "failed": 0, "there": 0}
    wanted = list(shapes(arguments))
    for i, shape in enumerate(wanted, 1):
        if shape in done:
            counts["there"] += 1
            continue
        print(f"[{i}/{len(wanted)}] {' '.join(f'{name} {value}' for name, value in zip(SHAPE, shape))}", file=sys.stderr)
        rows, columns, status, why = measure(shape, arguments)
        counts[status] += 1
        file.add(rows or [{**dict(zip(SHAPE, shape)), "status": status, "note": why}], columns)
    print(
        f"{arguments.out}: {counts['measured']} shapes measured, {counts['skipped']} impossible, {counts['failed']} failed, "
        f"{counts['there']} were there already"
    )
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("bench_sweep: interrupted; the same command goes on")
