"""Checks of values: what is received and combined, with arguments drawn at random and by several buffers."""

import elastic_reference as reference
import torch
from elastic_cases import send
from elastic_check_parts import H, M, check
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
        rows, values = reference.input_of_combine(case, reference.expected(case, ranks.rank, M, 1), M, False, H)
        rows = ranks.there(reference.padded(rows, size))
        equal(buffer.combine(rows, handle)[0].cpu(), reference.combined(case, ranks.rank, (), **values), "combined")
    first.destroy(), second.destroy()
