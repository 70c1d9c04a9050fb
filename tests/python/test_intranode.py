"""Dispatch and combine within a node: every combination of options. `deep_ep bench intranode` has the timings.

On GPUs: ``python tests/python/test_intranode.py`` (8 processes, NCCL). Without a GPU the same on CPU ranks with small
shapes. MASTER_ADDR, MASTER_PORT, WORLD_SIZE (nodes) and RANK (of the node) as for upstream's script of this name.
"""

import torch.distributed as dist
import torch.multiprocessing as mp
from common import parser_of_script, run_on_cpu_ranks
from normal_mode import run_script

import deep_ep
from deep_ep.utils.envs import init_dist


def run_rank(local_rank, args):
    _, _, group = init_dist(local_rank, args.num_processes)
    buffer = deep_ep.Buffer(
        group, int(2e9), 0, low_latency_mode=False, num_qps_per_rank=1, explicitly_destroy=True,
        allow_mnnvl=args.allow_mnnvl, use_fabric=args.use_fabric,
    )  # fmt: skip
    run_script(args, buffer, deep_ep.Config(24, 8, 256))
    buffer.destroy()
    dist.barrier()
    dist.destroy_process_group()


def parse(arguments=None):
    parser = parser_of_script("Test dispatch and combine within a node", (4096, 64), (256, 16), 256)
    parser.add_argument("--allow-mnnvl", action="store_true", help="allow NVLink between nodes")
    parser.add_argument("--use-fabric", action="store_true", help="memory that other nodes of an NVLink domain can map")
    return parser.parse_args(arguments)


def test_intranode_on_cpu_ranks(monkeypatch):
    words = "--num-processes 4 --num-tokens 32 --hidden 256 --num-topk 4 --num-experts 16"
    run_on_cpu_ranks(monkeypatch, run_rank, parse(words.split()))


if __name__ == "__main__":
    arguments = parse()
    mp.spawn(run_rank, args=(arguments,), nprocs=arguments.num_processes)
