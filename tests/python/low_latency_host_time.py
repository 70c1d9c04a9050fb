"""How long a low-latency call occupies the host: the median of many direct calls, whose kernels are not waited for.

    PYTHONPATH=build/host/python python3 tests/python/low_latency_host_time.py [--num-processes 2] [--num-calls 10000]

For scale, it begins with an allocation and a launch of PyTorch's own. On the CPU the kernels run within the call.
"""

import os
import statistics
import time

import torch
import torch.distributed as dist
from common import free_port, parser_of_script

from deep_ep import Buffer
from deep_ep.utils.envs import init_dist

BATCH = 100  # calls between two waits for the GPU: fewer than its queue holds


def median_us(call, num_calls):
    times, result = [], None
    for _ in range(max(1, num_calls // BATCH)):
        dist.barrier()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for _ in range(min(BATCH, num_calls)):
            begin = time.perf_counter_ns()
            result = call()  # the last result goes within the time, as it does in a program
            times.append(time.perf_counter_ns() - begin)
    del result
    return statistics.median(times) / 1e3


def run(local_rank, args):
    rank, ranks, group = init_dist(local_rank, args.num_processes)
    tokens, hidden, topk, experts = args.num_tokens, args.hidden, args.num_topk, args.num_experts
    size = Buffer.get_low_latency_rdma_size_hint(tokens, hidden, ranks, experts)
    buffer = Buffer(group, num_rdma_bytes=size, low_latency_mode=True, num_qps_per_rank=experts // ranks, explicitly_destroy=True)
    x, out = torch.randn(tokens, hidden).bfloat16(), torch.empty(tokens, hidden)
    topk_idx = torch.rand(tokens, experts).topk(topk, dim=1).indices
    weights = torch.rand(tokens, topk, dtype=torch.float32)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, tokens, experts, use_fp8=False)
    one = torch.empty(1)

    calls = {
        "torch.empty": lambda: torch.empty(tokens, hidden),
        "fill of one element": one.zero_,
        "dispatch, FP8": lambda: buffer.low_latency_dispatch(x, topk_idx, tokens, experts),
        "dispatch, BF16": lambda: buffer.low_latency_dispatch(x, topk_idx, tokens, experts, use_fp8=False),
        "combine": lambda: buffer.low_latency_combine(rows, topk_idx, weights, handle),
        "combine, out": lambda: buffer.low_latency_combine(rows, topk_idx, weights, handle, out=out),
    }
    for name, call in calls.items():
        median_us(call, min(BATCH, args.num_calls))  # warms up
        figure = median_us(call, args.num_calls)
        if rank == 0:
            print(f"{name:20} {figure:8.1f} us", flush=True)
    buffer.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = parser_of_script(__doc__.split("\n", 1)[0], (128, 128), (288, 288), 7168)
    parser.set_defaults(num_processes=2, num_topk=8)
    parser.add_argument("--num-calls", type=int, default=10000, help="calls of each kind (default: %(default)s)")
    arguments = parser.parse_args()
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    torch.multiprocessing.spawn(run, args=(arguments,), nprocs=arguments.num_processes)
