"""What the test scripts with upstream's names share."""

import os
import socket


def launched_by_torchrun():
    """Then WORLD_SIZE and RANK count ranks; otherwise they count nodes."""
    return "LOCAL_RANK" in os.environ and "LOCAL_WORLD_SIZE" in os.environ


def free_port():
    """A port of this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
