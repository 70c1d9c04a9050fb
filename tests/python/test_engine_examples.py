"""examples/python/engines: each on CPU ranks, as its own command runs it."""

import os
import pathlib
import sys

import pytest

from common import free_port, output_of

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "examples" / "python"


@pytest.mark.parametrize("name", ["prepare_finalize", "two_batch", "flex_dispatcher"])
def test_example(name):
    path = os.pathsep.join([str(FOLDER), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    printed = output_of(sys.executable, "-m", f"engines.{name}", seconds=300, MASTER_PORT=str(free_port()), PYTHONPATH=path)
    assert printed.count("every result is right") == 2
