"""scripts/cluster_model.py: what it counts, against counting by hand and by drawing, and against docs/explanation/model.md."""

import argparse
import json
import pathlib
import random
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import cluster_model as model  # noqa: E402


def case(**changes):
    usual = {"nodes": 2, "ranks_per_node": 8, "tokens": 4096, "hidden": 7168, "topk": 8, "experts": 256, "groups": 0,
             "nic": 50, "latency": 5, "gpu": "h200"}  # fmt: skip
    return argparse.Namespace(**{**usual, **changes})


def run(*options):
    command = [sys.executable, "-B", ROOT / "scripts/cluster_model.py", *options]
    return subprocess.run(command, capture_output=True, text=True)


def drawn(of, rounds):
    """Tokens that choose nodes, then experts on them."""
    chance, per_node = random.Random(7), of.experts // of.nodes
    per_rank = per_node // of.ranks_per_node
    sums = {"nodes": 0, "remote_nodes": 0, "ranks": 0}
    for i in range(rounds):
        nodes = chance.sample(range(of.nodes), min(of.groups or of.nodes, of.nodes))
        experts = chance.sample([node * per_node + e for node in nodes for e in range(per_node)], of.topk)
        met = {expert // per_node for expert in experts}
        sums["nodes"] += len(met)
        sums["remote_nodes"] += len(met - {i % of.nodes})
        sums["ranks"] += len({expert // per_rank for expert in experts})
    return {name: value / rounds for name, value in sums.items()}


class ClusterModel(unittest.TestCase):
    def test_spread_is_what_drawing_gives(self):
        for of in (case(), case(nodes=4), case(nodes=8, groups=4), case(nodes=3, ranks_per_node=2, topk=5, experts=24)):
            seen = drawn(of, 4000)
            for name, value in model.spread(of).items():
                self.assertAlmostEqual(value, seen[name], delta=0.09, msg=f"{of} {name}")

    def test_bytes_by_hand(self):
        # Every token has an expert on both nodes: as many experts as there are.
        of = case(ranks_per_node=1, tokens=100, hidden=128, topk=4, experts=4)
        # 256 bytes; 4 selections, 4 weights, the source index, 1 place, 4 bytes each: 296, in whole lines 384.
        self.assertAlmostEqual(model.predict(of, "dispatch bf16")["wire_bytes"], 100 * 384)
        self.assertAlmostEqual(model.predict(of, "dispatch fp8")["wire_bytes"], 100 * 256)  # 128, a scale, and the same
        self.assertAlmostEqual(model.predict(of, "combine")["wire_bytes"], 100 * 384)  # 256 bytes and 4 weights
        self.assertEqual(model.predict(of, "combine")["nvlink_bytes"], 0)

    def test_upstream_counts_rows_that_stay(self):
        made = model.predict(case(latency=0), "dispatch bf16")
        meets = model.spread(case())
        self.assertAlmostEqual(made["wire_gb_per_s"], 0.956 * 50)
        without_sidecar = made["upstream_rdma_gb_per_s"] * meets["remote_nodes"] / meets["nodes"]
        self.assertTrue(0.98 * made["wire_gb_per_s"] < without_sidecar < made["wire_gb_per_s"])

    def test_the_page_has_its_figures(self):
        page = (ROOT / "docs/explanation/model.md").read_text()
        for operation, size in (("dispatch bf16", 14464), ("combine", 14464), ("dispatch fp8", 7552)):
            self.assertEqual(model.row_bytes(case(), operation)[1], size)
            self.assertIn(str(size), page)
        for nodes, row in re.findall(r"^\| (\d+) × 8 \| predicted \|(.*)\|$", page, re.M):
            made = [
                model.predict(case(nodes=int(nodes)), operation)["upstream_rdma_gb_per_s"] for operation in model.SHARE_OF_NIC
            ]
            self.assertEqual([f"{rate:.0f}" for rate in made], [cell.strip() for cell in row.split("|")])

    def test_the_command(self):
        self.assertRegex(run("--gpu", "b200").stdout, r"16 +128 +[0-9.]+ +combine ")
        made = json.loads(run("--nodes", "1,3", "--experts", "240", "--groups", "2", "--json").stdout)
        self.assertEqual([result["ranks"] for result in made["results"]], [8, 24])

    def test_mistakes_are_named(self):
        for words, text in (
            ("--experts 250", "--experts 250: must be a multiple of the 16 ranks"),
            ("--nodes 64", "--nodes 64: 512 ranks, allowed: at most 128"),
            ("--nodes 16 --groups 1 --topk 20", "--topk 20: more than the 16 experts of 1 nodes"),
            ("--nodes many", "--nodes many: allowed: whole numbers with commas between"),
            ("--nic 0", "--nic 0.0: must be more than 0"),
            ("--gpu h100", "invalid choice: 'h100'"),
        ):
            done = run(*words.split())
            self.assertEqual(done.returncode, 2)
            self.assertIn(text, done.stderr)


if __name__ == "__main__":
    unittest.main()
