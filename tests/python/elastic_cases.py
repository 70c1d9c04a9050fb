"""Buffers of the second interface, calls on them, and what their results must be."""

import elastic_reference as reference
import torch
from normal_mode import equal

from deep_ep import EventOverlap
from deep_ep.buffers.elastic import ElasticBuffer, EPHandle

H = 64
M = 24


def make_buffer(group, **options):
    return ElasticBuffer(group, **{"num_max_tokens_per_rank": M, "hidden": H, "num_topk": 4, **options})


def send(buffer, case, x=None, **options):
    """Tensors go to the buffer's device first."""
    given = (case.x[buffer.rank_idx] if x is None else x), case.topk_idx[buffer.rank_idx], case.topk_weights[buffer.rank_idx]
    x, idx, weights = (
        tuple(part.to(buffer._device) for part in each) if isinstance(each, tuple) else each.to(buffer._device) for each in given
    )
    return buffer.dispatch(x, idx, **{"num_experts": case.num_experts, "topk_weights": weights, **options})


def check_handle(case, want, result, alignment, most, cpu_sync, expand):
    x, local, weights, handle, event = result
    rows = x[0] if isinstance(x, tuple) else x
    n, ranks, topk, experts = len(want.ids), case.num_ranks, want.local.size(1), case.local_experts
    worst = reference.align(ranks * most * topk + (alignment - 1) * experts, alignment)
    assert isinstance(handle, EPHandle) and isinstance(event, EventOverlap) and event.event is None
    assert (handle.do_expand, handle.num_experts, handle.expert_alignment) == (expand, case.num_experts, alignment)
    assert handle.num_max_tokens_per_rank == most and handle.num_sms > 0
    assert handle.num_recv_tokens == (n if cpu_sync else most * ranks)
    assert handle.num_expanded_tokens == (len(want.selections) if cpu_sync else worst)
    assert rows.size(0) == (handle.num_expanded_tokens if expand else handle.num_recv_tokens)
    aligned = [reference.align(count, alignment) for count in want.counts]
    assert handle.num_recv_tokens_per_expert_list == (aligned if cpu_sync else [])
    psum = [sum(aligned[: expert + 1]) for expert in range(experts)]
    if expand:
        psum = [start + count for start, count in zip(want.starts, want.counts)]
    for name, values in (
        ("psum_num_recv_tokens_per_scaleup_rank", want.ends),
        ("psum_num_recv_tokens_per_expert", psum),
        ("num_unaligned_recv_tokens_per_expert", want.counts),
    ):
        equal(getattr(handle, name), torch.tensor(values, dtype=torch.int32), name)
    metadata = handle.recv_src_metadata
    assert metadata.shape == (handle.num_recv_tokens, topk + 2) and metadata.dtype == torch.int32 and metadata.is_contiguous()
    assert metadata[:n, 0].tolist() == want.ids and metadata[:n, 1].tolist() == want.last
    if expand:
        assert metadata[:n, 2:].tolist() == want.slots
    assert handle.dst_buffer_slot_idx.shape == handle.topk_idx.shape and handle.dst_buffer_slot_idx.dtype == torch.int32
    assert handle.token_metadata_at_forward is None and handle.channel_linked_list is None


def spread(want, rows):
    """Rows of the non-expanded layout, expanded; padding is 0."""
    result = torch.zeros(len(want.selections), *rows.shape[1:], dtype=rows.dtype)
    for at, selection in enumerate(want.selections):
        if selection is not None:
            result[at] = rows[selection[0]]
    return result


def spread_weights(want, weights):
    flat = [0.0 if each is None else weights[each].item() for each in want.selections]
    return torch.tensor(flat, dtype=torch.float32)


def filled(want):
    return torch.tensor([each is not None for each in want.selections], dtype=torch.bool)


def check_rows(want, result, expand, zeroed=False, with_weights=True, x=None):
    recv_x, local, weights = result[:3]
    n = len(want.ids)
    x = want.x if x is None else x
    if not expand:
        equal(recv_x[:n], x, "recv_x")
        equal(local[:n], want.local, "recv_topk_idx")
        assert (local[n:] == -1).all()
        if with_weights:
            equal(weights[:n], want.weights, "recv_topk_weights")
    else:
        assert local is None
        end = len(want.selections)
        here = filled(want) | zeroed
        equal(recv_x[:end][here], spread(want, x)[here], "expanded rows")
        if with_weights:
            assert weights.shape == (recv_x.size(0),)
            equal(weights[:end][here], spread_weights(want, want.weights)[here], "weights of expanded rows")
    if not with_weights:
        assert weights is None


def check_scales(want, want_scales, result, tma, expand):
    rows, row_scales = result[0]
    assert rows.dtype == torch.float8_e4m3fn and rows.is_contiguous()
    assert row_scales.dtype == want_scales.dtype and row_scales.shape == (rows.size(0), want_scales.size(1))
    if tma:
        assert row_scales.stride() == (1, reference.align(rows.size(0), 4))
    else:
        assert row_scales.is_contiguous()
    wanted, wanted_scales = (spread(want, want.x), spread(want, want_scales)) if expand else (want.x, want_scales)
    end = wanted.size(0)
    equal(rows[:end].view(torch.uint8), wanted, "8-bit rows")
    equal(row_scales[:end].contiguous(), wanted_scales, "scales")
