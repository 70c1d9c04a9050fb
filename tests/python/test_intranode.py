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
from normal_mode import InsideANode, print_once, run_cases
from normal_mode_on_gpus import host_time, run_graphs

import deep_ep

GPU = torch.cuda.is_available()


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


def run_rank(local_rank, args):
    rank, num_ranks, group = init_dist(local_rank, args.num_processes)
    num_sms = 24
    buffer = deep_ep.Buffer(
        group, int(2e9), 0, low_latency_mode=False, num_qps_per_rank=1, explicitly_destroy=True,
        allow_mnnvl=args.allow_mnnvl, use_fabric=args.use_fabric, **({"results": args.results} if args.results else {}),
    )  # fmt: skip
    print_once(
        rank,
        f"[config] num_tokens={args.num_tokens}, hidden={args.hidden}, num_topk={args.num_topk}, "
        f"num_experts={args.num_experts}, ranks={num_ranks} on {'GPUs' if GPU else 'the CPU'}",
    )
    inputs = run_cases(args, rank, num_ranks, group, buffer, deep_ep.Config(num_sms, 8, 256), InsideANode())
    tune(args, rank, num_ranks, group, buffer, num_sms, inputs)
    if GPU:
        config = deep_ep.Config(num_sms, 8, 256)
        run_graphs(args, rank, num_ranks, buffer, config, InsideANode())
        host_time(rank, group, buffer, config, inputs)
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
    parser.add_argument("--results", help="the memory of results: auto, ordinary or heap")
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
