"""The command ``deep_ep``. Outside of the package deep_ep, whose import needs PyTorch."""

import importlib.util
import os
import runpy
import sys


def main() -> None:
    spec = importlib.util.find_spec("deep_ep")  # imports nothing
    if spec is None or spec.origin is None:
        sys.exit("deep_ep: the package deep_ep is not installed beside this command; reinstall it")
    runpy.run_path(os.path.join(os.path.dirname(spec.origin), "__main__.py"), run_name="__main__")
