"""examples/python/engines: each on CPU ranks, as its own command runs it."""

import os
import pathlib
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
