"""examples/python/engines: each on CPU ranks, as its own command runs it."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

from common import free_port

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "examples" / "python"


def test_random_numbers_on_another_device(monkeypatch):
    """Stands in for a GPU: a generator of the CPU makes numbers there, whatever the default device."""
    monkeypatch.syspath_prepend(str(FOLDER))
    from engines import experts

    def checked(function):
        def make(*arguments, generator=None, device=None, **options):
            assert generator is None or torch.device(device or torch.get_default_device()).type == generator.device.type
            return function(*arguments, generator=generator, device=device, **options)

        return make

    for name in ("rand", "randn"):
        monkeypatch.setattr(torch, name, checked(getattr(torch, name)))

    class Buffer:
        rank = 1

    with torch.device("meta"):
        made = experts.random_tokens(Buffer, 5, 8, 4, 2, 0)
    assert [each.device.type for each in made] == ["meta"] * 3
    scores = (FOLDER / "engines" / "flex_dispatcher.py").read_text()
    assert "torch.rand(" not in scores and "torch.randn(" not in scores


@pytest.mark.parametrize("name", ["prepare_finalize", "two_batch", "flex_dispatcher"])
def test_example(name):
    environment = {**os.environ, "MASTER_PORT": str(free_port())}
    environment["PYTHONPATH"] = os.pathsep.join([str(FOLDER), *environment.get("PYTHONPATH", "").split(os.pathsep)])
    done = subprocess.run(
        [sys.executable, "-m", f"engines.{name}"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("every result is right") == 2
    if name == "two_batch":
        require_ratios(done.stdout)


def require_ratios(printed):
    """They are those of the times printed beside them, and of the CPU nothing is promised."""
    number = r"(\d+\.\d{3})"
    alone = re.search(f"computing alone {number} ms, calls alone {number} ms", printed)
    pattern = f"one batch after the other {number} ms, interleaved {number} ms: {number} of that, {number} of the larger"
    found = re.search(pattern, printed)
    assert alone and found, printed
    after, together, of_that, of_larger = map(float, found.groups())
    assert of_that == pytest.approx(together / after, rel=0.02)
    assert of_larger == pytest.approx(together / max(map(float, alone.groups())), rel=0.02)
    assert "on the CPU that says nothing of GPUs" in printed
