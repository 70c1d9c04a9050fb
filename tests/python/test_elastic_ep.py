"""Dispatch and combine of the second interface with every combination of options, on all ranks of a launch.

    python tests/python/test_elastic_ep.py [--num-processes 8 ...]

One command a node; WORLD_SIZE counts nodes and RANK is the node's. The flags are those of upstream's script for this
interface. Inputs, references and timing come from ``deep_ep.utils``. All comparisons are exact. Without a GPU the same on
CPU ranks with small shapes, and without times.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import free_port

import deep_ep
from deep_ep.buffers.elastic import ElasticBuffer
from deep_ep.utils import refs
from deep_ep.utils.envs import dist_print, init_dist
from deep_ep.utils.gate import get_unbalanced_scores
from deep_ep.utils.math import align, count_bytes, per_token_cast_back, per_token_cast_to_fp8, safe_div
from deep_ep.utils.testing import bench, bench_kineto

EVENTS = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 1), (1, 1, 1)]


def make_buffer(args, group):
    return ElasticBuffer(
        group, num_max_tokens_per_rank=args.num_tokens, hidden=args.hidden, deterministic=args.deterministic,
        allow_hybrid_mode=args.allow_hybrid_mode, allow_multiple_reduction=args.allow_multiple_reduction,
        prefer_overlap_with_compute=args.prefer_overlap_with_compute, sl_idx=args.sl_idx,
        num_allocated_qps=args.num_allocated_qps, num_cpu_timeout_secs=args.num_cpu_timeout_secs,
        num_gpu_timeout_secs=args.num_gpu_timeout_secs, explicitly_destroy=True,
    )  # fmt: skip


def make_inputs(args, rank, ranks):
    tokens = max(1, args.num_tokens - rank)
    scores = get_unbalanced_scores(
        tokens, args.num_experts, ranks, args.num_topk, args.unbalanced_ratio, args.precise_unbalanced_ratio
    )
    weights, topk_idx = scores.topk(args.num_topk, dim=1)
    masked = torch.rand(topk_idx.shape, dtype=torch.float32) < args.masked_ratio
    x = torch.randn((tokens, args.hidden), dtype=torch.bfloat16)
    return x, topk_idx.masked_fill(masked, -1).to(deep_ep.topk_idx_t), weights.masked_fill(masked, 0.0)


def by_id(ids, tensor):
    return tensor[ids.argsort()]


def dequantized(x):
    return per_token_cast_back(*x) if isinstance(x, tuple) else x


def same(first, second, where=None):
    for a, b in zip(*(each if isinstance(each, tuple) else (each,) for each in (first, second))):
        a, b = (a, b) if where is None else (a[where], b[where])
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def cut(x, rows):
    return tuple(part[:rows] for part in x) if isinstance(x, tuple) else x[:rows]


def check_case(args, buffer, inputs, copy, alignment, fp8, num_biases, stream):
    x, topk_idx, topk_weights = inputs
    ranks, rank, most = buffer.num_ranks, buffer.rank_idx, args.num_tokens
    experts = args.num_experts // ranks
    sent = per_token_cast_to_fp8(x) if fp8 else x
    sms = {"num_sms": args.num_sms, "num_qps": args.num_qps}

    def events():
        previous, asynchronous, allocate = stream
        return {"previous_event": buffer.capture() if previous else None, "async_with_compute_stream": asynchronous,
                "allocate_on_comm_stream": allocate}  # fmt: skip

    def done(result):
        if stream[1]:
            result[-1].current_stream_wait()
        return result[:-1]

    fixed = dict(num_experts=args.num_experts, num_max_tokens_per_rank=most, expert_alignment=alignment,
                 do_handle_copy=copy, do_cpu_sync=args.do_cpu_sync, topk_weights=topk_weights, **sms)  # fmt: skip
    stats = torch.zeros(experts, dtype=torch.int32)
    first = done(buffer.dispatch(sent, topk_idx, cumulative_local_expert_recv_stats=stats, **fixed, **events()))
    wide = done(buffer.dispatch(sent, topk_idx, do_expand=True, use_tma_aligned_col_major_sf=True, **fixed, **events()))
    (recv_x, local, weights, handle), (wide_x, none, wide_weights, wide_handle) = first, wide
    assert none is None and (handle.topk_idx.data_ptr() == topk_idx.data_ptr()) == (not copy)

    # Which tokens came.
    want_x, want_local, want_weights, want_ids, sources = refs.dispatch(sent, topk_idx, topk_weights, most, args.num_experts)
    n = want_ids.numel()
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == sources.cumsum(0).tolist()
    if args.do_cpu_sync:
        assert handle.recv_src_metadata.size(0) == n
    handle.recv_src_metadata, wide_handle.recv_src_metadata = handle.recv_src_metadata[:n], wide_handle.recv_src_metadata[:n]
    ids, wide_ids = handle.recv_src_metadata[:, 0], wide_handle.recv_src_metadata[:, 0]
    assert torch.equal(ids.sort()[0], want_ids.sort()[0]) and torch.equal(ids, wide_ids)
    for got, want in zip(cut(recv_x, n) if fp8 else (recv_x[:n],), want_x if fp8 else (want_x,)):
        same(by_id(ids, got), by_id(want_ids, want))
    assert torch.equal(by_id(ids, local[:n]), by_id(want_ids, want_local))
    here = by_id(want_ids, want_local) >= 0
    assert torch.equal(by_id(ids, weights[:n])[here], by_id(want_ids, want_weights)[here])

    # How many.
    counts = torch.bincount(want_local[want_local >= 0].flatten(), minlength=experts)
    aligned = [align(count, alignment) for count in counts.tolist()]
    assert handle.num_recv_tokens_per_expert_list == (aligned if args.do_cpu_sync else [])
    assert torch.equal(handle.num_unaligned_recv_tokens_per_expert.long(), counts) and torch.equal(stats.long(), counts)
    ends = torch.tensor(aligned).cumsum(0)
    assert torch.equal(handle.psum_num_recv_tokens_per_expert.long(), ends)
    psum = wide_handle.psum_num_recv_tokens_per_expert.long()
    assert torch.equal(psum, ends - torch.tensor(aligned) + counts)

    # All copies of a token are the token.
    slots = wide_handle.recv_src_metadata[:, 2:].long()
    assert torch.equal(slots >= 0, local[:n] >= 0)
    narrow, plain = dequantized(wide_x), dequantized(cut(recv_x, n))
    for k in range(args.num_topk):
        valid = slots[:, k] >= 0
        same(narrow[slots[valid, k]], plain[valid])
        assert torch.equal(wide_weights[slots[valid, k]], weights[:n][valid, k])

    # By a handle the same comes again.
    again = done(buffer.dispatch(sent, handle=handle, **sms, **events()))
    same(cut(again[0], n), cut(recv_x, n))
    assert torch.equal(again[1][:n], local[:n]) and again[3] is handle
    again = done(buffer.dispatch(sent, handle=wide_handle, topk_weights=topk_weights, do_expand=True, do_zero_padding=True,
                                 use_tma_aligned_col_major_sf=True, **sms, **events()))  # fmt: skip
    again_rows = dequantized(again[0])
    same(again_rows[slots[slots >= 0]], narrow[slots[slots >= 0]])
    assert torch.equal(again[2][slots[slots >= 0]], wide_weights[slots[slots >= 0]])
    for end in psum.tolist():
        assert (again_rows[end : align(end, alignment)] == 0).all() and (again[2][end : align(end, alignment)] == 0).all()

    # Back.
    biases = tuple(torch.randn_like(x) for _ in range(num_biases))
    bias = None if not biases else biases[0] if num_biases == 1 else biases
    values = refs.generate_pre_combine_data(ids, most, args.num_topk, args.hidden)
    values = torch.where((slots >= 0).unsqueeze(2), values, 0.0)
    sums = torch.full((recv_x[0] if fp8 else recv_x).shape, float("nan"), dtype=torch.bfloat16)
    sums[:n] = refs.ordered_accumulate(values)
    rows = torch.full(narrow.shape, float("nan"), dtype=torch.bfloat16)
    rows[slots[slots >= 0]] = values[slots >= 0]
    mine = torch.arange(x.size(0)) + rank * most
    own = refs.generate_pre_combine_data(mine, most, args.num_topk, args.hidden)
    for layout, y, on, row_weights in (("flat", sums[:n], handle, weights[:n]), ("wide", rows, wide_handle, wide_weights)):
        single = layout == "wide" and not args.allow_multiple_reduction
        given = None if single else row_weights.contiguous()
        combined, back = done(buffer.combine(y.contiguous(), on, given, bias, **sms, **events()))
        want = refs.combine(own, topk_idx, *buffer.get_logical_domain_size(), args.num_experts, bias, not single, False)
        assert torch.equal(combined, want), layout
        assert back is None if single else torch.equal(back, topk_weights)
    return sent, handle, wide_handle, sums[:n].contiguous(), rows


def report(args, buffer, calls):
    """Lines with times, and what they move over the links of one domain."""
    sent, handle, wide_handle, sums, rows = calls
    n = handle.recv_src_metadata.size(0)
    row_bytes = safe_div(count_bytes(sent), (sent[0] if isinstance(sent, tuple) else sent).size(0))
    for mark, kernels, call, moved in (
        ("#", ("dispatch_impl", "dispatch_copy_epilogue_impl"), lambda: buffer.dispatch(sent, handle=handle), n * row_bytes),
        ("-", ("dispatch_impl", "dispatch_copy_epilogue_impl"),
         lambda: buffer.dispatch(sent, handle=wide_handle, do_expand=True), n * row_bytes),
        ("@", ("combine_impl", "combine_reduce_epilogue_impl"), lambda: buffer.combine(sums, handle), count_bytes(sums)),
        ("+", ("combine_impl", "combine_reduce_epilogue_impl"), lambda: buffer.combine(rows, wide_handle), count_bytes(sums)),
    ):  # fmt: skip
        parts = bench_kineto(call, kernels, barrier_comm_profiling=True, barrier=buffer.barrier)
        assert not torch.cuda.is_available() or all(part > 0 for part in parts), parts  # NaN is not, either
        seconds = bench(call)[0]
        text = ", ".join(f"{name} {part * 1e6:.0f} us" for name, part in zip(kernels, parts))
        dist_print(f" {mark} rank {buffer.rank_idx}: {seconds * 1e6:.0f} us, {moved / 1e9 / seconds:.1f} GB/s (SU); {text}")


def run_rank(local_rank, args):
    rank, ranks, group = init_dist(local_rank, args.num_processes, args.seed)
    with torch.inference_mode():
        buffer = make_buffer(args, group)
        if rank == 0:
            print("Config:", {key: value for key, value in vars(args).items()}, flush=True)
        inputs = make_inputs(args, rank, ranks)
        cases = [(copy, alignment, fp8, biases, stream) for copy in (1, 0) for alignment in (128, 1) for fp8 in (1, 0)
                 for biases in (0, 1, 2) for stream in EVENTS]  # fmt: skip
        for number, case in enumerate(cases):
            if args.every > 1 and number % args.every:
                continue
            calls = check_case(args, buffer, inputs, *case)
            if rank == 0:
                print("copy={}, alignment={}, FP8={}, biases={}, (previous, async, allocate)={}".format(*case), flush=True)
            if not args.skip_perf_test:
                report(args, buffer, calls)
            if args.test_first_only:
                break
        buffer.barrier(with_cpu_sync=True)
        buffer.destroy()
    dist.barrier()
    dist.destroy_process_group()


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    numbers = {
        "num-processes": 8, "num-sms": 0, "num-qps": 0, "num-allocated-qps": 0, "num-gpu-timeout-secs": 100,
        "num-cpu-timeout-secs": 100, "sl-idx": 0, "num-tokens": 4096, "hidden": 7168, "num-topk": 6, "num-experts": 256,
        "do-cpu-sync": 1, "allow-hybrid-mode": 1, "allow-multiple-reduction": 1, "prefer-overlap-with-compute": 0, "seed": 0,
        "every": 1,
    }  # fmt: skip
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, ratio in {"unbalanced-ratio": 1.0, "masked-ratio": 0.0}.items():
        parser.add_argument(f"--{name}", type=float, default=ratio)
    for name in ("deterministic", "skip-perf-test", "test-first-only", "precise-unbalanced-ratio"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args(arguments)


def launch(monkeypatch, flags):
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    small = "--num-processes 2 --num-tokens 16 --hidden 256 --num-topk 4 --num-experts 16 "
    args = parse((small + flags).split())
    mp.spawn(run_rank, args=(args,), nprocs=args.num_processes)


def test_on_cpu_ranks(monkeypatch):
    launch(monkeypatch, "--every 13 --masked-ratio 0.3 --skip-perf-test")


def test_single_reduction_without_host_wait(monkeypatch):
    launch(monkeypatch, "--every 11 --do-cpu-sync 0 --allow-multiple-reduction 0 --unbalanced-ratio 2 --test-first-only")


if __name__ == "__main__":
    arguments = parse()
    assert os.environ.get("RANK") is None or "LOCAL_RANK" not in os.environ, "start one command a node, not torchrun"
    mp.spawn(run_rank, args=(arguments,), nprocs=arguments.num_processes)
