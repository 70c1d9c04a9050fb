"""What exporters of metrics read."""

from __future__ import annotations

import re
from typing import Any, Dict

from . import _native
from .errors import UseAfterDestroy
from .peers import made
from .version import __version__


def metrics() -> Dict[str, Any]:
    """Numbers of all buffers of this process, oldest first, for programs that export them. Calls do not wait for it, and
    another thread than theirs may ask.

    Returns:
        ``{"version": "0.2.0", "buffers": [...]}``; of each buffer ``rank``, ``ranks`` and ``nodes``; ``calls`` and ``bytes``, each a
        dict with ``dispatch``, ``combine``, ``low_latency_dispatch`` and ``low_latency_combine``: calls that have returned, and
        bytes of the rows of this rank's tokens, as dispatch reads and combine writes them; ``lost_ranks``, a list, until
        ``low_latency_resume``; ``handlers``, what tells NICs of work, such as ``["cpu"]``, empty inside a node.
        Calls that a CUDA graph replays are not counted.
    """
    buffers = []
    for native in [each() for each in made.valuerefs()]:  # at once: another thread may be making a buffer
        if native is None:
            continue
        try:
            buffers.append(_metrics_of(native))
        except UseAfterDestroy:
            continue
    return {"version": __version__, "buffers": buffers}


def _metrics_of(native: "_native.Buffer") -> Dict[str, Any]:
    found = native.metrics()
    found["handlers"] = sorted(set(re.findall(r"handler (\w+)", found.pop("description"))))
    return found
