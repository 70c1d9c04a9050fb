"""Timing of calls, on GPUs by events and PyTorch's profiler."""

from __future__ import annotations

import json
import os
import re
import time
import warnings
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any, Callable, List, Optional, Sequence, Tuple, Union

import torch
import torch.distributed as dist

from .. import _native
from ..errors import WrongUse

#: Name of a kernel, a copy or a fill, and its seconds.
Launched = Tuple[str, float]

_L2_BYTES = 256 << 20
# Nothing is shorter for the profiler.
_LEAST_SECONDS = 1e-9
_OURS = re.compile(r"\bdeep_ep::(?:\w+::)*(\w+)_kernel\b")
_MARK = "spin_kernel"  # of torch.cuda._sleep
# Kernels of upstream's that its scripts ask for: they end when rows have arrived, or begin then.
_ARRIVALS = ("dispatch_impl", "combine_impl")
_EPILOGUES = ("dispatch_copy_epilogue_impl", "combine_reduce_epilogue_impl")


def flush_l2_cache(enabled: bool = True) -> None:
    """Writes more than a GPU's second-level cache holds."""
    if enabled:
        torch.empty(_L2_BYTES // 4, dtype=torch.int32, device="cuda").zero_()


def bench(
    fn: Callable[[], Any],
    num_warmups: int = 30,
    num_tests: int = 30,
    post_fn: Optional[Callable[[], Any]] = None,
    flush_l2: bool = True,
) -> Tuple[float, float, float]:
    """Mean, least and largest seconds of a call; the first measured one does not count. On the CPU with few runs."""
    gpu = torch.cuda.is_available()
    times: List[float] = []
    for _ in range(num_warmups if gpu else 1):
        fn()
    if gpu:
        torch.cuda.synchronize()
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(num_tests)]
        for begin, end in pairs:
            flush_l2_cache(flush_l2)
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
    """Mean seconds of the kernels whose names contain ``kernel_names``: a number for one name, a list for several; with
    ``num_kernels_per_period`` above 1 a list of means for each.

    A name of upstream's kernels stands for those of this library that do the same in ``fn``: ``dispatch_impl`` and
    ``combine_impl`` for all up to the rows' arrival, ``dispatch_copy_epilogue_impl`` and ``combine_reduce_epilogue_impl``
    for those that number, place or add up rows behind it. Such a figure is the sum for a call, and where nothing had to
    run it is a nanosecond, the least that the profiler can tell, because scripts divide by it.

    NaN for any other kernel that did not run, and everywhere on the CPU. EP_USE_NVIDIA_TOOLS=1 leaves profiling to
    others and returns ones.

    Args:
        barrier_comm_profiling: ranks wait for each other before each call, by ``barrier`` or an all-reduce; what that
            runs does not count.
        suppress_kineto_output: accepted; nothing is printed in any case.
    """
    names = [kernel_names] if isinstance(kernel_names, str) else list(kernel_names)
    if _native.environment_text("EP_USE_NVIDIA_TOOLS") == "1":
        seconds: Any = (1,) * len(names)
    else:
        fn()
        seconds = [float("nan")] * len(names)
        if torch.cuda.is_available():
            calls = _profiled(fn, num_tests, trace_path, flush_l2, barrier_comm_profiling, barrier)
            seconds = [seconds_of(name, calls, num_kernels_per_period) for name in names]
    return seconds[0] if isinstance(kernel_names, str) else seconds


def _profiled(fn, num_tests, trace_path, flush_l2, barrier_comm_profiling, barrier):
    """The kernels, copies and fills that each call launched."""
    from torch.profiler import ProfilerActivity, profile, schedule

    align_ranks = barrier_comm_profiling and _native.environment_text("EP_DISABLE_BARRIER_PROFILING") != "1"
    torch.cuda.synchronize()
    with warnings.catch_warnings(), ExitStack() as profiling:
        # There is one cycle only, so nothing is lost where PyTorch says that it keeps no other.
        warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
        once = schedule(wait=0, warmup=1, active=1, repeat=1)
        recorded = profiling.enter_context(profile(activities=[ProfilerActivity.CUDA], schedule=once))
        for _ in range(2):
            for _ in range(num_tests):
                if flush_l2:
                    torch.cuda.synchronize()  # what fn has left on other streams must not run beside the flush
                    flush_l2_cache()
                if align_ranks:
                    torch.cuda._sleep(int(2e7))  # about 10 ms: hosts run ahead
                    if barrier is not None:
                        barrier()
                    else:
                        one = torch.ones(1, dtype=torch.float32, device="cuda")
                        dist.all_reduce(one.cpu() if str(dist.get_backend()) == "gloo" else one)
                torch.cuda._sleep(1)
                fn()
                torch.cuda._sleep(1)
            torch.cuda.synchronize()
            recorded.step()
    # The trace, because the profiler's list of events takes minutes where fn launches a thousand kernels.
    with TemporaryDirectory() as folder:
        path = trace_path or os.path.join(folder, "trace.json")
        recorded.export_chrome_trace(path)
        with open(path, encoding="utf-8") as trace:
            return split_into_calls(json.load(trace)["traceEvents"], num_tests, 2 if align_ranks else 1)


def split_into_calls(events: Sequence[Any], num_calls: int, marks_before: int) -> List[List[Launched]]:
    """Kernels, copies and fills of each call, of a trace of PyTorch's profiler: ``marks_before`` sleeps come before a call, of
    which the last one is next to it, and one comes behind it. In the order of the host's launches, which it numbers by
    correlation (a graph's all at once), because streams of a call need not wait for the one with the sleeps."""
    work = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    work.sort(key=lambda event: (event["args"]["correlation"], float(event["ts"])))
    ordered = [(event["name"], float(event["dur"]) / 1e6) for event in work]
    marks = [number for number, (name, _) in enumerate(ordered) if _MARK in name]
    a_call = marks_before + 1
    if len(marks) != num_calls * a_call:
        raise WrongUse(
            f"bench_kineto recorded {len(marks)} sleeps for {num_calls} calls, expected {num_calls * a_call}: fn or barrier "
            "sleeps, or another profiler runs"
        )
    ends = range(a_call - 1, len(marks), a_call)
    return [ordered[marks[end - 1] + 1 : marks[end]] for end in ends]


def seconds_of(name: str, calls: Sequence[Sequence[Launched]], num_kernels_per_period: int = 1) -> Any:
    """What ``bench_kineto`` says of one name."""
    found = [kernel for call in calls for kernel in call if name in kernel[0]]
    if not found and name in _ARRIVALS + _EPILOGUES:
        return max(sum(_part_of_upstream(name in _EPILOGUES, call) for call in calls) / len(calls), _LEAST_SECONDS)
    signatures = sorted({kernel for kernel, _ in found})
    if len(signatures) > 1:
        raise WrongUse(f"'{name}' is in the names of {len(signatures)} kernels, allowed: of at most one: {signatures}")
    times = [seconds for _, seconds in found]
    parts = [times[part::num_kernels_per_period] for part in range(num_kernels_per_period)]
    means = [sum(part) / len(part) if part else float("nan") for part in parts]
    return means[0] if num_kernels_per_period == 1 else means


def _part_of_upstream(epilogue: bool, call: Sequence[Launched]) -> float:
    """Seconds of the library's kernels of a call before the rows' arrival, or behind it."""
    ours = [(match.group(1), seconds) for name, seconds in call for match in [_OURS.search(name)] if match]
    arrivals = [number for number, (name, _) in enumerate(ours, 1) if name.startswith(("dispatch", "combine"))]
    arrived = arrivals[-1] if arrivals else len(ours)
    return sum(seconds for _, seconds in (ours[arrived:] if epilogue else ours[:arrived]))


def parse_num_bytes(text: str) -> int:
    """``1048576``, ``512k``, ``1.5M``, ``2GiB``: a number of bytes, k to t in powers of 1024; ``type=`` of an argument
    parser."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?)(?:i?b)?\s*", text, re.IGNORECASE)
    number = 0 if match is None else int(float(match.group(1)) * 1024 ** " kmgt".index(match.group(2).lower() or " "))
    if number <= 0:
        raise ValueError(f"text is {text!r}, allowed: a number above 0 with k, m, g, t or nothing behind it, as in 64M or 1.5GiB")
    return number
