"""Statistics of waits over low-latency calls."""

import pickle

import pytest
from cluster import on_ranks
from low_latency_calls import M, combine, dispatch, ll_case, make_buffer, outputs_of

from deep_ep.errors import InvalidArgument
from deep_ep.low_latency_stats import LateRanks, LowLatencyStats, WaitTimes, find_late_ranks


def waited(rank, mean_us):
    times = WaitTimes([4] * len(mean_us), [us * 4 for us in mean_us], [us * 2 for us in mean_us])
    return LowLatencyStats(rank, times, WaitTimes([0] * len(mean_us), [0.0] * len(mean_us), [0.0] * len(mean_us)))


def test_the_late_rank_is_named():
    stats = [waited(0, [0, 12, 812]), waited(1, [10, 0, 790]), waited(2, [1, 1, 0])]
    found = find_late_ranks(stats)
    assert isinstance(found, LateRanks) and found.late == [2] and found.waited_us == [1, 1, 790]
    assert "rank 2 is late: the others wait 790.0 us for it" in found.text
    assert find_late_ranks(stats[0]).late == [2] and "rank 0 waits" in find_late_ranks(stats[0]).text
    assert find_late_ranks(stats, threshold_us=1000).late == []
    assert "nobody is late" in find_late_ranks(stats, threshold_us=1000).text
    assert stats[0].mean_us(2) == 812 and stats[0].combine.mean_us(2) == 0
    with pytest.raises(InvalidArgument, match="stats are empty"):
        find_late_ranks([])


@on_ranks(2)
def test_stats(group):
    buffer = make_buffer(group)
    case = ll_case([M, M], seed=3)
    outputs = outputs_of(case)

    def run():
        handle = dispatch(buffer, case)[2]
        combine(buffer, case, outputs[buffer.rank], handle)

    run()
    begun = buffer.low_latency_stats()
    assert begun.rank == buffer.rank and begun.dispatch == WaitTimes([0, 0], [0, 0], [0, 0]) == begun.combine
    for _ in range(3):
        run()
    seen = buffer.low_latency_stats(stop=True)
    assert seen.dispatch.calls == [3, 3] and seen == pickle.loads(pickle.dumps(seen))
    for times in (seen.dispatch, seen.combine):
        assert all(0 <= one <= all_calls for one, all_calls in zip(times.longest_us, times.total_us))
    run()
    assert buffer.low_latency_stats(reset=True).dispatch.calls == [0, 0]
