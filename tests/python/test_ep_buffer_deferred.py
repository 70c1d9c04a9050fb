"""``defer_epilogue`` of V2.5 on CPU ranks: what comes at the wait, against the same calls without it."""

import gc

import pytest
import torch
from cluster import on_ranks
from common import ranks_a_node
from elastic_cases import H
from normal_mode import equal
from reference import make_case
from test_ep_buffer import make_buffer
from test_errors import refused

from deep_ep import EPHandle
from deep_ep.utils.math import per_token_cast_to_fp8

DEFERRED = {"async_with_compute_stream": True, "defer_epilogue": True}


def same(one, other, what):
    assert type(one) is type(other), what
    if isinstance(one, tuple):
        for a, b in zip(one, other):
            same(a, b, what)
    elif one is not None:
        assert one.stride() == other.stride(), what
        equal(one.view(torch.uint8) if one.dtype == torch.float8_e4m3fn else one,
              other.view(torch.uint8) if other.dtype == torch.float8_e4m3fn else other, what)  # fmt: skip


def same_handle(one, other, received):
    for name, value in vars(other).items():
        if name.startswith("_") or isinstance(value, torch.Tensor):
            continue
        assert getattr(one, name) == value, name
    equal(one.recv_src_metadata[:received], other.recv_src_metadata[:received], "metadata")
    assert one.recv_src_metadata.shape == other.recv_src_metadata.shape
    for name in ("psum_num_recv_tokens_per_expert", "num_unaligned_recv_tokens_per_expert", "dst_buffer_slot_idx"):
        equal(getattr(one, name), getattr(other, name), name)


def rows_of_both(group, tokens, nodes):
    with ranks_a_node(2 * nodes):
        buffers = [make_buffer(group, allow_multiple_reduction=multiple) for multiple in (True, False)]
    buffer = buffers[0]
    rank = buffer.rank_idx
    case = make_case(tokens, hidden=128, drop=0.2, num_topk=4)
    x, idx, weights = case.x[rank], case.topk_idx[rank], case.topk_weights[rank]
    for alignment, cpu_sync, expand, fp8 in (
        (1, True, False, False), (16, True, True, True), (16, False, True, False), (1, None, False, True),
    ):  # fmt: skip
        form = per_token_cast_to_fp8(x) if fp8 else x
        call = {"do_expand": expand, "do_zero_padding": expand, "use_tma_aligned_col_major_sf": fp8}
        fresh = {**call, "num_experts": case.num_experts, "expert_alignment": alignment, "do_cpu_sync": cpu_sync}
        want = buffer.dispatch(form, idx, weights, **fresh)[:4]
        event = buffer.dispatch(form, idx, weights, **fresh, **DEFERRED)
        buffer.barrier()
        got = event.wait() if expand else event.current_stream_wait(release_handle=True)
        assert len(got) == 4 and isinstance(got[3], EPHandle) and got[3].topk_idx is idx
        received = int(want[3].psum_num_recv_tokens_per_scaleup_rank[-1])
        if cpu_sync is not False:
            if not expand:
                same(got[:3], want[:3], "exact results")
            assert [each.shape for each in got[:3] if isinstance(each, torch.Tensor)] == [
                each.shape for each in want[:3] if isinstance(each, torch.Tensor)
            ]
        same_handle(got[3], want[3], received)
        again = buffer.dispatch(form, topk_weights=weights, handle=got[3], **call, **DEFERRED).wait()
        plain = buffer.dispatch(form, topk_weights=weights, handle=want[3], **call)
        assert again[3] is got[3]
        if not expand or cpu_sync is not False:
            same(again[:3], plain[:3], "cached results")
        rows = torch.randn(plain[0][0].size(0) if fp8 else plain[0].size(0), 128).to(torch.bfloat16)
        first, second = torch.randn(x.shape).to(torch.bfloat16), torch.randn(x.shape).to(torch.bfloat16)
        for number, given in enumerate((None, first, (first, second), (None, second))):
            for each, with_weights in ((buffers[0], number % 2 == 0), (buffers[1], not expand)):
                carried = plain[2] if with_weights else None
                back = each.combine(rows, want[3], carried, given)[:2]
                same(each.combine(rows, got[3], carried, given, **DEFERRED).wait(), back, "combined")


@pytest.mark.parametrize("tokens, nodes", [([13, 7], False), ([9, 24, 0, 5], False), ([9, 14, 0, 5], True)], ids=str)
def test_same_bits(ranks, tokens, nodes):
    ranks(len(tokens)).run(rows_of_both, tokens, nodes)


@on_ranks(2)
def test_order(group):
    buffer, other = make_buffer(group), make_buffer(group)
    rank = buffer.rank_idx
    case = make_case([6] * buffer.num_ranks, hidden=H, num_topk=4)
    x, idx = case.x[rank], case.topk_idx[rank]
    send = lambda **options: buffer.dispatch(x, idx, num_experts=case.num_experts, **options)  # noqa: E731
    rows, _, _, handle, _ = send()
    # A bias is read at the wait; x at the call.
    bias, given = torch.zeros_like(x), rows.clone()
    event = buffer.combine(given, handle, bias=bias, **DEFERRED)
    given.zero_()
    bias.fill_(3)
    later = event.wait()[0]
    same(later, buffer.combine(rows, handle, bias=bias)[0], "bias written between call and wait")
    assert event.wait() is None  # results come once
    # Several may be outstanding, and other calls may come in between.
    event = send(**DEFERRED)
    sums = [buffer.combine(rows * factor, handle, bias=bias, **DEFERRED) for factor in (1, 2)]
    overlapping = other.dispatch(x + 1, idx, num_experts=case.num_experts, **DEFERRED)
    buffer.dispatch(x * 0, handle=handle)
    buffer.combine(rows * 0, handle)
    for factor in (2, 1):
        wanted = buffer.combine(rows * factor, handle, bias=bias)[0]
        same(sums[factor - 1].wait()[0], wanted, "sums with calls in between")
    same(event.wait()[0], rows, "rows with calls in between")
    overlapping.wait()
    # One that is dropped leaves nothing behind.
    event = send(**DEFERRED)
    del event
    gc.collect()
    event = send(**DEFERRED)
    with event:
        pass
    assert send(**DEFERRED).wait()[0].shape == rows.shape
    for call in (lambda: send(defer_epilogue=1), lambda: buffer.combine(rows, handle, defer_epilogue=1)):
        refused((RuntimeError, "defer_epilogue is True, allowed: only with async_with_compute_stream", call))
    refused((RuntimeError, "bias_0 is bfloat16", lambda: buffer.combine(rows, handle, bias=bias[:1], **DEFERRED)))
    # A hook that fails stays.
    event = send(**DEFERRED)
    hook, event.hook_after_wait = event.hook_after_wait, lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        event.wait()
    assert event.hook_after_wait is not None
    event.hook_after_wait = hook
    same(event.wait()[0], rows, "after a failure")
