"""Checks of values: what is received and combined, with arguments drawn at random, by several buffers, and for how long."""

import time

import elastic_reference as reference
import torch
import torch.distributed as dist
from elastic_cases import check_rows, send
from elastic_check_parts import H, M, check, on_host
from normal_mode import equal
from test_elastic_random import drawn


@check(needs_gpu=False)
def arguments_drawn_at_random(ranks):
    drawn(ranks.group, range(40), 0, ranks.device.type)


@check(needs_gpu=False)
def arguments_in_inference_mode(ranks):
    with torch.inference_mode():
        drawn(ranks.group, range(2), 0, ranks.device.type)


@check(needs_gpu=False)
def several_buffers_and_sizes(ranks):
    first, second = ranks.buffer(), ranks.buffer()
    per_rank_held = []
    for tokens in (24, 8, 16):
        case = ranks.case(tokens, tokens)
        for buffer in (first, second):
            rows, local, _, handle, _ = send(buffer, case, num_max_tokens_per_rank=M, do_cpu_sync=False)
            local.fill_(7)  # programs write there
            per_rank_held.append((buffer, case, handle, rows.size(0)))
    for buffer, case, handle, size in per_rank_held:
        rows, values = reference.input_of_combine(case, reference.expected(case, ranks.rank, M, 1), ranks.rank, M, False, H)
        rows = ranks.there(reference.padded(rows, size))
        equal(buffer.combine(rows, handle)[0].cpu(), reference.combined(case, ranks.rank, (), **values), "combined")
    first.destroy(), second.destroy()


@check(needs_gpu=False)
def results_outlive_the_buffer(ranks):
    buffer, case = ranks.buffer(), ranks.case(4)
    results = [send(buffer, case, do_expand=expand) for expand in (False, True)]
    buffer.destroy()
    buffer.destroy()
    want = reference.expected(case, ranks.rank, M, 1)
    for expand, result in zip((False, True), results):
        check_rows(want, on_host(result[:3]), expand)


@check(needs_gpu=False, alone=False)
def barrier_waits_for_the_last(ranks):
    buffer = ranks.buffer()
    for use_comm_stream in (True, False):
        dist.barrier(ranks.group)
        begin = time.monotonic()
        if ranks.rank == 1:
            time.sleep(0.3)
        buffer.barrier(use_comm_stream=use_comm_stream, with_cpu_sync=True)
        assert time.monotonic() - begin > 0.25, "a rank was not waited for"
    buffer.destroy()
