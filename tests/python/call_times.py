"""What calls cost besides their kernels: how long each keeps the host, how much of that is Python, and what the expanded layout
adds to a dispatch beside what its bytes must take.

    python tests/python/call_times.py [--num-processes 2 ...]

Host: medians of calls in a row, while the device may lag behind. "Python" is what is left without the time inside the native
module. Expanded: a dispatch may take 1.1 times the plain one, and the time that this GPU takes to move the additional bytes
(received rows read, rows of the layout written) at the rate of a large copy. Without a GPU host times alone, of small calls.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import free_port, init_dist

import deep_ep

GPU_SHAPES = [(128, 7168, 8, 256), (4096, 7168, 8, 256), (8192, 7168, 6, 256)]
CPU_SHAPES = [(16, 256, 4, 8)]


class Timed:
    """The native buffer, which counts the seconds inside its calls."""

    def __init__(self, native):
        self.native, self.seconds = native, 0.0

    def __getattr__(self, name):
        value = getattr(self.native, name)
        if not callable(value):
            return value

        def call(*arguments):
            begin = time.perf_counter()
            try:
                return value(*arguments)
            finally:
                self.seconds += time.perf_counter() - begin

        self.__dict__[name] = call  # found without this function the next time
        return call


def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


def wait():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host_times(buffer, call, batches, calls):
    """Microseconds: median of calls, and of the part of it that is Python's (by a second pass)."""
    for _ in range(5):
        call()
    whole, native = [], []
    for timed in (False, True):
        kept = buffer.runtime
        if timed:
            buffer.runtime = Timed(kept)
            call()
        for _ in range(batches):
            wait()
            dist.barrier()
            for _ in range(calls):
                before = buffer.runtime.seconds if timed else 0.0
                begin = time.perf_counter()
                call()
                took = time.perf_counter() - begin
                if timed:
                    native.append(took - (buffer.runtime.seconds - before))
                else:
                    whole.append(took)
        wait()
        buffer.runtime = kept
    return [1e6 * sorted(times)[len(times) // 2] for times in (whole, native)]


def calls_of_the_first_interface(group, shape):
    """(name, buffer, call)"""
    tokens, hidden, topk, experts = shape
    buffer = deep_ep.Buffer(group, int(1e9) if torch.cuda.is_available() else 0, explicitly_destroy=True)
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=device())
    idx = torch.rand(tokens, experts, dtype=torch.float32, device=device()).topk(topk, dim=1).indices.to(deep_ep.topk_idx_t)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, experts)
    rows, _, _, _, handle, _ = buffer.dispatch(
        x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert
    )
    yield "dispatch, cached", buffer, lambda: buffer.dispatch(x, handle=handle)
    yield "combine", buffer, lambda: buffer.combine(rows, handle)
    buffer.destroy()


def calls_of_low_latency(group, shape):
    tokens, hidden, topk, experts = shape
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(tokens, hidden, group.size(), experts)
    buffer = deep_ep.Buffer(group, 0, size, low_latency_mode=True, num_qps_per_rank=1, explicitly_destroy=True)
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=device())
    idx = torch.rand(tokens, experts, dtype=torch.float32, device=device()).topk(topk, dim=1).indices.to(deep_ep.topk_idx_t)
    weights = torch.rand(tokens, topk, dtype=torch.float32, device=device())
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, tokens, experts, use_fp8=False)
    for name, fp8 in (("fp8", True), ("bf16", False)):
        yield f"low-latency dispatch, {name}", buffer, lambda fp8=fp8: buffer.low_latency_dispatch(
            x, idx, tokens, experts, use_fp8=fp8
        )
    yield "low-latency combine", buffer, lambda: buffer.low_latency_combine(rows, idx, weights, handle)
    buffer.destroy()


def calls_of_the_second_interface(group, shape):
    tokens, hidden, topk, experts = shape
    buffer = deep_ep.ElasticBuffer(
        group, num_max_tokens_per_rank=tokens, hidden=hidden, num_topk=topk, explicitly_destroy=True
    )
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=device())
    idx = torch.rand(tokens, experts, dtype=torch.float32, device=device()).topk(topk, dim=1).indices
    for name, expand in (("plain", False), ("expanded", True)):
        options = {"num_experts": experts, "do_expand": expand}
        rows, _, _, handle, _ = buffer.dispatch(x, idx, **options)
        yield f"V2 dispatch, cached, {name}", buffer, lambda: buffer.dispatch(x, handle=handle, do_expand=expand)
        yield f"V2 dispatch, no host wait, {name}", buffer, lambda: buffer.dispatch(x, idx, do_cpu_sync=False, **options)
        yield f"V2 combine, {name}", buffer, lambda: buffer.combine(rows, handle)
    buffer.destroy()


def microseconds(call, runs=20, rounds=5):
    """Median of rounds of calls back to back, by the device's clock; of the slowest rank."""
    times = []
    for _ in range(rounds):
        call()
        wait()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20_000_000)  # about 10 ms: the host runs ahead
        begin.record()
        for _ in range(runs):
            call()
        end.record()
        wait()
        times.append(1e3 * begin.elapsed_time(end) / runs)
    slowest = torch.tensor(sorted(times)[rounds // 2], dtype=torch.float64, device="cpu")
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, slowest.item())
    return max(everybody)


def copy_rate():
    """Bytes a microsecond, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / microseconds(lambda: target.copy_(source))


def expanded_beside_plain(group, shape, rate, say):
    tokens, hidden, topk, experts = shape
    buffer = deep_ep.ElasticBuffer(
        group, num_max_tokens_per_rank=tokens, hidden=hidden, num_topk=topk, explicitly_destroy=True
    )
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=device())
    idx = torch.rand(tokens, experts, dtype=torch.float32, device=device()).topk(topk, dim=1).indices
    times = {}
    for expand in (False, True):
        rows, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=experts, do_expand=expand)
        received = handle.recv_src_metadata.size(0)
        times["cached", expand] = microseconds(lambda: buffer.dispatch(x, handle=handle, do_expand=expand))
        times["no host wait", expand] = microseconds(
            lambda: buffer.dispatch(x, idx, num_experts=experts, do_expand=expand, do_cpu_sync=False)
        )
    moved = (received + rows.size(0)) * hidden * 2
    for kind in ("cached", "no host wait"):
        plain, expanded = times[kind, False], times[kind, True]
        allowed = 1.1 * plain + moved / rate
        say(
            f"[expanded] {tokens} tokens, top-{topk}, {kind}: plain {plain:.1f} us, expanded {expanded:.1f} us; "
            f"{received} rows become {rows.size(0)}, {moved / 1e6:.1f} MB more, {moved / rate:.1f} us at {rate / 1e3:.0f} GB/s; "
            f"allowed {allowed:.1f} us: {'within' if expanded <= allowed else 'OVER'}"
        )
    buffer.destroy()


def run_rank(local_rank, args):
    rank, _, group = init_dist(local_rank, args.num_processes)
    gpu = torch.cuda.is_available()
    torch.set_default_device(None)  # a default makes PyTorch call Python in each of its operations
    torch.manual_seed(rank)

    def say(text):
        if rank == 0:
            print(text, flush=True)

    first, *_ = shapes = GPU_SHAPES if gpu else CPU_SHAPES
    with torch.inference_mode():
        for calls in (calls_of_the_first_interface, calls_of_low_latency, calls_of_the_second_interface):
            for name, buffer, call in calls(group, first):
                whole, python = host_times(buffer, call, 5 if gpu else 1, 60 if gpu else 3)
                say(f"[host] {name}: {whole:.1f} us a call, of which Python {python:.1f} us")
        if gpu:
            rate = copy_rate()
            for shape in shapes:
                expanded_beside_plain(group, shape, rate, say)
    dist.barrier()
    dist.destroy_process_group()


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    default = torch.cuda.device_count() or 2
    parser.add_argument("--num-processes", type=int, default=default, help="ranks to start (default: %(default)s)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    arguments = parse()
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    mp.spawn(run_rank, args=(arguments,), nprocs=arguments.num_processes)
