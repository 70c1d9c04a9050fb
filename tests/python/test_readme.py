"""The program of README.md, as it stands there, on two ranks."""

import os
import pathlib
import re
import socket
import subprocess
import sys

from time_scale import scaled

README = pathlib.Path(__file__).resolve().parents[2] / "README.md"


def test_the_program_of_the_first_screen(tmp_path):
    program = tmp_path / "layer.py"
    program.write_text(re.search(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in range(2):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        variables["CUDA_VISIBLE_DEVICES"] = ""  # a machine may have one GPU for two ranks
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(program)], env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    for rank, process in enumerate(ranks):
        output = process.communicate(timeout=scaled(60))[0]
        assert process.returncode == 0, output
        assert re.search(rf"^rank {rank}: [1-9]\d* rows came for 128 tokens, torch.Size\(\[128, 7168\]\)$", output, re.M), output
