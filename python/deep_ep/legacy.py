"""The first interface under the name that some programs look for: what ``deep_ep.buffer`` has."""

from .buffer import Buffer, Config, EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
