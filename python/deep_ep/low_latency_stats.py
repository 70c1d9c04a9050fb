"""How long low-latency calls have waited for each rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List

__all__ = ["LowLatencyStats", "WaitTimes"]


@dataclass(frozen=True)
class WaitTimes:
    """Of calls of one kind on one rank. The lists have an entry for each source rank."""

    #: Dispatch: calls. Combine: those for which a token of this rank selected an expert of the source.
    calls: List[int]
    #: Microseconds waited for the source in all these calls.
    total_us: List[float]
    #: Microseconds waited for the source in one of them, at most.
    longest_us: List[float]


@dataclass(frozen=True)
class LowLatencyStats:
    """What ``Buffer.low_latency_stats()`` returns, of one rank. A rank for which all others wait long is late."""

    dispatch: WaitTimes
    combine: WaitTimes
