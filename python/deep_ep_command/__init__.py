"""The command ``deep_ep``. Outside of the package deep_ep, whose import needs PyTorch."""

import importlib.util
import os
import sys


def main() -> None:
    spec = importlib.util.find_spec("deep_ep")  # imports nothing
    command = os.path.join(os.path.dirname(spec.origin), "bin", "deep_ep") if spec and spec.origin else ""
    if not os.path.exists(command):
        sys.exit("deep_ep: the package deep_ep is not installed beside this command, or has no command; reinstall it")
    os.execv(command, [command, *sys.argv[1:]])
