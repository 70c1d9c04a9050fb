"""How long low-latency calls have waited for each rank, and which rank is the slow one."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import List, Sequence, Union

from . import _native

__all__ = ["LateRanks", "LowLatencyStats", "WaitTimes", "find_late_ranks"]


@dataclass(frozen=True)
class WaitTimes:
    """Of calls of one kind on one rank. The lists have an entry for each source rank."""

    #: Dispatch: calls. Combine: those for which a token of this rank selected an expert of the source.
    calls: List[int]
    #: Microseconds waited for the source in all these calls.
    total_us: List[float]
    #: Microseconds waited for the source in one of them, at most.
    longest_us: List[float]

    def mean_us(self, source: int) -> float:
        """Microseconds waited for the source in a call, on average; 0 without calls."""
        return self.total_us[source] / self.calls[source] if self.calls[source] else 0.0


@dataclass(frozen=True)
class LowLatencyStats:
    """What ``Buffer.low_latency_stats()`` returns. May be pickled, so that ``all_gather_object`` brings it to all."""

    #: The rank that waited.
    rank: int
    dispatch: WaitTimes
    combine: WaitTimes

    def mean_us(self, source: int) -> float:
        """Microseconds waited for the source in a dispatch and a combine, on average."""
        return self.dispatch.mean_us(source) + self.combine.mean_us(source)


@dataclass(frozen=True)
class LateRanks:
    """What ``find_late_ranks`` has found."""

    #: The slowest first; empty: no rank is late.
    late: List[int]
    #: Of each rank: microseconds that the others wait for it in a dispatch and a combine.
    waited_us: List[float]
    #: A sentence: "rank 5 is late: the others wait 812.4 us for it in a dispatch and a combine, ...".
    text: str


def find_late_ranks(stats: Union[LowLatencyStats, Sequence[LowLatencyStats]], threshold_us: float = 50.0) -> LateRanks:
    """Names the slow rank, from the statistics of all ranks, or of one, which then says for whom that one waits.

    For a rank, the others wait as long as the lower median of them does, in a dispatch and a combine on average. It is
    late where that is ``threshold_us`` longer than for the rank that they wait least for, and at least half as much
    longer as for the slowest one.
    """
    given = (stats,) if isinstance(stats, LowLatencyStats) else stats
    return LateRanks(*_native.find_late_ranks(tuple(map(astuple, given)), float(threshold_us)))
