"""The first interface: ``Buffer``, as ``deep_ep.buffer`` has it."""

from ..buffer import Buffer, Config, EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
