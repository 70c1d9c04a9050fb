"""Dispatch and combine between nodes: every combination of options. `deep_ep bench internode` has the timings.

One command a node: ``WORLD_SIZE=2 RANK=0 MASTER_ADDR=... python tests/python/test_internode.py``, as upstream's script of
this name means WORLD_SIZE (nodes) and RANK (of the node); or torchrun, which is told by LOCAL_RANK. With
``--nodes-on-this-host N`` the processes of one host play N nodes. Without a GPU the same on CPU ranks with small shapes.
"""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import GPU, launched_by_torchrun, parser_of_script, run_on_cpu_ranks
from normal_mode import InsideANode, column_major, print_once, run_cases

import deep_ep
from deep_ep.utils.envs import init_dist
from deep_ep.utils.math import hash_tensor, per_token_cast_to_fp8


class BetweenNodes(InsideANode):
    """The cases of several nodes: selections limited to some nodes, two biases, 8-bit rows of random numbers, too."""

    def __init__(self, nodes, groups):
        self.nodes, self.groups = nodes, groups

    def limit(self, scores):
        tokens, experts = scores.shape
        best = scores.view(tokens, self.nodes, -1).amax(dim=2)
        chosen = torch.zeros_like(best).scatter_(1, best.topk(self.groups, dim=1).indices, 1.0)
        return scores * chosen.repeat_interleave(experts // self.nodes, dim=1)

    def check_layout(self, per_node, in_rank):
        expected = in_rank.view(in_rank.size(0), self.nodes, -1).any(dim=2).sum(dim=0).to(torch.int32)
        assert torch.equal(per_node, expected)

    def rows(self, x, x_rank):
        constant = column_major(per_token_cast_to_fp8(x_rank))
        return [(x, x, False), (x_rank, x_rank, True), (per_token_cast_to_fp8(x), x, False), (constant, x_rank, True)]

    def ends(self, handle, rank, num_ranks):
        return [handle[-4][i].item() for i in range(num_ranks)]

    def biases(self, x):
        return torch.ones_like(x), torch.randn_like(x)


def repeat(args, rank, num_ranks, group, buffer, config, mode):
    """The same seed must give the same data, 20 times over."""
    hashes = set()
    for _ in range(20):
        torch.manual_seed(rank)
        x = torch.randn((args.num_tokens, args.hidden), dtype=torch.bfloat16)
        scores = mode.limit(torch.rand((args.num_tokens, args.num_experts), dtype=torch.float32) + 1)
        topk_idx = scores.topk(args.num_topk, dim=1).indices.to(deep_ep.topk_idx_t)
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, args.num_experts)
        recv, _, _, _, handle, _ = buffer.dispatch(
            x, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert, config=config,
        )  # fmt: skip
        hashes.add((hash_tensor(recv), hash_tensor(buffer.combine(recv, handle, config=config)[0])))
    assert len(hashes) == 1, f"rank {rank}: {len(hashes)} different results of the same data"


def run_rank(local_rank, args):
    rank, num_ranks, group = init_dist(local_rank, args.num_processes)
    nodes = args.nodes_on_this_host or num_ranks // args.num_processes
    assert nodes > 1, "test_internode.py needs at least 2 nodes: WORLD_SIZE, or --nodes-on-this-host"
    buffer = deep_ep.Buffer(
        group, int(2e9), int(1e9), low_latency_mode=args.test_ll_compatibility, num_qps_per_rank=24, explicitly_destroy=True
    )
    mode = BetweenNodes(nodes, args.num_topk_groups or min(nodes, 4))
    config = deep_ep.Config(24, 8, 512, 16, 128)
    run_cases(args, rank, num_ranks, group, buffer, config, mode)
    if args.pressure_test_mode:
        repeat(args, rank, num_ranks, group, buffer, config, mode)
    if args.test_ll_compatibility:
        low_latency_beside(rank, num_ranks, buffer)
    assert buffer.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True).numel() == int(1e9)
    buffer.destroy()
    dist.barrier()
    dist.destroy_process_group()


def low_latency_beside(rank, num_ranks, buffer):
    """Low-latency calls on the buffer of the calls before."""
    tokens, hidden, experts, topk = (16, 5120, 256, 9) if GPU else (4, 512, 4 * num_ranks, 3)
    buffer.clean_low_latency_buffer(tokens, hidden, experts)
    x = torch.full((tokens, hidden), float(rank + 1), dtype=torch.bfloat16)
    topk_idx = torch.rand((tokens, experts), dtype=torch.float32).topk(topk, dim=1).indices.to(deep_ep.topk_idx_t)
    weights = torch.full((tokens, topk), 1 / 2, dtype=torch.float32)
    rows, counts, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, tokens, experts, use_fp8=False)
    back, _, _ = buffer.low_latency_combine(rows, topk_idx, weights, handle)
    assert torch.equal(back, x * (topk / 2)), "low-latency calls behind normal ones"
    print_once(rank, "[testing] low-latency calls on the same buffer passed")


def parse(arguments=None):
    parser = parser_of_script("Test dispatch and combine between nodes", (4096, 64), (256, 16), 256)
    parser.add_argument("--num-topk-groups", type=int, help="nodes that a token may select (default: at most 4)")
    parser.add_argument("--pressure-test-mode", type=int, choices=(0, 1, 2), default=0, help="1, 2: repeat and compare")
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
        "--num-topk-groups 1 --pressure-test-mode 1 --test-ll-compatibility"
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
