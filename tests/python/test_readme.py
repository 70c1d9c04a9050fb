"""The program of README.md and the command that starts it, as they stand there, on two ranks."""

import pathlib
import re
import shlex
import sys

from common import free_port, output_of

README = pathlib.Path(__file__).resolve().parents[2] / "README.md"


def test_the_program_of_the_first_screen(tmp_path):
    text = README.read_text()
    (tmp_path / "layer.py").write_text(re.search(r"^```python\n(.*?)^```", text, re.M | re.S)[1])
    python, *arguments = shlex.split(re.search(r"^Start it with `(.*? layer\.py)`", text, re.M)[1])
    assert python == "python3", "pip and the launcher of another Python would not find the package"
    arguments[arguments.index("--nproc-per-node") + 1] = "2"
    variables = {"CUDA_VISIBLE_DEVICES": "", "PET_MASTER_PORT": str(free_port())}  # a machine may have one GPU for two ranks
    printed = output_of(sys.executable, *arguments, seconds=120, cwd=tmp_path, **variables)
    for rank in range(2):
        assert re.search(rf"rank {rank}: [1-9]\d* rows came for 128 tokens, torch.Size\(\[128, 7168\]\)", printed), printed
