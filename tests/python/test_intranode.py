"""Dispatch and combine within a node: every combination of options. `deep_ep bench intranode` has the timings.

On GPUs: ``python tests/python/test_intranode.py`` (8 processes, NCCL). Without a GPU the same on CPU ranks with small
shapes. MASTER_ADDR, MASTER_PORT, WORLD_SIZE (nodes) and RANK (of the node) as for upstream's script of this name.
"""

import argparse
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import free_port
from normal_mode import InsideANode, print_once, run_cases
from normal_mode_on_gpus import run_graphs

import deep_ep
from deep_ep.utils.envs import init_dist

GPU = torch.cuda.is_available()


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
    config = deep_ep.Config(num_sms, 8, 256)
    run_cases(args, rank, num_ranks, group, buffer, config, InsideANode())
    if GPU:
        run_graphs(args, rank, num_ranks, buffer, config, InsideANode())
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
