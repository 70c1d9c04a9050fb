"""examples/python/engines: each on CPU ranks, as its own command runs it."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from common import free_port

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "examples" / "python"


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
