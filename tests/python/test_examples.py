"""The examples, on CPU ranks."""

import importlib.util
import pathlib
import shutil
import sys

import pytest
import torch
from common import output_of

import deep_ep
from deep_ep import Buffer

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "examples" / "python"


def train(group):
    spec = importlib.util.spec_from_file_location("moe_layer", FOLDER / "moe_layer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.train_step(Buffer(group, 1 << 22), torch.device("cpu"))


def test_moe_layer(ranks):
    assert max(ranks(3).run(train)) < 0.02


def test_with_mpi():
    if shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("no mpirun, or no mpi4py")
    command = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, FOLDER / "mpi_moe_layer.py")
    assert "2 ranks: output and gradients agree" in output_of(*command, seconds=120)


@pytest.mark.full
def test_type_checkers_accept_them():
    """Strictly: what programs call has types. (pyright in strict mode accepts them, too; that is tried by hand.)"""
    pytest.importorskip("mypy")
    package = pathlib.Path(deep_ep.__file__).parents[1]
    path = "" if package.name == "site-packages" else str(package)
    command = (sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--untyped-calls-exclude=torch")
    files = sorted(path.relative_to(FOLDER) for path in FOLDER.rglob("*.py"))
    output_of(*command, *files, seconds=300, cwd=FOLDER, MYPYPATH=path)
