"""Both interfaces where they meet streams, events, CUDA graphs and PyTorch's memory: checks that run where there are GPUs, one rank
each; those that need none, on CPU ranks. Values are compared with those of ``elastic_reference``, bit for bit."""

import gc
import importlib

import pytest
import torch
from elastic_check_parts import Rank, checks

from deep_ep import results

# They list their checks, which run in this order.
for part in ("values", "streams", "graphs", "memory", "results", "replicas", "deferred", "faces"):
    importlib.import_module(f"elastic_checks_{part}")

GPUS = min(8, torch.cuda.device_count())


def run_check(group, name, cpu, pools=True):
    """Of one rank. Without ``pools``: as with a PyTorch that has no pools of memory."""
    device = torch.device("cpu")
    if not cpu:
        device = torch.device("cuda", group.rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.cuda.init()
    has_pools = results._has_pools
    if not pools:
        results._has_pools = lambda: False
    try:
        ranks = Rank(group, device)
        text = checks[name][0](ranks)
        gc.collect()
        ranks.wait()
    finally:
        results._has_pools = has_pools
    return text or ""


@pytest.mark.parametrize("name", [name for name, (_, needs_gpu, _) in checks.items() if not needs_gpu])
def test_on_cpu_ranks(ranks, name):
    ranks(2).run(run_check, name, True)


def on_gpus():
    """Checks of the memory of results also run as with a PyTorch that has no pools."""
    for name, (function, _, alone) in checks.items():
        if GPUS > 1 or GPUS and alone:
            yield name, True
            if function.__module__ == "elastic_checks_results":
                yield name, False


@pytest.mark.parametrize("name, pools", list(on_gpus()) or [pytest.param("", True, marks=pytest.mark.skip(reason="needs a GPU"))])
def test_on_gpus(ranks_of_this_file, name, pools):
    print(name, ranks_of_this_file(GPUS).run(run_check, name, False, pools)[0])
