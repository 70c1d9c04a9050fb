"""Results freed by ``untyped_storage().resize_(0)`` on GPUs: how much memory comes back, and the tests of ``test_results.py``
with every tensor on a GPU.

``python tests/python/test_freed_results.py --num-processes 2``.
"""

import argparse
import os

import pytest
import test_results
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import free_port, init_dist

import deep_ep


def allocated():
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def low_latency_rows_come_back(rank, num_ranks, group):
    """Rows of PyTorch's memory, which their handle and a view of them outlive."""
    tokens, hidden, experts = 128, 7168, 256
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(tokens, hidden, num_ranks, experts)
    buffer = deep_ep.Buffer(
        group, num_rdma_bytes=size, low_latency_mode=True, num_qps_per_rank=experts // num_ranks, explicitly_destroy=True
    )
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16)
    topk_idx = torch.rand(tokens, experts).topk(8, dim=1).indices.to(deep_ep.topk_idx_t)
    weights = torch.ones(tokens, 8)
    before = allocated()
    kept = []
    for call in range(3):
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, tokens, experts, use_fp8=False)
        taken, of_rows = allocated() - before, rows.untyped_storage().nbytes()
        combined, _, _ = buffer.low_latency_combine(rows, topk_idx, weights, handle)
        torch.testing.assert_close(combined, x * 8, rtol=0.02, atol=0.1)
        view = rows.detach()[1:]
        view.untyped_storage().resize_(0)
        combined.untyped_storage().resize_(0)
        left = allocated() - before
        kept.append((rows, view, combined, handle))
        assert taken >= of_rows and left < of_rows // 16 * (call + 1), (call, taken, left, of_rows)
        if rank == 0:
            print(f"[freed] low latency, call {call}: {taken / 1e6:.1f} MB, then {left / 1e6:.1f} MB", flush=True)
    buffer.destroy()


def run_rank(local_rank, args):
    rank, num_ranks, group = init_dist(local_rank, args.num_processes)
    torch.set_default_dtype(torch.float32)  # as the tests that run on the CPU have it
    low_latency_rows_come_back(rank, num_ranks, group)
    test_results.test_nothing_of_torch_is_changed()
    for kind in ("auto", "heap"):
        test_results.test_handles_outlive_freed_results(kind)
    dist.barrier()
    for elastic in (False, True):
        test_results.each_result(group, elastic)
    test_results.megatron_overlap(group, False)
    torch.cuda.synchronize()
    if rank == 0:
        print("[freed] passed", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def parse(arguments=None):
    parser = argparse.ArgumentParser(description="Test results that are freed early, on GPUs")
    parser.add_argument("--num-processes", type=int, default=2, help="processes to start (default: %(default)s)")
    return parser.parse_args(arguments)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_freed_results():
    os.environ["MASTER_PORT"] = str(free_port())
    mp.spawn(run_rank, args=(parse([]),), nprocs=2)


if __name__ == "__main__":
    arguments = parse()
    mp.spawn(run_rank, args=(arguments,), nprocs=arguments.num_processes)
