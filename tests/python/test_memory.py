"""Results in PyTorch's memory: low-latency calls in CUDA graphs, beside what the same graphs take of PyTorch alone.

``python tests/python/test_memory.py --num-processes 2`` on GPUs. The memory of a graph is measured as the GPU sees it, so
that a pool of the library's own would show.
"""

import argparse
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import free_port

import deep_ep
from deep_ep.utils.envs import init_dist


def used_bytes():
    """As the GPU sees it, and of PyTorch."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return torch.tensor([total - free, torch.cuda.memory_reserved()], dtype=torch.int64, device="cpu")


def record(layer, layers, graphs):
    """Memory that recording takes (see used_bytes), and the graphs."""
    recorded, pool = [], None
    before = used_bytes()
    for _ in range(graphs):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            for _ in range(layers):
                layer()
        pool = graph.pool()  # engines share a pool between batch sizes
        recorded.append(graph)
    return (used_bytes() - before).tolist(), recorded


def run_rank(local_rank, args):
    rank, num_ranks, group = init_dist(local_rank, args.num_processes)
    tokens, hidden, experts, topk = args.num_tokens, args.hidden, args.num_experts, args.num_topk
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(tokens, hidden, num_ranks, experts)
    buffer = deep_ep.Buffer(
        group, num_rdma_bytes=size, low_latency_mode=True, num_qps_per_rank=experts // num_ranks, explicitly_destroy=True
    )
    torch.manual_seed(rank)
    x = torch.randn(tokens, hidden)
    topk_idx = torch.rand(tokens, experts, dtype=torch.float32).topk(topk, dim=1).indices.to(deep_ep.topk_idx_t)
    weights = torch.rand(tokens, topk, dtype=torch.float32)
    out = torch.empty_like(x)

    def layer():
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, tokens, experts, use_fp8=False)
        combined, _, _ = buffer.low_latency_combine(rows, topk_idx, weights, handle)
        out.copy_(combined)

    def same_of_torch():
        rows = torch.empty(experts // num_ranks, num_ranks * tokens, hidden)
        combined = torch.empty(tokens, hidden)
        del rows
        out.copy_(combined)

    layer()
    expected = out.clone()

    # Beside PyTorch alone.
    of_torch, graphs = record(same_of_torch, args.layers, args.graphs)
    del graphs
    torch.cuda.empty_cache()
    ours, graphs = record(layer, args.layers, args.graphs)
    one = 2 * tokens * num_ranks * hidden * (experts // num_ranks)
    if rank == 0:
        print(
            f"[graphs] {args.graphs} x {args.layers} layers: {ours[0] / 2**20:.0f} MB of the GPU, {ours[1] / 2**20:.0f} of them "
            f"PyTorch's; PyTorch alone {of_torch[0] / 2**20:.0f} and {of_torch[1] / 2**20:.0f} MB; rows of one call "
            f"{one / 2**20:.0f} MB", flush=True,
        )  # fmt: skip
    # Handles and counts are small tables.
    assert ours[1] <= 1.05 * of_torch[1], (ours, of_torch)
    # What CUDA keeps for the kernels of a graph does not depend on the calls' sizes.
    kept = (1 << 17) * args.graphs * args.layers
    assert ours[0] <= 1.05 * of_torch[0] + kept, (ours, of_torch)

    out.zero_()
    for graph in graphs:
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected), "what graphs compute"
    del graphs
    torch.cuda.empty_cache()

    # PyTorch holds almost all of the GPU's memory, unused: results come from there.
    dist.barrier()
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(max(0, free - (one // 2)), dtype=torch.uint8)
    del held
    layer()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)

    # Results and handles that are dropped before the call that uses them has ended, on another stream.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())

    def noise():
        return torch.full((experts // num_ranks, num_ranks * tokens, hidden), float("nan"))

    for round_ in range(20):
        asynchronous = round_ % 2 == 1  # the dispatch; combine always
        with torch.cuda.stream(side):
            rows, _, handle, event, _ = buffer.low_latency_dispatch(
                x, topk_idx, tokens, experts, use_fp8=False, async_finish=asynchronous
            )
            if asynchronous:
                event.current_stream_wait()
            combined, event, _ = buffer.low_latency_combine(rows, topk_idx, weights, handle, async_finish=True)
            del rows, handle
            noise()
            event.current_stream_wait()
            out.copy_(combined)
            del combined
            noise()
        torch.cuda.synchronize()
        assert torch.equal(out, expected), f"round {round_}: memory was used again too early"
    if rank == 0:
        print("[memory] passed", flush=True)
    buffer.destroy()
    dist.barrier()
    dist.destroy_process_group()


def asleep(group):
    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=4, hidden=128, num_topk=1, explicitly_destroy=True)
    x, idx = torch.ones(4, 128, dtype=torch.bfloat16), torch.zeros(4, 1, dtype=deep_ep.topk_idx_t)
    rows, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=group.size())
    buffer.suspend()
    try:
        buffer.combine(rows, handle)
    except deep_ep.errors.InvalidArgument as error:
        refused = str(error)
    buffer.resume()
    total = buffer.combine(rows, handle)[0].sum().item()
    buffer.destroy()
    return refused, total


def test_asleep(ranks):
    for refused, total in ranks(2).run(asleep):
        assert "the buffer is suspended, allowed: resume" in refused and total == 4 * 128


def parse(arguments=None):
    parser = argparse.ArgumentParser(description="Test results in PyTorch's memory")
    parser.add_argument("--num-processes", type=int, default=2, help="processes to start (default: %(default)s)")
    parser.add_argument("--num-tokens", type=int, default=128, help="tokens per rank (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=7168, help="hidden size (default: %(default)s)")
    parser.add_argument("--num-topk", type=int, default=8, help="experts a token (default: %(default)s)")
    parser.add_argument("--num-experts", type=int, default=256, help="experts (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=60, help="recorded in each graph (default: %(default)s)")
    parser.add_argument("--graphs", type=int, default=8, help="how many (default: %(default)s)")
    return parser.parse_args(arguments)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_memory_of_graphs():
    os.environ["MASTER_PORT"] = str(free_port())
    mp.spawn(run_rank, args=(parse([]),), nprocs=2)


if __name__ == "__main__":
    arguments = parse()
    mp.spawn(run_rank, args=(arguments,), nprocs=arguments.num_processes)
