"""The interfaces by generation: ``legacy`` is the first, ``elastic`` the second."""

from . import elastic, legacy

__all__ = ["elastic", "legacy"]
