"""The memory of results on GPUs: it is PyTorch's, and lies in the buffer's heap where it can.

``python tests/python/test_results_on_gpus.py --num-processes 2``; with ``--without-pools`` as with a PyTorch that has none.
"""

import argparse
import gc
import os
import time

import pytest
import test_results
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import free_port

import deep_ep
from deep_ep import results
from deep_ep.utils.envs import init_dist

MIB = 1 << 20
TOKENS, HIDDEN, TOPK = 1024, 4096, 2  # up to 8 MiB of rows from each rank
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


class Ranks:
    """This rank, and what checks share."""

    def __init__(self, rank, size, group, pools):
        self.rank, self.size, self.group, self.pools = rank, size, group, pools
        self.experts = 2 * size
        self.idx = torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) % self.experts
        self.copies = torch.tensor([len({e // 2 for e in row}) for row in self.idx.tolist()])

    def buffer(self, heap=256 * MIB, **options):
        return deep_ep.Buffer(self.group, heap, explicitly_destroy=True, **options)

    def x(self, value):
        return torch.full((TOKENS, HIDDEN), float(value), dtype=torch.bfloat16)

    def dispatch(self, buffer, value, **options):
        """Rows that all hold ``value``, and the handle."""
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(self.idx, self.experts)
        rows, _, _, _, handle, event = buffer.dispatch(
            self.x(value), num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
            topk_idx=self.idx, topk_weights=torch.ones(TOKENS, TOPK, dtype=torch.float32), **options,
        )  # fmt: skip
        return rows, handle, event

    def of_heap(self, buffer, tensor):
        heap = buffer.runtime.local_memory()
        return 0 <= tensor.data_ptr() - heap.data_ptr() < heap.numel()

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
    for kind, inside in (("auto", ranks.pools), ("ordinary", False), ("heap", True)):
        buffer = ranks.buffer(results=kind)
        for at in range(4):
            rows = ranks.round_trip(buffer, at + 1)
            assert ranks.of_heap(buffer, rows) == inside, kind
            del rows
        event = buffer.capture()
        rows = ranks.round_trip(
            buffer, 7, previous_event=event, async_finish=True, allocate_on_comm_stream=True
        )  # the communication stream has what the first one left
        resizable = rows.untyped_storage().resizable()
        assert resizable == (kind != "heap"), kind
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
def collectives_that_go_on_keep_memory(ranks):
    if dist.get_backend(ranks.group) != "nccl":
        return
    buffer = ranks.buffer()
    for at in range(5):
        rows, _, _ = ranks.dispatch(buffer, at + 1)
        gathered = torch.empty((ranks.size, *rows.shape), dtype=rows.dtype)
        busy(20)
        work = dist.all_gather_into_tensor(gathered, rows, ranks.group, async_op=True)
        del rows
        for other in range(3):
            ranks.dispatch(buffer, 100 + other)
        work.wait()
        assert (gathered == at + 1).all()
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
        here.append(ranks.of_heap(buffer, rows))
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
    inside = [ranks.of_heap(buffer, rows) for rows in held]
    assert inside[0] == ranks.pools and not inside[-1], inside
    assert torch.cuda.memory_reserved() >= reserved, "caches were given back"
    for at, rows in enumerate(held):
        assert (rows == at).all()
    del held, rows
    torch.cuda.synchronize()
    again = []
    for at in range(70):
        rows = ranks.round_trip(buffer, at)
        again.append(ranks.of_heap(buffer, rows))
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
            here.append(ranks.of_heap(buffer, ranks.round_trip(buffer, at)))
        torch.cuda.current_stream().wait_stream(stream)
    assert here == [ranks.pools] * 12, "each has a segment"
    ranks.wait()
    buffer.destroy()


@check
def asynchronous_calls(ranks):
    """Results dropped as soon as they are used, calls far ahead of the GPU."""
    buffer = ranks.buffer()
    sums = []
    for at in range(60):
        rows, handle, event = ranks.dispatch(buffer, at % 50, async_finish=True)
        event.current_stream_wait()
        busy(0.2)
        combined, _, event = buffer.combine(rows, handle, async_finish=True)
        del rows
        event.current_stream_wait()
        sums.append((at % 50, combined.float().sum()))
        del combined
    for at, total in sums:
        assert total.item() == (at * ranks.copies.sum() * HIDDEN).item(), at
    ranks.wait()
    buffer.destroy()


@check
def results_outlive_the_buffer(ranks):
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
    # Without results that outlive it, nobody has to ask.
    buffer = ranks.buffer(heap=1024 * MIB)
    ranks.round_trip(buffer, 3)
    buffer.destroy()
    ranks.wait()
    left = (before - torch.cuda.mem_get_info()[0]) / MIB
    assert left < 300, f"{left:.0f} MiB after destroy"
    return f"{left:.0f} MiB of 1024 after destroy"


@check
def low_latency_results(ranks):
    tokens, hidden, experts = 64, 2048, 4 * ranks.size
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(tokens, hidden, ranks.size, experts)
    buffer = deep_ep.Buffer(ranks.group, 0, size, low_latency_mode=True, explicitly_destroy=True)
    x = torch.randn(tokens, hidden, dtype=torch.float32).to(torch.bfloat16)
    idx = torch.rand(tokens, experts, dtype=torch.float32).topk(2, dim=1).indices
    weights = torch.full((tokens, 2), 0.5, dtype=torch.float32)
    for options in ({}, {"async_finish": True}, {"return_recv_hook": True}):
        for _ in range(3):
            rows, count, handle, event, hook = buffer.low_latency_dispatch(x, idx, tokens, experts, use_fp8=False, **options)
            hook() if hook else event.event and event.current_stream_wait()
            combined, event, hook = buffer.low_latency_combine(rows, idx, weights, handle, **options)
            hook() if hook else event.event and event.current_stream_wait()
            torch.testing.assert_close(combined, x, rtol=0.02, atol=0.05)
            for each in (rows, count, combined):
                assert each.untyped_storage().resizable()
    ranks.wait()
    buffer.destroy()


@check
def freed_rows_of_low_latency_calls_come_back(ranks):
    """Rows of PyTorch's memory, which their handle and a view of them outlive."""

    def allocated():
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    tokens, hidden, experts = 128, 7168, 256
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(tokens, hidden, ranks.size, experts)
    buffer = deep_ep.Buffer(ranks.group, 0, size, low_latency_mode=True, explicitly_destroy=True)
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16)
    idx, weights = torch.rand(tokens, experts).topk(8, dim=1).indices.to(deep_ep.topk_idx_t), torch.ones(tokens, 8)
    before, kept = allocated(), []
    for call in range(3):
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, tokens, experts, use_fp8=False)
        taken, of_rows = allocated() - before, rows.untyped_storage().nbytes()
        combined, _, _ = buffer.low_latency_combine(rows, idx, weights, handle)
        torch.testing.assert_close(combined, x * 8, rtol=0.02, atol=0.1)
        view = rows.detach()[1:]
        view.untyped_storage().resize_(0)
        combined.untyped_storage().resize_(0)
        left = allocated() - before
        kept.append((rows, view, combined, handle))
        assert taken >= of_rows and left < of_rows // 16 * (call + 1), (call, taken, left, of_rows)
    buffer.destroy()


@check
def what_cpu_ranks_check(ranks):
    for kind in ("auto", "heap"):
        test_results.test_handles_outlive_freed_results(kind)
    ranks.wait()
    test_results.megatron_overlap(ranks.group, False)


def run_rank(local_rank, args):
    rank, num_ranks, group = init_dist(local_rank, args.num_processes)
    torch.set_default_dtype(torch.float32)
    if args.without_pools:
        results._has_pools = lambda: False
    ranks = Ranks(rank, num_ranks, group, results._has_pools())
    failed = []
    for function in CHECKS:
        begin, text = time.time(), None
        try:
            text = function(ranks)
            torch.cuda.synchronize()
        except Exception as error:  # the other ranks go on
            import traceback

            failed.append(function.__name__)
            text = f"FAILED: {error!r}\n{traceback.format_exc()}"
        if rank == 0 or function.__name__ in failed:
            print(f"[results] {rank}: {function.__name__}: {time.time() - begin:.1f} s {text or ''}", flush=True)
    assert not failed, failed
    if rank == 0:
        print(f"[results] passed, PyTorch {torch.__version__}, {'with' if ranks.pools else 'without'} pools", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def parse(arguments=None):
    parser = argparse.ArgumentParser(description="Test the memory of results on GPUs")
    parser.add_argument("--num-processes", type=int, default=2, help="processes to start (default: %(default)s)")
    parser.add_argument("--without-pools", action="store_true", help="as with a PyTorch that has no pools")
    return parser.parse_args(arguments)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("options", [[], ["--without-pools"]])
def test_results_on_gpus(options):
    os.environ["MASTER_PORT"] = str(free_port())
    mp.spawn(run_rank, args=(parse(options),), nprocs=2)


if __name__ == "__main__":
    arguments = parse()
    mp.spawn(run_rank, args=(arguments,), nprocs=arguments.num_processes)
