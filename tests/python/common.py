"""What tests and scripts share: launches, nodes, signatures."""

import contextlib
import inspect
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


@contextlib.contextmanager
def ranks_a_node(number=2):
    """Of buffers that are made meanwhile: so many ranks of this host are a node; 0: all of them."""
    if number:
        os.environ["DEEP_EP_RANKS_PER_NODE"] = str(number)
    try:
        yield
    finally:
        os.environ.pop("DEEP_EP_RANKS_PER_NODE", None)


def signature_of(function):
    """Parameters and defaults as they are written."""
    written = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in written:
            written.append("*")
        assert parameter.kind not in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_KEYWORD)
        star = "*" if parameter.kind is inspect.Parameter.VAR_POSITIONAL else ""
        default = "" if parameter.default is inspect.Parameter.empty else f"={parameter.default!r}"
        written.append(star + parameter.name + default)
    return ", ".join(written)
