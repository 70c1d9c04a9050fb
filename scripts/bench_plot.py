#!/usr/bin/env python3
"""Draws what `deep_ep bench` measured: bandwidth or time of CSV files.

    deep_ep bench intranode --sms 4,8,16,24 --csv > sms.csv && bench_plot.py sms.csv --out sms.svg
    bench_plot.py seed-b200-gke --where benchmark=internode --where nvl_chunk=4 --over rdma_chunk --out chunks.svg

A name without a folder may be one of the results that come with the library. There is a line for each operation and
setting, between nodes one for NVLink and one for RDMA. Drawing needs matplotlib (pip install matplotlib); the ending of
--out is the format. Without --out, the numbers are printed as text.
"""

import argparse
import csv
import pathlib
import sys

# Columns that a plot may go over, and the label of the axis.
AXES = {
    "tokens": "tokens per rank", "sms": "SMs", "ranks": "ranks", "nodes": "nodes", "rdma_chunk": "rows in a chunk by RDMA",
    "nvl_chunk": "rows in a chunk by NVLink", "hidden": "channels of a token", "topk": "experts of a token",
    "experts": "experts", "groups": "nodes that a token's experts are on", "bytes": "bytes of a message",
}  # fmt: skip
HERE = pathlib.Path(__file__).resolve().parent


class Refused(Exception):
    """There is nothing to draw."""


def find(name):
    """A file, or results of the source tree or of the installation, whose scripts lie beside its results."""
    known = sorted((HERE.parent / "results").glob("*.csv"))
    for path in (pathlib.Path(name), *(path for path in known if name in (path.name, path.stem))):
        if path.is_file():
            return path
    raise Refused(f"{name}: there is no such file; with the library come {', '.join(path.stem for path in known)}")


def read_csv(path):
    with open(path, encoding="utf-8", newline="") as file:
        reader = csv.DictReader(line for line in file if not line.startswith("#"))
        if "benchmark" not in (reader.fieldnames or ()):
            raise Refused(f"{path}: its columns are not those of `deep_ep bench --csv`")
        return [{**row, "file": path.stem} for row in reader]


def value(row, column):
    """0 where there is none."""
    try:
        return float(row.get(column) or 0)
    except ValueError:
        raise Refused(f"{row['file']}, column {column}: '{row[column]}' is no number") from None


def rates_of(row):
    """(column, what the line's name says besides). Old files may have no other rate than that of what really crosses."""
    if value(row, "gb_per_s") or value(row, "rdma_gb_per_s"):
        both = bool(value(row, "rdma_gb_per_s"))
        return [("gb_per_s", " (NVLink)" if both else ""), ("rdma_gb_per_s", " (RDMA)")]
    return [("rdma_wire_gb_per_s", " (RDMA wire)")]


def fits(row, conditions):
    for condition in conditions:
        column, sign, wanted = condition.partition("=")
        if not sign or column not in row:
            raise Refused(f"--where {condition}: allowed: COLUMN=VALUE with a column of the CSV files")
        if row[column] != wanted:
            return False
    return True


def lines_of(rows, over, times):
    """The axis, and for each line's name its points. Of several values at a place the best counts."""

    def measured(row):
        return [("median_us", "")] if times else rates_of(row)

    rows = [row for row in rows if row.get("status", "ok") in ("", "ok")]
    rows = [row for row in rows if any(value(row, column) > 0 for column, _ in measured(row))]
    varied = {column for column in (rows[0] if rows else ()) if len({row.get(column) for row in rows}) > 1}
    over = over or next((axis for axis in AXES if axis in varied), "tokens")
    lines = {}
    for row in rows:
        if not row.get(over):
            continue
        words = [row["operation"], row.get("dtype"), row.get("mode")]
        words += [row.get(column) for column in ("part", "benchmark", "device", "nic", "file") if column in varied]
        words += [f"by {row['by']}"] if row.get("by") not in ("deep_ep", "", None) else []
        words += [f"{axis} {row[axis]}" for axis in AXES if axis != over and axis in varied and row.get(axis)]
        name = " ".join(word for word in words if word and word != "-")
        for column, more in measured(row):
            if value(row, column) > 0:
                points = lines.setdefault(name + more, {})
                x, y = value(row, over), value(row, column)
                points[x] = min(points.get(x, y), y) if times else max(points.get(x, y), y)
    if not lines:
        raise Refused(f"there is nothing to plot: no measurement has a {'time' if times else 'bandwidth'} and {AXES[over]}")
    return over, {name: sorted(points.items()) for name, points in lines.items()}


def draw(out, over, lines, unit):
    try:
        import matplotlib
    except ImportError:
        raise Refused(
            "--out needs matplotlib: pip install matplotlib (without --out, the numbers are printed as text)"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    for i, (name, points) in enumerate(lines.items()):
        axes.plot(*zip(*points), marker="o", markersize=4, label=name, linestyle=("-", "--", ":")[i // 10 % 3])
    places = sorted({x for points in lines.values() for x, _ in points})
    if places[0] > 0 and places[-1] / places[0] > 16:
        axes.set_xscale("log", base=2)
    if len(places) <= 14:
        axes.set_xticks(places, [f"{x:g}" for x in places])
    axes.set_ylim(bottom=0)
    axes.set_xlabel(AXES[over])
    axes.set_ylabel(unit)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(0, -0.14))
    try:
        figure.savefig(out, bbox_inches="tight", dpi=150)
    except ValueError as error:
        raise Refused(f"--out {out}: {error}") from None
    print(f"{out}: {len(lines)} lines over {AXES[over]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="CSV of `deep_ep bench --csv`")
    parser.add_argument("--out", help="the picture to write: .svg, .png, .pdf")
    parser.add_argument("--over", choices=AXES, help="the horizontal axis (the first that has several values)")
    parser.add_argument("--times", action="store_true", help="median microseconds instead of GB/s")
    parser.add_argument("--where", action="append", default=[], help="COLUMN=VALUE: only such measurements; may be repeated")
    arguments = parser.parse_args()
    try:
        paths = [find(name) for name in arguments.files]
        rows = [row for path in paths for row in read_csv(path) if fits(row, arguments.where)]
        over, lines = lines_of(rows, arguments.over, arguments.times)
        unit = "microseconds" if arguments.times else "GB/s"
        if arguments.out:
            draw(arguments.out, over, lines, unit)
            return 0
        highest = max(y for points in lines.values() for _, y in points)
        for name, points in sorted(lines.items()):
            print(f"{name}, {unit} over {AXES[over]}")
            for x, y in points:
                print(f"  {x:>10g} {y:>10.4g} {'#' * max(1, round(50 * y / highest))}")
    except (OSError, ValueError, Refused) as error:
        print(f"bench_plot: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
