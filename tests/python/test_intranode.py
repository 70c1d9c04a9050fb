"""Dispatch and combine within a node: every combination of options, then timings.

On GPUs: ``python tests/python/test_intranode.py`` (8 processes, NCCL). Without a GPU the same on CPU ranks with small
shapes. MASTER_ADDR, MASTER_PORT, WORLD_SIZE (nodes) and RANK (of the node) as for upstream's script of this name.
"""

import argparse
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import bench, free_port, init_dist
from normal_mode import InsideANode, make_inputs, print_once, run_cases

import deep_ep

GPU = torch.cuda.is_available()


def run_graphs(args, rank, num_ranks, buffer, config):
    """Layout, dispatch of worst-case size and combine in a CUDA graph, replayed with other data each time."""
    print_once(rank, "[testing] Running in CUDA graphs ...", end="")
    worst = args.num_tokens * num_ranks
    x = torch.empty((args.num_tokens, args.hidden), dtype=torch.bfloat16)
    topk_idx, topk_weights, *_ = make_inputs(args, rank, num_ranks)

    def step(num_worst_tokens):
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, args.num_experts)
        recv, recv_idx, recv_weights, _, handle, _ = buffer.dispatch(
            x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
            topk_idx=topk_idx, topk_weights=topk_weights, num_worst_tokens=num_worst_tokens, config=config,
        )  # fmt: skip
        again = buffer.dispatch(x, handle=handle, config=config)[0]
        back, back_weights, _ = buffer.combine(again, handle, recv_weights, config=config)
        return recv, recv_idx, back, back_weights

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.fill_(1)
        step(worst)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        recv, recv_idx, back, back_weights = step(worst)
    for replay in range(10):
        torch.manual_seed(1000 * replay + rank)
        x.normal_()
        topk_idx.copy_(make_inputs(args, rank, num_ranks)[0])
        topk_weights.uniform_()
        graph.replay()
        wanted, wanted_idx, wanted_back, wanted_weights = step(0)
        rows = wanted.size(0)
        assert torch.equal(recv[:rows], wanted) and torch.equal(recv_idx[:rows], wanted_idx)
        assert (recv_idx[rows:] == -1).all()
        assert torch.equal(back, wanted_back) and torch.equal(back_weights, wanted_weights)
    print_once(rank, " passed\n")


def tune(args, rank, num_ranks, group, buffer, num_sms, inputs):
    """Bandwidths over NVLink. The chunk sizes that upstream sweeps change nothing here; the lines stay comparable."""
    x, x_fp8, handle, (per_rank, in_rank, per_expert), received = inputs
    row_bytes = args.hidden * 2
    chunks = list(range(4, 33, 2)) if GPU else [4]
    for rows in (x_fp8, x):
        fp8 = isinstance(rows, tuple)
        nbytes = received * (args.hidden * (1 + 4 / 128) if fp8 else row_bytes)
        best = None
        for chunk in [*chunks, 0]:
            if chunk:
                config = deep_ep.Config(num_sms, chunk, 256)
            else:
                deep_ep.Buffer.set_num_sms(num_sms)
                config = deep_ep.Buffer.get_dispatch_config(num_ranks)
            seconds = bench(lambda: buffer.dispatch(rows, handle=handle, config=config))[0]
            if best is None or seconds < best[0]:
                best = (seconds, chunk)
            print_once(
                rank,
                f"[tuning] SMs {num_sms}, NVL chunk {chunk or 'default'}: "
                f"{nbytes / 1e9 / seconds:.2f} GB/s (NVL), avg_t: {seconds * 1e6:.2f} us",
            )
        print_once(
            rank,
            f"[tuning] Best dispatch ({'FP8' if fp8 else 'BF16'}): SMs {num_sms}, NVL chunk {best[1] or 'default'}, "
            f"{nbytes / 1e9 / best[0]:.2f} GB/s (NVL), t: {best[0] * 1e6:.2f} us\n",
        )
        dist.barrier(group)

    recv, _, _, _, handle, _ = buffer.dispatch(
        x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
        config=deep_ep.Config(num_sms, 8, 256),
    )  # fmt: skip
    best = None
    for chunk in [*(range(1, 17) if GPU else [1]), 0]:
        config = deep_ep.Config(num_sms, chunk, 256) if chunk else deep_ep.Buffer.get_combine_config(num_ranks)
        seconds = bench(lambda: buffer.combine(recv, handle, config=config))[0]
        if best is None or seconds < best[0]:
            best = (seconds, chunk)
        print_once(
            rank,
            f"[tuning] SMs {num_sms}, NVL chunk {chunk or 'default'}: "
            f"{received * row_bytes / 1e9 / seconds:.2f} GB/s (NVL), avg_t: {seconds * 1e6:.2f} us",
        )
    print_once(
        rank,
        f"[tuning] Best combine: SMs {num_sms}, NVL chunk {best[1] or 'default'}, "
        f"{received * row_bytes / 1e9 / best[0]:.2f} GB/s (NVL), t: {best[0] * 1e6:.2f} us\n",
    )


def host_time(rank, group, buffer, inputs):
    """How long a call keeps the host, the device far behind: cached dispatches and combines in a row."""
    import time

    x, _, handle, _, _ = inputs
    config = deep_ep.Config(24, 8, 256)
    recv = buffer.dispatch(x, handle=handle, config=config)[0]
    for name, call in (
        ("dispatch", lambda: buffer.dispatch(x, handle=handle, config=config)),
        ("combine", lambda: buffer.combine(recv, handle, config=config)),
    ):
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        dist.barrier(group)
        times = []
        for _ in range(100):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        times.sort()
        print_once(rank, f"[host] {name}: median {times[50] * 1e6:.1f} us, least {times[0] * 1e6:.1f} us a call")


def run_rank(local_rank, args):
    rank, num_ranks, group = init_dist(local_rank, args.num_processes)
    num_sms = 24
    buffer = deep_ep.Buffer(
        group, int(2e9), 0, low_latency_mode=False, num_qps_per_rank=1, explicitly_destroy=True,
        allow_mnnvl=args.allow_mnnvl, use_fabric=args.use_fabric,
    )  # fmt: skip
    print_once(
        rank,
        f"[config] num_tokens={args.num_tokens}, hidden={args.hidden}, num_topk={args.num_topk}, "
        f"num_experts={args.num_experts}, ranks={num_ranks} on {'GPUs' if GPU else 'the CPU'}",
    )
    inputs = run_cases(args, rank, num_ranks, group, buffer, deep_ep.Config(num_sms, 8, 256), InsideANode())
    tune(args, rank, num_ranks, group, buffer, num_sms, inputs)
    if GPU:
        run_graphs(args, rank, num_ranks, buffer, deep_ep.Config(num_sms, 8, 256))
        host_time(rank, group, buffer, inputs)
    buffer.destroy()
    dist.barrier()
    dist.destroy_process_group()


def parse(arguments=None):
    parser = argparse.ArgumentParser(description="Test dispatch and combine within a node")
    parser.add_argument("--num-processes", type=int, default=8 if GPU else 4, help="processes to start (default: %(default)s)")
    parser.add_argument("--num-tokens", type=int, default=4096 if GPU else 64, help="tokens per rank (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=7168 if GPU else 256, help="hidden size (default: %(default)s)")
    parser.add_argument("--num-topk", type=int, default=8 if GPU else 4, help="experts a token (default: %(default)s)")
    parser.add_argument("--num-experts", type=int, default=256 if GPU else 16, help="experts (default: %(default)s)")
    parser.add_argument("--allow-mnnvl", action="store_true", help="allow NVLink between nodes")
    parser.add_argument("--use-fabric", action="store_true", help="memory that other nodes of an NVLink domain can map")
    return parser.parse_args(arguments)


def test_intranode_on_cpu_ranks(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "GPU", False)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    args = parse(["--num-processes", "4", "--num-tokens", "32", "--hidden", "256", "--num-topk", "4", "--num-experts", "16"])
    mp.spawn(run_rank, args=(args,), nprocs=args.num_processes)


if __name__ == "__main__":
    arguments = parse()
    mp.spawn(run_rank, args=(arguments,), nprocs=arguments.num_processes)
