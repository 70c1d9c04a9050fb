"""The second interface where it meets streams, events, CUDA graphs and memory: checks that run on GPUs, one rank each.

    python tests/python/elastic_checks.py [--num-processes 2] [--only graph,memory]
    torchrun --nproc-per-node 2 tests/python/elastic_checks.py

Each check prints one line, PASS, FAIL with the reason, or SKIP, and the next one runs in any case. The exit status is 1 if
one failed. What tensors must hold comes from ``elastic_reference``, bit for bit. ``--cpu``: what needs no GPU, on CPU
ranks. All of it ends within ``--seconds``.
"""

import argparse
import contextlib
import copy
import gc
import os
import sys
import threading
import time
import traceback

import elastic_reference as reference
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import free_port, launched_by_torchrun
from reference import make_case
from test_elastic import check_handle, check_rows, check_scales
from test_calls import equal

from deep_ep import EventHandle
from deep_ep.buffers.elastic import ElasticBuffer, EPHandle
from deep_ep.utils.envs import group_settings

H, M, K = 256, 64, 4
TOKENS = [64, 37, 0, 51, 64, 1, 20, 64]
SPIN = 100_000_000  # cycles: about 50 ms
_checks = []


def check(needs_gpu=True, alone=True):
    """``alone``: also meaningful with a single rank."""

    def add(function):
        _checks.append((function.__name__, function, needs_gpu, alone))
        return function

    return add


class Rank:
    """This process's part: its device, its group, and data of all ranks."""

    def __init__(self, group, device):
        self.group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.gpu = device.type == "cuda"

    def buffer(self, **options):
        settings = {"num_max_tokens_per_rank": M, "hidden": H, "num_topk": K, "explicitly_destroy": True, **options}
        return ElasticBuffer(self.group, **settings)

    def case(self, seed=0, tokens=None, drop=0.2):
        counts = [TOKENS[rank % len(TOKENS)] for rank in range(self.size)] if tokens is None else [tokens] * self.size
        return make_case(counts, hidden=H, num_topk=K, seed=seed, drop=drop)

    def there(self, tensor):
        return tensor.to(self.device)

    def send(self, buffer, case, x=None, **options):
        x = case.x[self.rank] if x is None else x
        moved = tuple(self.there(part) for part in x) if isinstance(x, tuple) else self.there(x)
        weights = self.there(case.topk_weights[self.rank])
        options = {"num_experts": case.num_experts, "topk_weights": weights, **options}
        return buffer.dispatch(moved, self.there(case.topk_idx[self.rank]), **options)

    def wait(self):
        if self.gpu:
            torch.cuda.synchronize()


def on_host(value):
    """The same with all tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)
    if isinstance(value, tuple):
        return tuple(on_host(each) for each in value)
    if isinstance(value, EPHandle):
        result = copy.copy(value)
        for name, each in vars(value).items():
            if isinstance(each, torch.Tensor):
                setattr(result, name, on_host(each))
        return result
    return value


def noise(rows=4096):
    """Fills memory that was freed: what still needed it is wrong then."""
    for size in (rows * H, 1 << 20, 1 << 14, 1 << 9):
        for _ in range(3):
            torch.full((size,), float("nan"), dtype=torch.bfloat16, device="cuda")


def expanded_rows(case, want, size, values):
    rows = torch.full((size, H), float("nan"), dtype=torch.bfloat16)
    filled = reference.rows_of_selections(want, values, M)
    rows[: filled.size(0)] = filled
    return rows


def flat_rows(case, want, size, values, rank):
    rows = torch.full((size, H), float("nan"), dtype=torch.bfloat16)
    filled = reference.rows_of_rank(case, want, values, rank, M)
    rows[: filled.size(0)] = filled
    return rows


def kept_weights(case, rank):
    return torch.where(case.topk_idx[rank] >= 0, case.topk_weights[rank], 0.0)


# ------------------------------------------------------------------------------------------------------------ values


def round_trip(ranks, buffer, case, seed_of_values=11, single=None, **options):
    """Dispatch and combine in both layouts, everything compared."""
    rank = ranks.rank
    alignment, cpu_sync = options.get("expert_alignment", 1), options.get("do_cpu_sync", True)
    want = reference.expected(case, rank, M, alignment)
    per_selection = reference.selection_values(case, H, seed_of_values)
    per_rank = reference.rank_values(case, H, seed_of_values + 1)
    bias = torch.randn(case.x[rank].shape, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)

    flat = ranks.send(buffer, case, **options)
    with flat[4]:
        held = (*on_host(flat[:4]), type(flat[4])())
    check_handle(case, want, held, alignment, M, cpu_sync, False)
    check_rows(want, held, False)
    rows = flat_rows(case, want, flat[0].size(0), per_rank, rank)
    back, weights, _ = buffer.combine(ranks.there(rows), flat[3], flat[2], ranks.there(bias))
    equal(back.cpu(), reference.combined(case, rank, (bias,), per_rank=per_rank), "combined rows")
    equal(weights.cpu(), kept_weights(case, rank), "combined weights")

    wide = ranks.send(buffer, case, do_expand=True, do_zero_padding=True, **options)
    with wide[4]:
        held = (*on_host(wide[:4]), type(wide[4])())
    check_handle(case, want, held, alignment, M, cpu_sync, True)
    check_rows(want, held, True, zeroed=True)
    rows = ranks.there(expanded_rows(case, want, wide[0].size(0), per_selection))
    back, weights, _ = buffer.combine(rows, wide[3], wide[2])
    equal(back.cpu(), reference.combined(case, rank, (), per_selection=per_selection), "combined expanded rows")
    equal(weights.cpu(), kept_weights(case, rank), "combined weights of expanded rows")
    if single is not None:
        back, none, _ = single.combine(rows, wide[3])
        wanted = reference.combined(case, rank, (), per_selection=per_selection, multiple=False)
        equal(back.cpu(), wanted, "combined expanded rows, rounded once")
        assert none is None


@check(needs_gpu=False)
def values_with_host_wait(ranks):
    buffer, single = ranks.buffer(), ranks.buffer(allow_multiple_reduction=False)
    for alignment in (1, 16):
        round_trip(ranks, buffer, ranks.case(alignment), expert_alignment=alignment, single=single)
    buffer.destroy(), single.destroy()


@check(needs_gpu=False)
def values_without_host_wait(ranks):
    buffer, single = ranks.buffer(), ranks.buffer(allow_multiple_reduction=False)
    for alignment in (1, 16):
        round_trip(ranks, buffer, ranks.case(alignment), expert_alignment=alignment, do_cpu_sync=False, single=single)
    buffer.destroy(), single.destroy()


@check(needs_gpu=False)
def values_in_inference_mode(ranks):
    with torch.inference_mode():
        buffer = ranks.buffer()
        round_trip(ranks, buffer, ranks.case(3), expert_alignment=8)
        buffer.destroy()


@check(needs_gpu=False)
def no_tokens_at_all(ranks):
    buffer = ranks.buffer()
    for cpu_sync in (True, False):
        round_trip(ranks, buffer, ranks.case(tokens=0), do_cpu_sync=cpu_sync, expert_alignment=4)
        round_trip(ranks, buffer, ranks.case(drop=1.0), do_cpu_sync=cpu_sync, expert_alignment=4)
    buffer.destroy()


@check(needs_gpu=False)
def scales_of_8_bit_rows(ranks):
    buffer = ranks.buffer(use_fp8_dispatch=True)
    case, rank = ranks.case(7), ranks.rank
    rows8 = [x.to(torch.float8_e4m3fn) for x in case.x]
    want = reference.expected(case, rank, M, 8, [x.view(torch.uint8) for x in rows8])
    generator = torch.Generator().manual_seed(5)
    for width, dtype in ((2, torch.float32), (3, torch.int32)):
        values = [(torch.rand(len(x), width, generator=generator) * 1000).to(dtype) for x in case.x]
        want_scales = reference.expected(case, rank, M, 8, values).x
        for tma in (False, True):
            for expand in (False, True):
                result = ranks.send(
                    buffer, case, (rows8[rank], values[rank]), expert_alignment=8, do_expand=expand, do_zero_padding=expand,
                    use_tma_aligned_col_major_sf=tma, do_cpu_sync=not tma,
                )  # fmt: skip
                check_scales(want, want_scales, on_host(result[:4]), tma, expand)
    buffer.destroy()


@check(needs_gpu=False)
def cached_handle(ranks):
    buffer, rank = ranks.buffer(), ranks.rank
    case = ranks.case(2)
    want = reference.expected(case, rank, M, 8)
    for cpu_sync in (True, False):
        handles = [
            ranks.send(buffer, case, expert_alignment=8, do_cpu_sync=cpu_sync, do_expand=expand)[3] for expand in (False, True)
        ]
        ranks.send(buffer, ranks.case(9))
        for handle in handles:
            x, weights = ranks.there(case.x[rank]), ranks.there(case.topk_weights[rank])
            result = buffer.dispatch(x, topk_weights=weights, handle=handle)
            assert result[3] is handle
            check_rows(want, on_host(result[:3]), False)
        result = buffer.dispatch(x, topk_weights=weights, handle=handles[1], do_expand=True, do_zero_padding=True)
        check_rows(want, on_host(result[:3]), True, zeroed=True)
    buffer.destroy()


@check(needs_gpu=False)
def several_buffers_and_sizes(ranks):
    first, second = ranks.buffer(), ranks.buffer()
    per_rank_held = []
    for tokens in (24, 8, 16):
        case = ranks.case(tokens, tokens)
        for buffer in (first, second):
            rows, local, _, handle, _ = ranks.send(buffer, case, num_max_tokens_per_rank=M, do_cpu_sync=False)
            local.fill_(7)  # programs write there
            per_rank_held.append((buffer, case, handle, rows.size(0)))
    for buffer, case, handle, size in per_rank_held:
        want, values = reference.expected(case, ranks.rank, M, 1), reference.rank_values(case, H)
        rows = ranks.there(flat_rows(case, want, size, values, ranks.rank))
        equal(buffer.combine(rows, handle)[0].cpu(), reference.combined(case, ranks.rank, (), per_rank=values), "combined")
    first.destroy(), second.destroy()


@check(needs_gpu=False)
def results_outlive_the_buffer(ranks):
    buffer, case = ranks.buffer(), ranks.case(4)
    results = [ranks.send(buffer, case, do_expand=expand) for expand in (False, True)]
    buffer.destroy()
    buffer.destroy()
    want = reference.expected(case, ranks.rank, M, 1)
    for expand, result in zip((False, True), results):
        check_rows(want, on_host(result[:3]), expand)


@check(needs_gpu=False, alone=False)
def barrier_waits_for_the_last(ranks):
    buffer = ranks.buffer()
    for use_comm_stream in (True, False):
        dist.barrier(ranks.agreement)
        begin = time.monotonic()
        if ranks.rank == 1:
            time.sleep(0.3)
        buffer.barrier(use_comm_stream=use_comm_stream, with_cpu_sync=True)
        assert time.monotonic() - begin > 0.25, "a rank was not waited for"
    buffer.destroy()


# ----------------------------------------------------------------------------------------------------------- streams


@check()
def event_combinations(ranks):
    buffer, case = ranks.buffer(), ranks.case(5)
    for previous, asynchronous, allocate in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 1), (1, 1, 1)):
        options = {"async_with_compute_stream": asynchronous, "allocate_on_comm_stream": allocate}
        for expand in (False, True):
            x = ranks.there(case.x[ranks.rank])
            event = buffer.capture() if previous else None
            result = ranks.send(buffer, case, x, previous_event=event, do_expand=expand, **options)
            assert (result[4].event is not None) == bool(asynchronous)
            with result[4]:
                check_rows_later = result
            check_rows(reference.expected(case, ranks.rank, M, 1), on_host(check_rows_later[:3]), expand)
    buffer.destroy()


@check()
def inputs_written_late(ranks):
    """Calls come behind work of their stream, or behind ``previous_event``."""
    buffer, case = ranks.buffer(), ranks.case(6)
    want = reference.expected(case, ranks.rank, M, 1)
    mine, idx, weights = (ranks.there(each[ranks.rank]) for each in (case.x, case.topk_idx, case.topk_weights))
    for expand in (False, True):
        for cpu_sync in (False, True):
            x = torch.zeros_like(mine)
            torch.cuda._sleep(SPIN)
            x.copy_(mine)
            result = buffer.dispatch(x, idx, weights, num_experts=case.num_experts, do_cpu_sync=cpu_sync, do_expand=expand)
            check_rows(want, on_host(result[:3]), expand)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = torch.zeros_like(mine)
                torch.cuda._sleep(SPIN)
                y.copy_(mine)
                ready = EventHandle()
            result = buffer.dispatch(
                y, idx, weights, num_experts=case.num_experts, do_cpu_sync=cpu_sync, do_expand=expand, previous_event=ready,
                allocate_on_comm_stream=True, async_with_compute_stream=True,
            )  # fmt: skip
            with result[4]:
                pass
            check_rows(want, on_host(result[:3]), expand)
    buffer.destroy()


@check()
def previous_event_before_epilogue(ranks):
    """Nothing of the call is done before the event is."""
    buffer, case = ranks.buffer(), ranks.case(6)
    want = reference.expected(case, ranks.rank, M, 1)
    values = reference.rank_values(case, H)
    ranks.send(buffer, case, do_cpu_sync=False)
    side = torch.cuda.Stream()
    for expand in (False, True):
        ranks.wait()
        with torch.cuda.stream(side):
            torch.cuda._sleep(10 * SPIN)
            blocked, event = torch.cuda.Event(), EventHandle()
            blocked.record(side)
        options = {"previous_event_before_epilogue": event, "async_with_compute_stream": True}
        result = ranks.send(buffer, case, do_cpu_sync=False, do_expand=expand, **options)
        done = torch.cuda.Event()
        done.record(buffer.get_comm_stream())
        assert not done.query() or blocked.query(), "the call was done before the event it must come after"
        with result[4]:
            pass
        check_rows(want, on_host(result[:3]), expand)
    flat = ranks.send(buffer, case)
    rows = ranks.there(flat_rows(case, want, flat[0].size(0), values, ranks.rank))
    ranks.wait()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10 * SPIN)
        blocked, event = torch.cuda.Event(), EventHandle()
        blocked.record(side)
    combined, _, over = buffer.combine(
        rows, flat[3], previous_event_before_epilogue=event, async_with_compute_stream=True
    )
    done = torch.cuda.Event()
    done.record(buffer.get_comm_stream())
    assert not done.query() or blocked.query(), "combine was done before the event it must come after"
    with over:  # waits when it is left
        pass
    equal(combined.cpu(), reference.combined(case, ranks.rank, (), per_rank=values), "combined")
    buffer.destroy()


def asynchronous_round(ranks, buffer, case, want, values, expand):
    """All tensors are dropped as soon as Python allows; what they lay in is filled with NaN at once."""
    inputs = [ranks.there(each[ranks.rank]) for each in (case.x, case.topk_idx, case.topk_weights)]
    torch.cuda._sleep(SPIN // 20)
    x, idx, weights = inputs
    del inputs
    rows, local, received, handle, event = buffer.dispatch(
        x, idx, weights, num_experts=case.num_experts, do_cpu_sync=False, do_expand=expand, async_with_compute_stream=True,
        do_handle_copy=not expand,
    )  # fmt: skip
    del x, idx, weights
    noise()
    event.current_stream_wait()
    copies = tuple(None if each is None else each.clone() for each in (rows, local, received))
    fill = expanded_rows if expand else (lambda *given: flat_rows(*given, ranks.rank))
    y = ranks.there(fill(case, want, rows.size(0), values))
    del rows, local
    noise()
    combined, back, event = buffer.combine(y, handle, received, async_with_compute_stream=True)
    del y, handle, received
    noise()
    event.current_stream_wait()
    event = None
    result = combined.clone(), back.clone()
    del combined, back
    noise()
    check_rows(want, on_host(copies), expand)
    kind = {"per_selection" if expand else "per_rank": values}
    equal(result[0].cpu(), reference.combined(case, ranks.rank, (), **kind), "combined rows")
    equal(result[1].cpu(), kept_weights(case, ranks.rank), "combined weights")


@check()
def tensors_dropped_early(ranks):
    buffer = ranks.buffer()
    for round_ in range(6):
        case = ranks.case(20 + round_ // 2)
        want, expand = reference.expected(case, ranks.rank, M, 1), round_ % 2 == 1
        values = (reference.selection_values if expand else reference.rank_values)(case, H)
        asynchronous_round(ranks, buffer, case, want, values, expand)
    buffer.destroy()


@check()
def tensors_kept_by_events_instead(ranks):
    """EP_AVOID_RECORD_STREAM=1."""
    os.environ["EP_AVOID_RECORD_STREAM"] = "1"
    try:
        tensors_dropped_early(ranks)
    finally:
        del os.environ["EP_AVOID_RECORD_STREAM"]


@check()
def results_used_on_another_stream(ranks):
    """With ``record_stream``, as for any tensor of PyTorch: the stream still works when the tensor is gone."""
    buffer = ranks.buffer()
    side = torch.cuda.Stream()
    for round_ in range(6):
        case = ranks.case(30 + round_)
        want, expand = reference.expected(case, ranks.rank, M, 1), round_ % 2 == 1
        rows, local, weights, handle, _ = ranks.send(buffer, case, do_expand=expand, do_cpu_sync=round_ < 3)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(SPIN)
            used = rows.clone(), None if local is None else local.clone(), weights.clone()
        for each in (rows, local, weights):
            if each is not None:
                each.record_stream(side)
        del rows, local, weights, handle, each
        other = ranks.case(40 + round_)
        for _ in range(3):  # on the first stream, which may have the memory again as soon as it is free
            ranks.send(buffer, other, do_expand=expand)
            noise()
        side.synchronize()
        check_rows(want, on_host(used), expand)
    buffer.destroy()


@check()
def calls_that_must_not_make_the_host_wait(ranks):
    """PyTorch's own waits, by its debug mode; the library's, because the GPU is kept busy meanwhile."""
    buffer, case = ranks.buffer(), ranks.case(8)
    want, values = reference.expected(case, ranks.rank, M, 8), reference.selection_values(case, H)
    x, idx, weights = (ranks.there(each[ranks.rank]) for each in (case.x, case.topk_idx, case.topk_weights))

    def calls():
        made = []
        for expand in (False, True):
            sent = buffer.dispatch(
                x, idx, weights, num_experts=case.num_experts, expert_alignment=8, do_cpu_sync=False, do_expand=expand
            )
            made.append(sent)
            made.append(buffer.dispatch(x, topk_weights=weights, handle=sent[3], do_expand=expand))
            made.append(buffer.combine(sent[0], sent[3], sent[2]))
            made.append(buffer.combine(sent[0], sent[3], async_with_compute_stream=True))
        return made

    calls()
    ranks.wait()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(40 * SPIN)
        busy = torch.cuda.Event()
        busy.record()
        made = calls()
        waited = busy.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    ranks.wait()
    assert not waited, "a call made the host wait for the GPU"
    check_rows(want, on_host(made[0][:3]), False)
    rows = ranks.there(expanded_rows(case, want, made[4][0].size(0), values))
    equal(buffer.combine(rows, made[4][3])[0].cpu(), reference.combined(case, ranks.rank, (), per_selection=values), "combined")
    buffer.destroy()


# ------------------------------------------------------------------------------------------------------------ graphs


def recorded(ranks, buffer, expand, asynchronous):
    """A graph of dispatch, copies of what came, and combine; inputs and outputs to write and read."""
    x = torch.zeros(M, H, dtype=torch.bfloat16, device=ranks.device)
    idx = torch.full((M, K), -1, dtype=torch.int64, device=ranks.device)
    weights = torch.zeros(M, K, device=ranks.device)
    experts = 4 * ranks.size
    options = {"num_experts": experts, "expert_alignment": 8, "do_cpu_sync": False, "do_expand": expand}
    y = torch.zeros_like(buffer.dispatch(x, idx, weights, **options)[0])
    flags = {"async_with_compute_stream": asynchronous}

    def step():
        rows, local, received, handle, event = buffer.dispatch(x, idx, weights, **options, **flags)
        with event:
            pass
        combined, back, event = buffer.combine(y, handle, received, **flags)
        with event:
            pass
        return rows.clone(), None if local is None else local.clone(), received.clone(), combined, back

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    return graph, (x, idx, weights, y), outputs


def replayed(ranks, graph, inputs, outputs, seed, expand):
    case = ranks.case(seed, tokens=M)
    want = reference.expected(case, ranks.rank, M, 8)
    values = (reference.selection_values if expand else reference.rank_values)(case, H, seed)
    for tensor, each in zip(inputs, (case.x, case.topk_idx, case.topk_weights)):
        tensor.copy_(each[ranks.rank])
    fill = expanded_rows if expand else (lambda *given: flat_rows(*given, ranks.rank))
    inputs[3].copy_(fill(case, want, inputs[3].size(0), values))
    graph.replay()
    ranks.wait()
    check_rows(want, on_host(outputs[:3]), expand)
    kind = {"per_selection" if expand else "per_rank": values}
    equal(outputs[3].cpu(), reference.combined(case, ranks.rank, (), **kind), "combined rows of the graph")
    equal(outputs[4].cpu(), kept_weights(case, ranks.rank), "combined weights of the graph")


@check()
def graph_replays_with_new_data(ranks):
    buffer = ranks.buffer()
    for expand in (False, True):
        for asynchronous in (False, True):
            graph, inputs, outputs = recorded(ranks, buffer, expand, asynchronous)
            for seed in (50, 51, 52):
                replayed(ranks, graph, inputs, outputs, seed, expand)
            del graph
    buffer.destroy()


@check()
def graph_beside_other_calls(ranks):
    """Two graphs and calls outside of them, in turn, on one buffer."""
    buffer = ranks.buffer()
    graphs = [(expand, *recorded(ranks, buffer, expand, False)) for expand in (False, True)]
    for seed in (60, 61):
        for expand, graph, inputs, outputs in graphs:
            replayed(ranks, graph, inputs, outputs, seed, expand)
            round_trip(ranks, buffer, ranks.case(seed))
    buffer.destroy()


@check()
def graphs_give_their_memory_back(ranks):
    """Calls of a graph that is gone, and layers of one that is not, must not fill the buffer."""
    buffer = ranks.buffer(num_bytes=64 << 20, num_max_tokens_per_rank=1024, hidden=4096)
    x = torch.ones(1024, 4096, dtype=torch.bfloat16, device=ranks.device)
    idx = (torch.arange(1024 * K, device=ranks.device) % (4 * ranks.size)).view(1024, K)

    def layer():
        rows, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=4 * ranks.size, do_cpu_sync=False)
        return buffer.combine(rows, handle)[0]

    wanted = layer().clone()
    for layers in (1, 12):
        for _ in range(8):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(layers):
                    last = layer()
            graph.replay()
            ranks.wait()
            assert torch.equal(last, wanted), "rows of a graph"
            del graph, last
    assert torch.equal(layer(), wanted)
    buffer.destroy()


# ------------------------------------------------------------------------------------------------------------ memory


@check()
def memory_of_200_rounds(ranks):
    buffer = ranks.buffer()
    case = ranks.case(70)
    x, idx, weights = (ranks.there(each[ranks.rank]) for each in (case.x, case.topk_idx, case.topk_weights))

    def rounds(number):
        for at in range(number):
            flags = {"async_with_compute_stream": bool(at & 1)}
            rows, _, received, handle, event = buffer.dispatch(
                x, idx, weights, num_experts=case.num_experts, do_expand=bool(at & 2), do_cpu_sync=bool(at & 4), **flags
            )
            with event:
                pass
            _, _, event = buffer.combine(rows, handle, received, **flags)
            with event:
                pass
            buffer.dispatch(x, handle=handle)
        ranks.wait()
        gc.collect()
        free, total = torch.cuda.mem_get_info()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free

    rounds(32)
    before, after = rounds(8), rounds(192)
    growth = [(end - begin) >> 20 for begin, end in zip(before, after)]
    assert max(growth) <= 8, f"MiB more of PyTorch in use, of PyTorch reserved, of the GPU: {growth}"
    buffer.destroy()
    return f"grew by {growth} MiB (in use, reserved, GPU)"


@check()
def many_results_held(ranks):
    """Programs keep what they received: four times the buffer's memory."""
    buffer = ranks.buffer(num_bytes=64 << 20, num_max_tokens_per_rank=2048, hidden=4096)
    x = torch.arange(2048, device=ranks.device).to(torch.bfloat16).unsqueeze(1).expand(-1, 4096).contiguous()
    idx = (torch.arange(2048 * K, device=ranks.device) % (4 * ranks.size)).view(2048, K)
    kept = [buffer.dispatch(x, idx, num_experts=4 * ranks.size) for _ in range(12)]
    for rows, _, _, handle, _ in kept:
        token = handle.recv_src_metadata[:, 0] % 2048
        assert torch.equal(rows, x[token.long()])
    buffer.destroy()


# ------------------------------------------------------------------------------------------------------------- sizes


def milliseconds(call, runs=5):
    for _ in range(2):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SPIN // 10)
    begin.record()
    for _ in range(runs):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / runs


def shape(ranks, tokens, hidden, topk, experts):
    buffer = ranks.buffer(num_max_tokens_per_rank=tokens, hidden=hidden, num_topk=topk)
    generator = torch.Generator(device="cuda").manual_seed(ranks.rank)
    x = torch.randn(tokens, hidden, generator=generator, device="cuda").to(torch.bfloat16)
    idx = torch.rand(tokens, experts, generator=generator, device="cuda").topk(topk, dim=1).indices
    weights = torch.rand(tokens, topk, generator=generator, device="cuda")
    owners = torch.div(idx, experts // ranks.size, rounding_mode="floor")
    times = {}
    for expand in (False, True):
        for cpu_sync in (True, False):
            options = {"num_experts": experts, "do_expand": expand, "do_cpu_sync": cpu_sync}
            rows, _, received, handle, _ = buffer.dispatch(x, idx, weights, **options)
            combined, back, _ = buffer.combine(rows, handle, received)
            if expand:  # on each rank the copies of a token are added and rounded
                parts = [x.float() * (owners == q).sum(dim=1, keepdim=True) for q in range(ranks.size)]
                wanted = sum(part.to(torch.bfloat16).float() for part in parts).to(torch.bfloat16)
                close = (combined.float() - wanted.float()).abs() <= 0.02 * wanted.float().abs()
                assert bool(close.all()), "combined expanded rows"
            else:
                copies = sum((owners == q).any(dim=1, keepdim=True).float() for q in range(ranks.size))
                assert torch.equal(combined, (x.float() * copies).to(torch.bfloat16)) or ranks.size > 4, "combined rows"
            assert torch.equal(back, weights), "combined weights"
            name = ("expanded" if expand else "plain") + (", host wait" if cpu_sync else "")
            times[f"dispatch {name}"] = milliseconds(lambda: buffer.dispatch(x, idx, weights, **options))
            times[f"combine {name}"] = milliseconds(lambda: buffer.combine(rows, handle))
            if cpu_sync:
                times[f"cached {name}"] = milliseconds(lambda: buffer.dispatch(x, handle=handle, do_expand=expand))
            del rows, received, handle, combined, back
    buffer.destroy()
    return "us: " + "; ".join(f"{name} {1e3 * value:.0f}" for name, value in times.items())


@check()
def shape_128_tokens(ranks):
    return shape(ranks, 128, 7168, 8, 256)


@check()
def shape_4096_tokens(ranks):
    return shape(ranks, 4096, 7168, 8, 256)


@check()
def shape_8192_tokens(ranks):
    return shape(ranks, 8192, 7168, 6, 256)


# --------------------------------------------------------------------------------------------------------- the launch


def run_checks(group, agreement, device, only=(), seconds=85.0, say=print):
    """Results by name: "PASS", "SKIP", or "FAIL" with every rank's reason. The same on all ranks."""
    ranks = Rank(group, device)
    ranks.agreement = agreement
    begin, results = time.monotonic(), {}
    for name, function, needs_gpu, alone in _checks:
        if only and not any(part in name for part in only):
            continue
        late = [None] * ranks.size
        dist.all_gather_object(late, time.monotonic() - begin > 0.8 * seconds, group=agreement)
        reason = ""
        if needs_gpu and not ranks.gpu:
            reason = "needs a GPU"
        elif not alone and ranks.size == 1:
            reason = "needs two ranks"
        elif any(late):
            reason = "no time is left"
        if reason:
            word = "FAIL" if reason == "no time is left" else "SKIP"
            results[name] = word
            if ranks.rank == 0:
                say(f"{word} {name}: {reason}")
            continue
        started, broken = time.monotonic(), False
        try:
            text, mine = function(ranks), None
            ranks.wait()
        except BaseException as error:  # the next check shall run in any case
            where = traceback.extract_tb(error.__traceback__)
            here = [each for each in where if os.path.basename(each.filename) == os.path.basename(__file__)]
            lines = str(error).strip().splitlines() or [""]
            text, mine = None, f"{type(error).__name__} in line {(here or where)[-1].lineno}: {lines[0][:300]}"
        gc.collect()
        try:
            ranks.wait()
        except BaseException as error:
            broken, mine = True, mine or f"{error}".splitlines()[0][:300]
        said = [None] * ranks.size
        dist.all_gather_object(said, (mine, broken), group=agreement)
        failures = [f"rank {rank}: {each[0]}" for rank, each in enumerate(said) if each[0]]
        results[name] = "FAIL " + " | ".join(failures) if failures else "PASS"
        if ranks.rank == 0:
            took = f"({time.monotonic() - started:.1f} s)"
            say(f"FAIL {name} {took}: {' | '.join(failures)}" if failures else f"PASS {name} {took}" + (f": {text}" if text else ""))
        if any(each[1] for each in said):
            results["the rest"] = "FAIL"
            if ranks.rank == 0:
                say("FAIL the rest: CUDA does not work any more on a rank")
            break
    return results


def run_rank(local_rank, args):
    os.environ.setdefault("DEEP_EP_TIMEOUT_S", "10")
    nodes, node, local = 1, 0, args.num_processes
    if launched_by_torchrun():
        local_rank, local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = int(os.environ["WORLD_SIZE"]) // local
        node = int(os.environ["RANK"]) // local
    address = f"tcp://{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', '8361')}"
    device, settings = torch.device("cpu"), {"backend": "gloo"}
    if args.cpu:
        torch.set_num_threads(1)
    else:
        settings = group_settings(local_rank, local)
        torch.cuda.init()
        device = torch.device("cuda", torch.cuda.current_device())

    def out_of_time():
        print(f"FAIL rank {local_rank}: not done after {args.seconds} s", flush=True)
        os._exit(1)

    watchdog = threading.Timer(args.seconds, out_of_time)
    watchdog.daemon = True
    watchdog.start()
    dist.init_process_group(init_method=address, rank=node * local + local_rank, world_size=nodes * local, **settings)
    everybody = list(range(nodes * local))
    group, agreement = dist.new_group(everybody), dist.new_group(everybody, backend="gloo")
    results = run_checks(group, agreement, device, args.only, args.seconds, lambda line: print(line, flush=True))
    failed = [name for name, result in results.items() if result.startswith("FAIL")]
    if dist.get_rank() == 0:
        count = {kind: sum(each.startswith(kind) for each in results.values()) for kind in ("PASS", "FAIL", "SKIP")}
        print("elastic checks:", ", ".join(f"{number} {kind}" for kind, number in count.items()), flush=True)
    sys.stdout.flush()
    os._exit(1 if failed else 0)  # what a failed check left behind must not hold the process


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--num-processes", type=int, default=0, help="ranks to start (default: as many as GPUs, at most 8)")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="parts of the names of checks to run")
    parser.add_argument("--seconds", type=float, default=85.0, help="after so long everything ends (default: %(default)s)")
    parser.add_argument("--cpu", action="store_true", help="what needs no GPU, on CPU ranks")
    return parser.parse_args(arguments)


def main():
    args = parse()
    if not args.cpu and not torch.cuda.is_available():
        print("SKIP everything: there is no GPU (--cpu: what needs none)")
        return 0
    args.num_processes = args.num_processes or (2 if args.cpu else min(8, torch.cuda.device_count()))
    if launched_by_torchrun():
        run_rank(0, args)
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    context = mp.get_context("spawn")
    processes = [context.Process(target=run_rank, args=(rank, args)) for rank in range(args.num_processes)]
    for process in processes:
        process.start()
    with contextlib.suppress(KeyboardInterrupt):
        for process in processes:
            process.join()
    return max(1 if process.exitcode else 0 for process in processes)


if __name__ == "__main__":
    sys.exit(main())
