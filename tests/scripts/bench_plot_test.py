"""scripts/bench_plot.py: which lines it makes of measurements, and what it refuses. Pictures where there is matplotlib."""

import importlib.util
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEAD = "# source: a test\nbenchmark,operation,dtype,mode,by,device,ranks,nodes,tokens,sms,median_us,gb_per_s,rdma_gb_per_s,rdma_wire_gb_per_s,status\n"


def row(tokens=128, sms=24, rate="", rdma="", wire="", status="ok", operation="dispatch", median=50):
    return f"intranode,{operation},fp8,cached,deep_ep,cuda,8,1,{tokens},{sms},{median},{rate},{rdma},{wire},{status}\n"


class BenchPlot(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def plot(self, rows, *options, status=0, name="a.csv"):
        (self.folder / name).write_text(HEAD + rows if name.endswith(".csv") else rows)
        done = subprocess.run([sys.executable, "-B", ROOT / "scripts/bench_plot.py", self.folder / name, *options],
                              capture_output=True, text=True)  # fmt: skip
        self.assertEqual(done.returncode, status, done.stderr)
        return done.stdout + done.stderr

    def test_the_best_of_each_place(self):
        text = self.plot(
            row(sms=4, rate=118) + row(sms=4, rate=100) + row(sms=8, rate=236) + row(sms=4, rate=90, operation="combine")
        )
        lines = [line.split("#")[0].split() for line in text.splitlines()]
        self.assertEqual(lines[0], "combine fp8 cached, GB/s over SMs".split())
        self.assertEqual(lines[2], "dispatch fp8 cached, GB/s over SMs".split())
        self.assertEqual(lines[3:5], [["4", "118"], ["8", "236"]])

    def test_between_nodes_has_two_lines(self):
        text = self.plot(row(rate=100, rdma=40) + row(rate=900, status="failed"))
        self.assertIn("cached (NVLink), GB/s", text)
        self.assertRegex(text, r"cached \(RDMA\), GB/s over tokens per rank\n +128 +40 ")
        self.assertNotIn("900", text)
        self.assertIn("cached (RDMA wire)", self.plot(row(wire=24)))

    def test_results_that_come_with_the_library(self):
        command = [sys.executable, "-B", ROOT / "scripts/bench_plot.py", "seed-b200-gke", "--where", "benchmark=internode", "--where",
                   "nvl_chunk=4", "--where", "dtype=fp8", "--over", "rdma_chunk"]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        self.assertIn("dispatch fp8 by DeepEP (RDMA), GB/s over rows in a chunk by RDMA", done.stdout)

    def test_results_say_where_they_come_from(self):
        for path in sorted((ROOT / "results").glob("*.csv")):
            with self.subTest(path.name):
                found = set(re.findall(r"^# (\w+): \S", path.read_text(), re.M))
                self.assertLessEqual({"source", "date", "hardware", "software", "command", "gb_per_s"}, found)

    def test_lines_of_one_operation_of_two_files_stand_together(self):
        both = row(rate=118) + row(rate=120, operation="combine")
        (self.folder / "b.csv").write_text(HEAD + both.replace("118", "236"))
        names = [line.split(",")[0] for line in self.plot(both, self.folder / "b.csv").splitlines() if "GB/s" in line]
        self.assertEqual(names, [f"{which} fp8 cached {file}" for which in ("combine", "dispatch") for file in "ab"])

    def test_what_it_refuses(self):
        self.assertIn("allowed: COLUMN=VALUE", self.plot(row(rate=1), "--where", "colour=red", status=2))
        self.assertIn("column gb_per_s: 'x' is no number", self.plot(row(rate="x"), status=2))
        done = subprocess.run([ROOT / "scripts/bench_plot.py", "nothing"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 2)
        self.assertRegex(done.stderr, "nothing: there is no such file; with the library come .*seed-b200")

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "matplotlib is not installed")
    def test_pictures(self):
        picture = self.folder / "p.svg"
        self.assertIn(
            "1 lines over tokens per rank", self.plot(row(tokens=1, rate=1) + row(tokens=64, rate=2), "--out", picture)
        )
        self.assertIn("</svg>", picture.read_text())
        self.assertIn("--out", self.plot(row(rate=1), "--out", self.folder / "p.nothing", status=2))


if __name__ == "__main__":
    unittest.main()
