"""Statistics of waits over low-latency calls."""

import pickle

from cluster import on_ranks
from low_latency_calls import M, combine, dispatch, ll_case, make_buffer, outputs_of

from deep_ep.low_latency_stats import WaitTimes


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
    assert begun.dispatch == WaitTimes([0, 0], [0, 0], [0, 0]) == begun.combine
    for _ in range(3):
        run()
    seen = buffer.low_latency_stats()
    assert seen.dispatch.calls == [3, 3] and seen == pickle.loads(pickle.dumps(seen))
    for times in (seen.dispatch, seen.combine):
        assert all(0 <= one <= all_calls for one, all_calls in zip(times.longest_us, times.total_us))
    run()
    assert buffer.low_latency_stats().dispatch.calls == [4, 4]
