"""Timing of calls, on GPUs by events and PyTorch's profiler."""

from __future__ import annotations

import os
import time
from typing import Any, Callable, List, Optional, Sequence, Tuple, Union

import torch

from .exchange import all_reduce

__all__ = ["bench", "bench_kineto", "flush_l2_cache"]

_L2_BYTES = 256 << 20


def flush_l2_cache() -> None:
    """Writes more than a GPU's second-level cache holds."""
    torch.empty(_L2_BYTES // 4, dtype=torch.int32, device="cuda").zero_()


def bench(
    fn: Callable[[], Any], num_warmups: int = 50, num_tests: int = 50, post_fn: Optional[Callable[[], Any]] = None
) -> Tuple[float, float, float]:
    """Mean, least and largest seconds of a call; the first measured one does not count. On the CPU with few runs."""
    gpu = torch.cuda.is_available()
    times: List[float] = []
    for _ in range(num_warmups if gpu else 1):
        fn()
    if gpu:
        torch.cuda.synchronize()
        flush_l2_cache()
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(num_tests)]
        for begin, end in pairs:
            begin.record()
            fn()
            end.record()
            if post_fn is not None:
                post_fn()
        torch.cuda.synchronize()
        times = [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
    else:
        for _ in range(min(num_tests, 3) + 1):
            start = time.perf_counter()
            fn()
            times.append(time.perf_counter() - start)
            if post_fn is not None:
                post_fn()
    times = times[1:] or times
    return sum(times) / len(times), min(times), max(times)


def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: Union[str, Sequence[str]],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: Optional[str] = None,
    flush_l2: bool = True,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
    barrier: Optional[Callable[[], Any]] = None,
) -> Any:
    """Mean seconds of the kernels whose names contain ``kernel_names``, one number for each; with
    ``num_kernels_per_period`` above 1 a list for each. NaN for a kernel that did not run, and everywhere on the CPU.
    EP_USE_NVIDIA_TOOLS=1 leaves profiling to others and returns ones."""
    names = [kernel_names] if isinstance(kernel_names, str) else list(kernel_names)

    def answer(values: List[Any]) -> Any:
        return values[0] if isinstance(kernel_names, str) else tuple(values)

    fn()
    if os.environ.get("EP_USE_NVIDIA_TOOLS", "0") == "1":
        return answer([1.0] * len(names))
    if not torch.cuda.is_available():
        return answer([float("nan")] * len(names))
    from torch.profiler import ProfilerActivity, profile, schedule

    align_ranks = barrier_comm_profiling and os.environ.get("EP_DISABLE_BARRIER_PROFILING", "0") != "1"
    with profile(activities=[ProfilerActivity.CUDA], schedule=schedule(wait=0, warmup=1, active=1, repeat=1)) as recorded:
        for _ in range(2):
            for _ in range(num_tests):
                if flush_l2:
                    flush_l2_cache()
                if align_ranks:
                    torch.cuda._sleep(int(2e7))  # about 10 ms: hosts run ahead
                    if barrier is not None:
                        barrier()
                    else:
                        all_reduce(torch.ones(1, dtype=torch.float32, device="cuda"))
                fn()
            torch.cuda.synchronize()
            recorded.step()
    if trace_path is not None:
        recorded.export_chrome_trace(trace_path)
    averages = recorded.key_averages()
    if not suppress_kineto_output:
        print(averages.table(sort_by="cuda_time_total", max_name_column_width=100), flush=True)
    kernels = sorted(
        (event for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA),
        key=lambda event: event.time_range.start,
    )
    values: List[Any] = []
    for name in names:
        lines = [line for line in averages if name in line.key]
        assert len(lines) <= 1, f"'{name}' is in {len(lines)} lines of the profiler's table, allowed: at most one"
        times = [event.time_range.elapsed_us() / 1e6 for event in kernels if name in event.name]
        parts = [times[part::num_kernels_per_period] for part in range(num_kernels_per_period)]
        means = [sum(part) / len(part) if part else float("nan") for part in parts]
        values.append(means[0] if num_kernels_per_period == 1 else means)
    return answer(values)
