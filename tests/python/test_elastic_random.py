"""The second interface with arguments drawn at random, in a node and between nodes, against plain PyTorch: bit for bit."""

import random

import elastic_reference as reference
import pytest
import torch
from common import ranks_a_node
from normal_mode import equal
from reference import make_case
from elastic_cases import check_handle, check_rows, check_scales
from elastic_check_parts import on_host

from deep_ep import EPBuffer, EventOverlap
from deep_ep.buffers.elastic import ElasticBuffer


def drawn(group, seeds, ranks_per_node, device="cpu", make=ElasticBuffer):
    settings = {"num_max_tokens_per_rank": 64, "hidden": 512, "num_topk": 8}
    with ranks_a_node(ranks_per_node):
        buffers = {multiple: make(group, **settings, allow_multiple_reduction=multiple) for multiple in (True, False)}
    size, rank = buffers[True].num_ranks, buffers[True].rank_idx
    assert buffers[True].num_nvlink_ranks == (ranks_per_node or size) or device != "cpu"
    for seed in seeds:
        choose = random.Random(seed)  # the same on all ranks
        hidden, topk, local = choose.choice((64, 136, 512)), choose.randint(1, 8), choose.choice((1, 3, 8, 40))
        topk = min(topk, size * local)
        tokens = [choose.choice((0, 1, 7, 33, 60)) for _ in range(size)] if seed % 8 else [0] * size
        case = make_case(tokens, hidden, topk, local, seed, choose.choice((torch.int64, torch.int32)), choose.choice((0.0, 0.3, 1.0)))
        if choose.random() < 0.4:  # some experts are wanted more than others
            for idx in case.topk_idx:
                idx[:, 0] = torch.where(idx[:, 0] >= 0, 0, -1)
        most, alignment = choose.choice((60, 64)), choose.choice((1, 3, 16, 128))
        expand, cpu_sync, tma = (choose.random() < 0.5 for _ in range(3))
        scaled, copy = choose.random() < 0.5, choose.random() < 0.5 and make is ElasticBuffer
        if expand and choose.random() < 0.3:  # some tokens name an expert twice
            for idx in case.topk_idx:
                idx[::2, -1] = idx[::2, 0]
        buffer = buffers[not expand or choose.random() < 0.5]
        check_drawn(
            buffer, case, device, most, alignment, cpu_sync, expand, tma, scaled, copy, choose.randint(1, 5), choose.randint(0, 2)
        )
    return rank


def check_drawn(buffer, case, device, most, alignment, cpu_sync, expand, tma, scaled, copy, width, num_biases):
    rank, hidden = buffer.rank_idx, case.x[0].size(1)
    generator = torch.Generator().manual_seed(width)
    bits = [x.view(torch.uint8) for x in case.x]
    scales = [torch.randint(1, 1000, (len(x), width), generator=generator, dtype=torch.int32) for x in case.x]
    want = reference.expected(case, rank, most, alignment, bits if scaled else None)
    given_scales = scales[rank].t().contiguous().t() if tma else scales[rank]
    idx, given_weights = case.topk_idx[rank].to(device), case.topk_weights[rank].to(device)
    x = (bits[rank].view(torch.float8_e4m3fn).to(device), given_scales.to(device)) if scaled else case.x[rank].to(device)
    zeroed = {"do_zero_padding": True} if expand else {}
    stats = torch.ones(case.local_experts, dtype=torch.int32, device=device)
    layout = {"do_expand": expand, "use_tma_aligned_col_major_sf": tma, **zeroed}
    fresh = buffer.dispatch(
        x, idx, given_weights, stats, case.num_experts, most, alignment, do_cpu_sync=cpu_sync,
        do_handle_copy=copy, **layout,
    )  # fmt: skip
    handle = fresh[3]
    held = (*on_host(fresh[:4]), EventOverlap())
    check_handle(case, want, held, alignment, most, cpu_sync, expand)
    assert (stats - 1).tolist() == want.counts
    equal(held[3].topk_idx, case.topk_idx[rank], "the selections of the handle")
    rows_there = held[3].dst_buffer_slot_idx >= 0
    in_node = buffer.num_nvlink_ranks == buffer.num_ranks
    here = (case.topk_idx[rank] >= 0) & (case.topk_idx[rank] // case.local_experts == rank)
    assert torch.equal(rows_there, here.any(dim=1, keepdim=True).expand_as(here) & in_node)
    cached = on_host(buffer.dispatch(x, topk_weights=given_weights, handle=handle, **layout)[:3])
    without_weights = on_host(buffer.dispatch(x, handle=handle, **layout)[:3])
    assert without_weights[2] is None
    for rows, local, weights in (held[:3], cached, without_weights):
        given = weights is not None
        if scaled:
            check_scales(want, reference.expected(case, rank, most, alignment, scales).x, (rows, None), tma, expand)
            rows = rows[0].view(torch.uint8)
        check_rows(want, (rows, local, weights), expand, zeroed=expand, with_weights=given)

    biases = [torch.randn(len(case.x[rank]), hidden, generator=generator).to(torch.bfloat16) for _ in range(num_biases)]
    given_biases = [each.to(device) for each in biases]
    bias = tuple(given_biases) if num_biases == 2 else next(iter(given_biases), None)
    filled, values = reference.input_of_combine(case, want, most, expand, hidden, width)
    y = reference.padded(filled, handle.num_expanded_tokens if expand else handle.num_recv_tokens)
    multiple = buffer.allow_multiple_reduction or not expand
    combined, weights = on_host(buffer.combine(y.to(device), handle, fresh[2] if multiple else None, bias)[:2])
    equal(combined, reference.combined(case, rank, biases, multiple=multiple, **values), "combined rows")
    if multiple:
        equal(weights, reference.kept_weights(case, rank), "combined weights")


# Two ranks of a node: test_elastic_checks.py.
@pytest.mark.parametrize(
    ("size", "ranks_per_node", "seeds", "make"),
    [(1, 0, 12, ElasticBuffer), (4, 0, 3, ElasticBuffer), (2, 1, 4, ElasticBuffer), (4, 2, 3, ElasticBuffer), (4, 0, 3, EPBuffer)],
)
def test_arguments_drawn_at_random(ranks, size, ranks_per_node, seeds, make):
    first = 100 * size + 1000 * ranks_per_node
    ranks(size).run(drawn, range(first, first + seeds), ranks_per_node, "cpu", make)
