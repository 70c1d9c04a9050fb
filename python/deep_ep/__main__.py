"""``python -m deep_ep``: the deep_ep command."""

import os
import pathlib
import sys


def main() -> None:
    command = pathlib.Path(__file__).parent / "bin" / "deep_ep"
    if not command.exists():
        sys.exit("deep_ep: this installation has no command; reinstall the package")
    os.execv(command, [str(command), *sys.argv[1:]])


main()
