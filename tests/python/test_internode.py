"""Dispatch and combine between nodes: every combination of options. `deep_ep bench internode` has the timings.

One command a node: ``WORLD_SIZE=2 RANK=0 MASTER_ADDR=... python tests/python/test_internode.py``, as upstream's script of
this name means WORLD_SIZE (nodes) and RANK (of the node); or torchrun, which is told by LOCAL_RANK. With
``--nodes-on-this-host N`` the processes of one host play N nodes. Without a GPU the same on CPU ranks with small shapes.
"""

import os

import low_latency_calls
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import GPU, launched_by_torchrun, parser_of_script, run_on_cpu_ranks
from normal_mode import run_script

import deep_ep
from deep_ep.utils.envs import init_dist


def run_rank(local_rank, args):
    _, num_ranks, group = init_dist(local_rank, args.num_processes)
    nodes = args.nodes_on_this_host or num_ranks // args.num_processes
    assert nodes > 1, "test_internode.py needs at least 2 nodes: WORLD_SIZE, or --nodes-on-this-host"
    buffer = deep_ep.Buffer(
        group, int(2e9), int(1e9), low_latency_mode=args.test_ll_compatibility, num_qps_per_rank=24, explicitly_destroy=True
    )
    for seed in range(20 if args.pressure_test_mode else 1):
        run_script(args, buffer, deep_ep.Config(24, 8, 512, 16, 128), nodes, args.num_topk_groups or min(nodes, 4), seed)
    if args.test_ll_compatibility:
        tokens, hidden, experts, topk = (16, 5120, 256 // num_ranks, 9) if GPU else (4, 512, 4, 3)
        buffer.clean_low_latency_buffer(tokens, hidden, experts * num_ranks)
        case = low_latency_calls.ll_case([tokens] * num_ranks, hidden, num_topk=topk, experts_per_rank=experts)
        low_latency_calls.check_round_trip(buffer, case, {"use_fp8": False}, tokens)
    assert buffer.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True).numel() == int(1e9)
    buffer.destroy()
    dist.barrier()
    dist.destroy_process_group()


def parse(arguments=None):
    parser = parser_of_script("Test dispatch and combine between nodes", (4096, 64), (256, 16), 256)
    parser.add_argument("--num-topk-groups", type=int, help="nodes that a token may select (default: at most 4)")
    parser.add_argument("--pressure-test-mode", type=int, choices=(0, 1, 2), default=0, help="1, 2: the same with 20 seeds")
    parser.add_argument("--test-ll-compatibility", action="store_true", help="low-latency calls on the same buffer")
    parser.add_argument("--nodes-on-this-host", type=int, default=0, help="the processes of this host play so many nodes")
    args = parser.parse_args(arguments)
    if args.nodes_on_this_host:
        if args.num_processes % args.nodes_on_this_host:
            parser.error(f"--nodes-on-this-host {args.nodes_on_this_host} does not divide --num-processes {args.num_processes}")
        os.environ["DEEP_EP_RANKS_PER_NODE"] = str(args.num_processes // args.nodes_on_this_host)
    return args


def test_internode_on_cpu_ranks(monkeypatch):
    monkeypatch.setenv("DEEP_EP_RANKS_PER_NODE", "2")  # parse sets it: it goes with the test
    words = (
        "--num-processes 4 --nodes-on-this-host 2 --num-tokens 24 --hidden 256 --num-topk 4 --num-experts 16 "
        "--num-topk-groups 1 --test-ll-compatibility"
    )
    run_on_cpu_ranks(monkeypatch, run_rank, parse(words.split()))


if __name__ == "__main__":
    arguments = parse()
    if launched_by_torchrun():
        arguments.num_processes = int(os.environ["LOCAL_WORLD_SIZE"])
        for name in ("WORLD_SIZE", "RANK"):  # of nodes, as below
            os.environ[name] = str(int(os.environ[name]) // arguments.num_processes)
        run_rank(int(os.environ["LOCAL_RANK"]), arguments)
    else:
        mp.spawn(run_rank, args=(arguments,), nprocs=arguments.num_processes)
