"""TCP ports of this host for a test. They stay bound, so the system gives them to no other program, until the test is over; a
listener that sets SO_REUSEADDR can use them.

usage: held_ports.py COMMAND...   runs COMMAND with the port in the variable PORT
"""

import contextlib
import os
import socket
import subprocess
import sys


def bind(count):
    """Bound sockets with consecutive ports."""
    while True:
        sockets, first = [], 0
        try:
            for index in range(count):
                sockets.append(socket.socket())
                sockets[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sockets[-1].bind(("", first and first + index))
                first = first or sockets[-1].getsockname()[1]
            return sockets
        except (OSError, OverflowError):  # another program has one of them
            for one in sockets:
                one.close()


@contextlib.contextmanager
def held_ports(count=1):
    """The first of ``count`` consecutive ports."""
    sockets = bind(count)
    try:
        yield sockets[0].getsockname()[1]
    finally:
        for one in sockets:
            one.close()


if __name__ == "__main__":
    with held_ports() as port:
        sys.exit(subprocess.call(sys.argv[1:], env={**os.environ, "PORT": str(port)}))
