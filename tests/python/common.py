"""What the test scripts with upstream's names share: launch, numbers, timing."""

import json
import os
import socket
import tempfile

import torch
import torch.distributed as dist

from deep_ep.utils.envs import group_settings
from deep_ep.utils.exchange import all_reduce


def launched_by_torchrun():
    """Then WORLD_SIZE and RANK count ranks; otherwise they count nodes."""
    return "LOCAL_RANK" in os.environ and "LOCAL_WORLD_SIZE" in os.environ


def free_port():
    """A port of this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def init_dist(local_rank, num_local_ranks):
    """One process a rank. With GPUs: NCCL (gloo where ranks share them), bfloat16 and CUDA as defaults, as engines have it.
    Without: gloo."""
    nodes, node = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if launched_by_torchrun():
        nodes, node = nodes // num_local_ranks, node // num_local_ranks
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "8361"))
    gpu = torch.cuda.is_available()
    dist.init_process_group(
        init_method=f"tcp://{address}:{port}",
        world_size=nodes * num_local_ranks,
        rank=node * num_local_ranks + local_rank,
        **group_settings(local_rank, num_local_ranks),
    )
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda" if gpu else "cpu")
    if not gpu:
        torch.set_num_threads(1)
    return dist.get_rank(), dist.get_world_size(), dist.new_group(list(range(nodes * num_local_ranks)))


def calc_diff(x, y):
    """Relative squared difference of the values shifted by one; 0 for equal tensors."""
    x, y = x.double() + 1, y.double() + 1
    return (1 - 2 * (x * y).sum() / (x * x + y * y).sum()).item()


def per_token_cast_to_fp8(x):
    """8-bit rows, and a float32 scale for each 128 channels."""
    blocks = x.float().view(x.size(0), -1, 128)
    amax = blocks.abs().amax(dim=2).clamp(min=1e-4)
    rows = (blocks * (448.0 / amax.unsqueeze(2))).to(torch.float8_e4m3fn).view(x.shape)
    return rows, amax / 448.0


def per_token_cast_back(x, scales):
    """bfloat16 rows from 8-bit ones; scales are float32, or int32 with an exponent in each byte."""
    if x.numel() == 0:
        return x.to(torch.bfloat16)
    if scales.dtype == torch.int32:
        exponents = scales.contiguous().flatten().view(torch.uint8).to(torch.int32)
        scales = (exponents << 23).view(torch.float32)
    blocks = x.float().view(x.size(0), -1, 128)
    return (blocks * scales.float().reshape(x.size(0), -1, 1)).view(x.shape).to(torch.bfloat16)


def hash_tensor(x):
    """The sum of the tensor's 32-bit words, so the order of rows does not matter."""
    return x.contiguous().flatten().view(torch.int32).to(torch.int64).sum().item()


def bench(call, warm_ups=50, runs=50):
    """Mean, least and largest seconds of a call; the first measured run does not count."""
    if not torch.cuda.is_available():
        import time

        times = []
        for _ in range(4):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        times = times[1:]
        return sum(times) / len(times), min(times), max(times)
    torch.cuda.synchronize()
    flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
    for _ in range(warm_ups):
        call()
    flush.zero_()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) / 1e3 for begin, end in events][1:]
    return sum(times) / len(times), min(times), max(times)


def _kernel_times(path, name):
    """Microseconds of the recorded kernels that are functions ``name...`` of a namespace, in the order they ran."""
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel" and f"::{name}" in event["name"]]
    return [event["dur"] for event in sorted(kernels, key=lambda event: event["ts"])]


def bench_kineto(call, names, parts=1, calls=30, align=True):
    """Mean seconds of the kernels that ``call`` runs, by PyTorch's profiler: a number for each of ``names``, or, with
    ``parts`` kernels of that name a call, a list.

    As upstream's function of this name it wants every name in exactly one line of the profiler's table: an operation is
    one kernel, and no other kernel's signature contains its name.
    """
    from torch.profiler import ProfilerActivity, profile, schedule

    once = schedule(wait=0, warmup=1, active=1, repeat=1)  # another cycle would drop what this one recorded
    with profile(activities=[ProfilerActivity.CUDA], schedule=once) as recorded:
        for _ in range(2):
            if align:  # ranks start together, behind work that lets the host run ahead
                left = torch.randn((8192, 8192), dtype=torch.float32, device="cuda")
                left @ left
                all_reduce(torch.ones(1, dtype=torch.float32, device="cuda"))
            for _ in range(calls):
                call()
            torch.cuda.synchronize()
            recorded.step()
    table = recorded.key_averages().table(sort_by="cuda_time_total", max_name_column_width=100).split("\n")
    result = []
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        recorded.export_chrome_trace(path)
        for name in names:
            lines = [line for line in table if name in line]
            assert len(lines) == 1, f"'{name}' is in {len(lines)} lines of the profiler's table:\n" + "\n".join(table)
            times = _kernel_times(path, name)
            assert times and len(times) % parts == 0, f"{len(times)} kernels '::{name}' were recorded"
            means = [sum(times[part::parts]) / len(times[part::parts]) / 1e6 for part in range(parts)]
            result.append(means[0] if parts == 1 else means)
    return result
