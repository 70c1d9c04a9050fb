"""Checks of the memory of results: it is PyTorch's, and lies in the buffer's heap where it can."""

import functools
import gc

import elastic_check_parts
import torch
import torch.distributed as dist
from normal_mode import send_rows
from test_results import of_buffer

from deep_ep import Buffer, results

MIB = 1 << 20
TOKENS, HIDDEN, TOPK = 1024, 4096, 2  # up to 8 MiB of rows from each rank


def check(function):
    """``function`` takes a FirstInterface; tensors are made on the rank's GPU."""

    @functools.wraps(function)
    def run(ranks):
        with ranks.device:
            return function(FirstInterface(ranks))

    return elastic_check_parts.check()(run)


class FirstInterface:
    """Buffers and calls of the first interface, on this rank."""

    def __init__(self, ranks):
        self.rank, self.size, self.group = ranks.rank, ranks.size, ranks.group
        self.pools = results._has_pools()
        self.experts = 2 * self.size
        self.idx = torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) % self.experts
        self.copies = torch.tensor([len({e // 2 for e in row}) for row in self.idx.tolist()])

    def buffer(self, heap=256 * MIB, **options):
        return Buffer(self.group, heap, explicitly_destroy=True, **options)

    def x(self, value):
        return torch.full((TOKENS, HIDDEN), float(value), dtype=torch.bfloat16)

    def dispatch(self, buffer, value, **options):
        """Rows that all hold ``value``, and the handle."""
        weights = torch.ones(TOKENS, TOPK, dtype=torch.float32)
        rows, _, _, _, handle, event = send_rows(buffer, self.x(value), self.idx, weights, self.experts, **options)
        return rows, handle, event

    def round_trip(self, buffer, value, **options):
        rows, handle, event = self.dispatch(buffer, value, **options)
        event.current_stream_wait() if options.get("async_finish") else None
        assert (rows == value).all(), "received"
        combined, _, _ = buffer.combine(rows, handle)
        assert (combined == (value * self.copies).unsqueeze(1)).all(), "combined"
        return rows

    def wait(self):
        torch.cuda.synchronize()
        dist.barrier(self.group)


def busy(milliseconds=200):
    """Keeps the current stream busy."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))


@check
def where_results_lie(ranks):
    buffer = ranks.buffer()
    for at in range(4):
        rows = ranks.round_trip(buffer, at + 1)
        assert of_buffer(buffer, rows) == ranks.pools
        del rows
    event = buffer.capture()
    rows = ranks.round_trip(
        buffer, 7, previous_event=event, async_finish=True, allocate_on_comm_stream=True
    )  # the communication stream has what the first one left
    assert rows.untyped_storage().resizable()
    del rows
    buffer.destroy()


@check
def resize_gives_memory_back(ranks):
    buffer = ranks.buffer(heap=64 * MIB)
    kept, places = [], []
    for at in range(16):
        rows = ranks.round_trip(buffer, at)
        view = rows.detach()[1:]
        kept.append((rows, view))
        places.append(rows.data_ptr())
        allocated = torch.cuda.memory_allocated()
        view.untyped_storage().resize_(0)
        assert rows.untyped_storage().nbytes() == 0
        assert torch.cuda.memory_allocated() <= allocated - 4 * MIB
    assert len(set(places)) <= 2, "later results take the place of freed ones"
    buffer.destroy()


def record_by_c10d(tensor, stream):
    torch.ops.aten.record_stream(tensor, stream)  # what C++ calls


@check
def recorded_streams_keep_memory(ranks):
    for record in (torch.Tensor.record_stream, record_by_c10d):
        buffer = ranks.buffer()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # loading a kernel would wait for those that run
            busy(1)
            ranks.x(0).float().mean()
        ranks.dispatch(buffer, 1)
        ranks.wait()
        for at in range(3):
            rows, _, _ = ranks.dispatch(buffer, at + 1)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                busy(300)
                total = rows.float().mean()
            record(rows, side)
            address = rows.data_ptr()
            del rows
            again, _, _ = ranks.dispatch(buffer, 100)
            assert again.data_ptr() != address, "the side stream still reads it"
            del again
            side.synchronize()
            assert total.item() == at + 1
            ranks.wait()
        buffer.destroy()


@check
def recorded_calls_take_memory_of_their_graph(ranks):
    buffer = ranks.buffer()
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ranks.idx, ranks.experts)
    x, out, total = ranks.x(1), ranks.x(0), torch.zeros((), dtype=torch.float32)

    def layer():
        rows, _, _, _, handle, _ = buffer.dispatch(
            x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
            num_worst_tokens=ranks.size * TOKENS,
        )  # fmt: skip
        here.append(of_buffer(buffer, rows))
        out.copy_(buffer.combine(rows, handle)[0])
        total.copy_(rows[0].float().mean())

    here = []
    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            layer()
    assert here == [ranks.pools, False, False, False]
    held = ranks.round_trip(buffer, 50)  # not the graph's memory
    for at in range(2, 6):
        x.fill_(at)
        graph.replay()
        assert (out == (at * ranks.copies).unsqueeze(1)).all() and total.item() == at
        assert (held == 50).all()
        ranks.round_trip(buffer, at)
    del graph
    ranks.wait()
    buffer.destroy()


@check
def a_full_heap_is_no_error(ranks):
    """What does not fit lies elsewhere in PyTorch's memory, and PyTorch keeps what it has cached."""
    buffer = ranks.buffer(heap=64 * MIB)
    cached = torch.empty(512 * MIB, dtype=torch.uint8)
    del cached
    reserved = torch.cuda.memory_reserved()
    held = [ranks.round_trip(buffer, at) for at in range(24)]
    inside = [of_buffer(buffer, rows) for rows in held]
    assert inside[0] == ranks.pools and not inside[-1], inside
    assert torch.cuda.memory_reserved() >= reserved, "caches were given back"
    for at, rows in enumerate(held):
        assert (rows == at).all()
    del held, rows
    torch.cuda.synchronize()
    again = []
    for at in range(70):
        rows = ranks.round_trip(buffer, at)
        again.append(of_buffer(buffer, rows))
        del rows
    assert again[-1] == ranks.pools, "there is room again, which is tried now and then"
    buffer.destroy()
    return f"{sum(inside)} of {len(inside)} in the heap; again after {again.index(ranks.pools)} calls"


@check
def calls_on_several_streams(ranks):
    buffer = ranks.buffer()
    streams = [torch.cuda.Stream() for _ in range(3)]
    here = []
    for at in range(12):
        stream = streams[at % 3]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            here.append(of_buffer(buffer, ranks.round_trip(buffer, at)))
        torch.cuda.current_stream().wait_stream(stream)
    assert here == [ranks.pools] * 12, "each has a segment"
    ranks.wait()
    buffer.destroy()


@check
def memory_of_a_buffer_that_results_outlive(ranks):
    torch.cuda.empty_cache()
    ranks.wait()
    before = torch.cuda.mem_get_info()[0]
    buffer = ranks.buffer(heap=1024 * MIB)
    rows = ranks.round_trip(buffer, 3)
    with_buffer = torch.cuda.mem_get_info()[0]
    buffer.destroy()
    del buffer
    gc.collect()
    assert (rows == 3).all()
    del rows
    torch.cuda.empty_cache()
    ranks.wait()
    after = torch.cuda.mem_get_info()[0]
    assert before - with_buffer > 900 * MIB and before - after < 300 * MIB, (before, with_buffer, after)
    # Without results that outlive it, all of it goes at once.
    buffer = ranks.buffer(heap=1024 * MIB)
    ranks.round_trip(buffer, 3)
    buffer.destroy()
    ranks.wait()
    left = (before - torch.cuda.mem_get_info()[0]) / MIB
    assert left < 300, f"{left:.0f} MiB after destroy"
    return f"{left:.0f} MiB of 1024 after destroy"
