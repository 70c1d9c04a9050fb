"""The checks of elastic_checks.py: those that need no GPU on CPU ranks, all of them where there are GPUs."""

import os
import subprocess
import sys

import elastic_checks
import pytest
import torch
import torch.distributed as dist


def on_cpu_ranks(group):
    lines = []
    return elastic_checks.run_checks(group, group, torch.device("cpu"), (), 1000.0, lines.append), lines, dist.get_rank(group)


def test_on_cpu_ranks(ranks):
    for results, lines, rank in ranks(2).run(on_cpu_ranks):
        assert {name for name, result in results.items() if result == "PASS"} == {
            "arguments_drawn_at_random", "arguments_in_inference_mode", "several_buffers_and_sizes", "results_outlive_the_buffer",
            "barrier_waits_for_the_last", "replicas_of_a_late_rank", "deferred_calls_with_a_late_rank",
        }  # fmt: skip
        assert {result for name, result in results.items() if "graph" in name} == {"SKIP"}
        assert len(lines) == (0 if rank else len(results))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_gpus():
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "elastic_checks.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
