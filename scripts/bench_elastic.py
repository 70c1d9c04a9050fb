#!/usr/bin/env python3
"""Measures the V2 interface in a node, and prints CSV with columns of `deep_ep bench --csv`. A process is a rank.

    PYTHONPATH=build/cuda/python scripts/bench_elastic.py --num-processes 8 --tokens 128 4096 8192 > v2.csv

`exchange` finds the routes, `expanded` has a row for each selection besides, `cached` follows a handle; combine takes rows
of both layouts. A round begins on all GPUs at once, and is as long as on the slowest rank. Without GPUs: CPU ranks, whose
times say nothing.
"""

import argparse
import csv
import os
import socket
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from deep_ep import ElasticBuffer, topk_idx_t
from deep_ep.utils.envs import init_dist
from deep_ep.utils.math import per_token_cast_to_fp8

COLUMNS = ("benchmark", "operation", "dtype", "mode", "by", "device", "ranks", "nodes", "tokens", "hidden", "topk", "experts", "median_us",
           "min_us", "max_us", "mean_us", "gb_per_s", "status")  # fmt: skip
GPU = torch.cuda.is_available()


def rounds(call, buffer, group, arguments):
    """Microseconds of each round, the slowest rank's."""
    taken = []
    for _ in range(arguments.warmup + arguments.iterations):
        if GPU:
            torch.cuda._sleep(200_000)  # the host is ahead of the GPU, so that its own time is not measured
            buffer.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            taken.append(begin.elapsed_time(end) * 1e3)
        else:
            dist.barrier(group)
            begin = time.perf_counter()
            call()
            taken.append((time.perf_counter() - begin) * 1e6)
    taken = torch.tensor(taken[arguments.warmup :], dtype=torch.float64, device="cuda" if GPU else "cpu")
    dist.all_reduce(taken, dist.ReduceOp.MAX, group=group)
    return taken.tolist()


def measured(tokens, group, arguments):
    """(operation, dtype, mode, bytes of a row, rows that this rank receives, microseconds) of each measurement."""
    ranks, device = dist.get_world_size(group), "cuda" if GPU else "cpu"
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=tokens, hidden=arguments.hidden, num_topk=arguments.topk, explicitly_destroy=True)
    torch.manual_seed(dist.get_rank(group))
    rows = torch.randn(tokens, arguments.hidden, device=device).bfloat16()
    idx = torch.rand(tokens, arguments.experts, dtype=torch.float32, device=device).topk(arguments.topk).indices.to(topk_idx_t)
    options = {"topk_weights": torch.ones(tokens, arguments.topk, dtype=torch.float32, device=device), "num_experts": arguments.experts, "expert_alignment": 128}
    assert arguments.experts % ranks == 0
    for dtype, x in (("fp8", per_token_cast_to_fp8(rows)), ("bf16", rows)):
        size = arguments.hidden * 2 if dtype == "bf16" else arguments.hidden + arguments.hidden // 32
        _, _, _, handle, _ = buffer.dispatch(x, idx, **options)
        calls = (("exchange", lambda x=x: buffer.dispatch(x, idx, **options)),
                 ("expanded", lambda x=x: buffer.dispatch(x, idx, do_expand=True, **options)),
                 ("cached", lambda x=x, handle=handle: buffer.dispatch(x, handle=handle)))  # fmt: skip
        for mode, call in calls:
            yield "dispatch", dtype, mode, size, handle.num_recv_tokens, rounds(call, buffer, group, arguments)
    for mode, expand in (("", False), ("expanded", True)):
        received, _, _, handle, _ = buffer.dispatch(rows, idx, do_expand=expand, **options)
        call = lambda received=received, handle=handle: buffer.combine(received, handle)  # noqa: E731
        yield "combine", "bf16", mode, arguments.hidden * 2, handle.num_recv_tokens, rounds(call, buffer, group, arguments)
    buffer.destroy()


def run_rank(local_rank, arguments):
    rank, ranks, group = init_dist(local_rank, arguments.num_processes)
    table = csv.writer(sys.stdout, lineterminator="\n")
    if rank == 0:
        table.writerow(COLUMNS)
    for tokens in arguments.tokens:
        for operation, dtype, mode, size, rows, taken in measured(tokens, group, arguments):
            if rank == 0:
                median = statistics.median(taken)
                times = (f"{us:.6g}" for us in (median, min(taken), max(taken), statistics.mean(taken), size * rows / median / 1e3))
                table.writerow(("intranode", operation, dtype, f"V2 {mode}".strip(), "deep_ep", "cuda" if GPU else "cpu", ranks, 1, tokens,
                                arguments.hidden, arguments.topk, arguments.experts, *times, "ok"))  # fmt: skip
                sys.stdout.flush()
    dist.barrier(group)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-processes", type=int, default=torch.cuda.device_count() or 2)
    for name, gpu, cpu in (("hidden", 7168, 256), ("topk", 8, 4), ("experts", 256, 16), ("iterations", 50, 3), ("warmup", 10, 1)):
        parser.add_argument(f"--{name}", type=int, default=gpu if GPU else cpu)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 4096] if GPU else [8])
    arguments = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ.setdefault("MASTER_PORT", str(probe.getsockname()[1]))
    mp.spawn(run_rank, args=(arguments,), nprocs=arguments.num_processes)


if __name__ == "__main__":
    main()
