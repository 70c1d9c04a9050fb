#!/usr/bin/env python3
"""Draws times or rates over tokens, SMs, hidden size, top-k or ranks.

Reads what `deep_ep_benchmarks --benchmark_out=FILE` or `deep_ep bench intranode --json` wrote. Draws with matplotlib
where it is installed, otherwise prints the curves as text.
"""

import argparse
import json
import sys
from collections import defaultdict


def google_benchmark_points(data, over):
    """(curve, x, microseconds, logical GB/s) of the sweep over `over`."""
    to_us = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
    for entry in data["benchmarks"]:
        parts = entry["name"].split("/")
        if parts[0] != over or entry.get("error_occurred") or entry.get("run_type") == "aggregate":
            continue
        curve = " ".join(part for part in parts[1:] if ":" not in part and part != "manual_time")
        rate = entry.get("logical_bytes/s", 0.0) * 1e-9
        yield curve, entry[over], entry["real_time"] * to_us[entry["time_unit"]], rate


def bench_points(data, over):
    for entry in data["measurements"]:
        x = entry.get(over, data.get(over))
        if x is None:
            continue  # nobody knows how many SMs another library uses
        words = [entry["operation"], entry["dtype"], entry["mode"], entry["transport"]]
        curve = " ".join(word for word in words if word not in ("-", "deep_ep"))
        yield curve, x, entry["median_us"], entry["logical_gb_per_s"]


def read_curves(path, over, want_rate):
    with open(path, encoding="utf-8") as file:
        data = json.load(file)
    if "benchmarks" in data:
        points = google_benchmark_points(data, over)
    elif "measurements" in data:
        points = bench_points(data, over)
    else:
        raise ValueError(f"{path}: neither Google Benchmark's JSON nor that of deep_ep bench")
    curves = defaultdict(lambda: defaultdict(list))
    for curve, x, microseconds, rate in points:
        if not want_rate or rate > 0:
            curves[curve][x].append(rate if want_rate else microseconds)
    # Repetitions of a point: the middle one.
    return {
        curve: sorted((x, sorted(values)[len(values) // 2]) for x, values in points.items())
        for curve, points in curves.items()
    }


def print_curves(curves, over, unit):
    highest = max(y for points in curves.values() for _, y in points)
    for curve, points in curves.items():
        print(f"{curve}, {unit} over {over}")
        for x, y in points:
            print(f"  {x:>8g} {y:>12.4g} {'#' * max(1, round(50 * y / highest))}")


def draw_curves(curves, over, unit, output):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6))
    for curve, points in curves.items():
        axes.plot(*zip(*points), marker="o", label=curve)
    axes.set_xscale("log", base=2)
    axes.set_xlabel(over)
    axes.set_ylabel(unit)
    if unit == "microseconds":
        axes.set_yscale("log")
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(output, dpi=150)
    print(output)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="JSON of deep_ep_benchmarks or of deep_ep bench")
    parser.add_argument("--over", default="tokens", choices=["tokens", "sms", "hidden", "topk", "ranks"])
    parser.add_argument("--y", default="us", choices=["us", "gb"], help="microseconds, or logical GB/s")
    parser.add_argument("--output", help="picture to write (default: <over>.png)")
    parser.add_argument("--text", action="store_true", help="print the curves even where matplotlib is installed")
    arguments = parser.parse_args()
    try:
        curves = read_curves(arguments.file, arguments.over, arguments.y == "gb")
    except (OSError, ValueError) as error:
        sys.exit(f"plot.py: {error}")
    if not curves:
        sys.exit(f"plot.py: {arguments.file} has no measurements over {arguments.over}")
    unit = "microseconds" if arguments.y == "us" else "logical GB/s"
    if not arguments.text:
        try:
            return draw_curves(curves, arguments.over, unit, arguments.output or f"{arguments.over}.png")
        except ImportError:
            print("matplotlib is not installed; as text:", file=sys.stderr)
    print_curves(curves, arguments.over, unit)


if __name__ == "__main__":
    main()
