"""What programs use beside a buffer: events, checks, and the helpers of tests in the manner of upstream's."""

from .event import EventHandle, EventOverlap
from .nvlink import check_nvlink_connections

__all__ = ["EventHandle", "EventOverlap", "check_nvlink_connections"]
