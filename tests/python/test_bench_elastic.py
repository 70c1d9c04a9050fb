"""scripts/bench_elastic.py on CPU ranks: what it measures, in columns that the other benchmarks have."""

import csv
import pathlib
import sys

from common import output_of

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts/bench_elastic.py"


def test_on_cpu_ranks(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = (sys.executable, "-B", SCRIPT, "--num-processes", "2", "--tokens", "4", "8", "--iterations", "2")
    rows = list(csv.DictReader(output_of(*command, seconds=120).splitlines()))
    kinds = [("dispatch", dtype, f"V2 {mode}") for dtype in ("fp8", "bf16") for mode in ("exchange", "expanded", "cached")]
    kinds += [("combine", "bf16", "V2"), ("combine", "bf16", "V2 expanded")]
    assert [(row["operation"], row["dtype"], row["mode"]) for row in rows] == 2 * kinds
    assert [row["tokens"] for row in rows] == ["4"] * 8 + ["8"] * 8
    assert all(row["status"] == "ok" and row["ranks"] == "2" and float(row["min_us"]) <= float(row["median_us"]) for row in rows)
