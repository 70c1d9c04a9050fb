"""Checks of calls with a deferred epilogue: another stream that waits, CUDA graphs."""

import torch
from elastic_check_parts import H, K, SPIN, M, check, noise, recorded_graph
from test_ep_buffer_deferred import same

from deep_ep import EPBuffer

DEFERRED = {"async_with_compute_stream": True, "defer_epilogue": True}


def make(ranks):
    return EPBuffer(ranks.group, num_max_tokens_per_rank=M, hidden=H, num_topk=K, explicitly_destroy=True)


def inputs(ranks, seed):
    case = ranks.case(seed)
    x, idx, weights = (ranks.there(each[ranks.rank]) for each in (case.x, case.topk_idx, case.topk_weights))
    return x, idx, weights, {"num_experts": case.num_experts}


@check()
def deferred_epilogues_on_another_stream(ranks):
    """The stream that waits has the results; their memory, and what they are made of, is not given away before."""
    buffer, side = make(ranks), torch.cuda.Stream()
    for step in range(6):
        x, idx, weights, options = inputs(ranks, 10 + step)
        rows, _, _, handle, _ = buffer.dispatch(x, idx, weights, **options)
        want = buffer.combine(rows, handle)[0]
        rows = rows.clone()
        event = buffer.dispatch(x, idx, weights, **options, **DEFERRED)
        with torch.cuda.stream(side):
            torch.cuda._sleep(SPIN)
            got = event.wait()
            seen = got[0].clone()
            later = buffer.combine(got[0], got[3], **DEFERRED)
            del got, event
        noise()
        with torch.cuda.stream(side):
            torch.cuda._sleep(SPIN)
            combined = later.wait()[0]
            del later
            kept = combined.clone()
            del combined
        noise()
        torch.cuda.current_stream().wait_stream(side)
        same(seen, rows, "rows on the other stream")
        same(kept, want, "sums on the other stream")
    buffer.destroy()


@check()
def deferred_calls_in_a_graph(ranks):
    buffer = make(ranks)
    x, idx, weights, options = inputs(ranks, 20)
    options["do_cpu_sync"] = False
    bias = torch.ones_like(x)

    def step():
        event = buffer.dispatch(x, idx, weights, **options, **DEFERRED)
        rows, _, _, handle = event.wait()
        return buffer.combine(rows, handle, bias=bias, **DEFERRED).wait()[0]

    graph, combined = recorded_graph(step)
    for seed in range(21, 25):
        new_x, new_idx, new_weights, _ = inputs(ranks, seed)
        x.copy_(new_x)
        idx.copy_(new_idx)
        weights.copy_(new_weights)
        bias.fill_(seed)
        graph.replay()
        rows, _, _, handle, _ = buffer.dispatch(x, idx, weights, **options)
        same(combined, buffer.combine(rows, handle, bias=bias)[0], "a replay")
    del graph
    buffer.destroy()
