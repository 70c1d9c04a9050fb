"""The table of what large groups take (docs/how-to/rdma.md) is what `deep_ep size` says.

scale_table_test.py DEEP_EP PAGE: fails, and prints the right lines, where the page has others."""
import json
import subprocess
import sys
from pathlib import Path

NODES = 16, 64, 128


def text(size: int) -> str:
    if size < 2**20:
        return f"{size / 2**10:.0f} KiB"
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def line(tool: str, nodes: int) -> str:
    ranks = 8 * nodes
    command = [tool, "size", f"--ranks={ranks}", f"--experts={2 * ranks}", "--tokens=64", "--low-latency-tokens=64", "--json"]
    buffers = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["buffers"]
    size = next(one for one in buffers if one["mode"] == "all")
    parts = size["parts"]
    cells = (
        f"{nodes} x 8", text(parts["signals"]), text(4 * ranks * 8), text(parts["low_latency"]), text(parts["staging"]),
        f"{size['queue_pairs']:,}", text(size["ring_bytes"]), f"{ranks - 1:,}",
    )
    return f"| {' | '.join(map(str, cells))} |"


tool, page = sys.argv[1:]
lines = [line(tool, nodes) for nodes in NODES]
if "\n".join(lines) not in Path(page).read_text():
    sys.exit("\n".join([f"{page}: the table of large groups should have these lines:", *lines]))
