# SPDX-License-Identifier: MIT
"""What programs use beside a buffer: events, checks, and the helpers of tests in the manner of upstream's."""

from . import envs, event, gate, math, refs, testing
from .event import EventHandle, EventOverlap
from .nvlink import check_nvlink_connections

__all__ = [
    "EventHandle",
    "EventOverlap",
    "check_nvlink_connections",
    "envs",
    "event",
    "gate",
    "math",
    "refs",
    "testing",
]
