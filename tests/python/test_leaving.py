"""How a rank ends, and where its peer is: each cell of the table names the rank, long before the deadline."""

import multiprocessing
import pathlib
import re
import tempfile
from concurrent import futures

import pytest
from time_scale import scaled

LEFT, GONE = r"rank 1 has left the buffer", r"the process of rank 1 has ended"
#: What the peer is told.
ENDS = {
    "exception": f"{LEFT}|{GONE}",
    "return": f"{LEFT}|{GONE}",
    "del": LEFT,
    "Ctrl-C": f"{LEFT}|{GONE}",
    "SIGTERM": GONE,
    "SIGKILL": GONE,
    "_exit": GONE,
    "exit with a live buffer": f"{LEFT}|{GONE}",
    "refused, then left": f"{LEFT}.*Rank 1 has not made the call: it has made . of this buffer, rank 0 has made",
    "never": r"waited .* s for rank 1 .*Rank 1 has not made the call",
}
PLACES = ["dispatch", "combine", "low-latency dispatch", "low-latency combine", "hook", "destroy"]
CELLS = [
    *((how, where, False) for where in PLACES for how in ENDS),
    *((how, where, True) for where in PLACES if where not in ("dispatch", "combine") for how in ENDS if how != "never"),
    ("out of memory", "dispatch", False),
    ("never", "constructor", False),
]
#: Each way to end and each place is here once or more.
QUICK = {
    *((how, "dispatch", False) for how in ENDS),
    *(("del", where, False) for where in PLACES),
    ("SIGKILL", "low-latency combine", True),
    ("exception", "low-latency dispatch", True),
    *CELLS[-2:],
}
LONG = 60.0


def run_cell(context, how, where, masks):
    import leaving

    deadline = scaled(1.5) if how == "never" else LONG
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(2):
            here, there = context.Pipe()
            arguments = (rank, f"{folder}/store", there, how, where, masks, deadline)
            processes.append(context.Process(target=leaving.run, args=arguments, daemon=True))
            processes[-1].start()
            there.close()
            ends.append(here)
        try:
            if where != "constructor":
                assert ends[1].poll(scaled(60)) and ends[1].recv() == "ready"
                ends[0].send("rank 1 is about to end")
                ends[1].send("end")
            assert ends[0].poll(scaled(90)), "rank 0 hangs"
            seconds, said, status = ends[0].recv()
            answer = None
            if processes[1].is_alive() and how in ("out of memory", "del", "refused, then left", "never"):
                ends[1].send("rank 0 has ended")
                if how == "out of memory":
                    assert ends[1].poll(scaled(60))
                    answer = ends[1].recv()
            return seconds, said, status, answer
        except (AssertionError, EOFError) as error:
            said = [pathlib.Path(f"{folder}/store.{rank}") for rank in range(2)]
            raise AssertionError(f"{error!r}; {[file.read_text() for file in said if file.exists()]}") from error
        finally:
            for process in processes:
                process.join(scaled(1))
                process.kill()
                process.join()


@pytest.fixture(scope="module")
def cells(request):
    """Ranks are forked from a process that has loaded PyTorch; several cells run at once, as they mostly wait."""
    calls = [item.callspec.params for item in request.session.items if "masks" in getattr(item, "fixturenames", ())]
    wanted = [tuple(call[name] for name in ("how", "where", "masks")) for call in calls]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["leaving"])
    with futures.ThreadPoolExecutor(4) as pool:
        yield {cell: pool.submit(run_cell, context, *cell) for cell in wanted}


@pytest.mark.parametrize(
    "how, where, masks", [pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.full) for cell in CELLS]
)
def test_a_rank_ends(cells, how, where, masks):
    seconds, said, status, answer = cells[how, where, masks].result()
    print(f"{how:24} {where:22} {'masks' if masks else '':6} {seconds:6.2f} s {said}")
    if where == "constructor":
        assert re.match(r"PeerTimeout: .*waited .* s for other ranks, making a new buffer.* Not there: rank 1$", said), said
    elif where == "destroy" and how == "never":
        assert re.match(r"PeerTimeout: .*waited .* s for the other ranks .* to destroy the buffer.* Not there: rank 1$", said), said
    elif where == "destroy" or masks:
        assert said == "returned"  # long before the deadline, which would be an error, or a mask for another reason
        assert where == "destroy" or status == [0, 1]
    elif how == "out of memory":
        assert re.match("RankMismatch: .*rank 1 has ended the call, and its own error says why", said), said
        assert "an earlier call failed after other ranks had begun it" in answer
    else:
        assert re.match(f"PeerTimeout: rank 0 .*({ENDS[how]})", said), said
    if how != "never":
        assert seconds < LONG / 2, "the deadline has ended the wait"
