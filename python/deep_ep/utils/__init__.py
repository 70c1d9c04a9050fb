# SPDX-License-Identifier: MIT
"""What programs use beside a buffer: events, checks, and the helpers of tests in the manner of upstream's."""

from . import envs as envs, event as event, gate as gate, math as math, refs as refs, testing as testing
from .event import EventHandle as EventHandle, EventOverlap as EventOverlap
from .nvlink import check_nvlink_connections as check_nvlink_connections
