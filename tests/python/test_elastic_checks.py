"""The checks of elastic_checks.py: those that need no GPU on CPU ranks, all of them where there are GPUs."""

import pytest
import torch
from elastic_checks import checks, reason_to_skip, run_check

GPUS = min(8, torch.cuda.device_count())


@pytest.mark.parametrize("name", [name for name in checks if not reason_to_skip(name, 2, True)])
def test_on_cpu_ranks(ranks, name):
    ranks(2).run(run_check, name, True)


def on_gpus():
    """Checks of the memory of results also run as with a PyTorch that has no pools."""
    for name, (function, *_) in checks.items():
        if GPUS and not reason_to_skip(name, GPUS, False):
            yield name, True
            if function.__module__ == "elastic_checks_results":
                yield name, False


@pytest.mark.parametrize("name, pools", list(on_gpus()) or [pytest.param("", True, marks=pytest.mark.skip(reason="needs a GPU"))])
def test_on_gpus(ranks_of_this_file, name, pools):
    ranks_of_this_file(GPUS).run(run_check, name, False, pools)
