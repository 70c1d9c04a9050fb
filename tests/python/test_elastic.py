"""The second interface on CPU ranks, against plain PyTorch: bit for bit."""

import contextlib
import inspect
import os

import elastic_reference as reference
import pytest
import torch
import torch.distributed as dist
from reference import make_case
from test_calls import equal
from test_errors import Alone, plain_sentence

import deep_ep
from deep_ep import Buffer, EventHandle, EventOverlap
from deep_ep.buffers.elastic import ElasticBuffer, EPHandle
from deep_ep.buffers.optional import OptionalCalls
from deep_ep.buffers.streams import CallStream
from deep_ep.errors import RankMismatch

H = 64
M = 24
HELD = 16384


def make_buffer(group, **options):
    return ElasticBuffer(group, **{"num_max_tokens_per_rank": M, "hidden": H, "num_topk": 4, **options})


def send(buffer, case, x=None, **options):
    rank = buffer.rank_idx
    options = {"num_experts": case.num_experts, "topk_weights": case.topk_weights[rank], **options}
    return buffer.dispatch(case.x[rank] if x is None else x, case.topk_idx[rank], **options)


def check_handle(case, want, result, alignment, most, cpu_sync, expand):
    x, local, weights, handle, event = result
    rows = x[0] if isinstance(x, tuple) else x
    n, ranks, topk, experts = len(want.ids), case.num_ranks, want.local.size(1), case.local_experts
    worst = reference.align(ranks * most * min(topk, experts) + (alignment - 1) * experts, alignment)
    assert isinstance(handle, EPHandle) and isinstance(event, EventOverlap) and event.event is None
    assert (handle.do_expand, handle.num_experts, handle.expert_alignment) == (expand, case.num_experts, alignment)
    assert handle.num_max_tokens_per_rank == most and handle.num_sms > 0
    assert handle.num_recv_tokens == (n if cpu_sync else most * ranks)
    assert handle.num_expanded_tokens == (len(want.selections) if cpu_sync else worst)
    assert rows.size(0) == (handle.num_expanded_tokens if expand else handle.num_recv_tokens)
    aligned = [reference.align(count, alignment) for count in want.counts]
    assert handle.num_recv_tokens_per_expert_list == (aligned if cpu_sync else [])
    psum = [sum(aligned[: l + 1]) for l in range(experts)]
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
        assert metadata[:n, 2:].tolist() == want.slots and (metadata[n:, 2:] == -1).all()
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


def round_trip(group, tokens, options, nodes=False):
    with two_ranks_a_node(nodes):
        buffers = {multiple: make_buffer(group, allow_multiple_reduction=multiple) for multiple in (True, False)}
    buffer = buffers[True]
    rank = buffer.rank_idx
    case = make_case(tokens, hidden=H, drop=0.2, **options)
    per_selection, per_rank = reference.selection_values(case, H), reference.rank_values(case, H)
    generator = torch.Generator().manual_seed(rank)
    first, second = (torch.randn(case.x[rank].shape, generator=generator).to(torch.bfloat16) for _ in range(2))
    for alignment, cpu_sync, most in ((1, True, M), (16, True, max(1, *tokens)), (16, False, M + 3)):
        want = reference.expected(case, rank, most, alignment)
        n, end = len(want.ids), len(want.selections)
        call = {"num_max_tokens_per_rank": most, "expert_alignment": alignment, "do_cpu_sync": cpu_sync}
        stats = torch.full((case.local_experts,), 5, dtype=torch.int32)
        flat = send(buffer, case, cumulative_local_expert_recv_stats=stats, **call)
        assert (stats - 5).tolist() == want.counts
        check_handle(case, want, flat, alignment, most, cpu_sync, False)
        check_rows(want, flat, False)
        wide = send(buffer, case, do_expand=True, do_zero_padding=alignment > 1, **call)
        check_handle(case, want, wide, alignment, most, cpu_sync, True)
        check_rows(want, wide, True, zeroed=alignment > 1)

        biases = [((None, second), (second,)), ((first, second), (first, second))]
        for bias, terms in [(None, ()), (first, (first,))] if alignment == 1 else biases:
            rows = torch.full((flat[0].size(0), H), float("nan"), dtype=torch.bfloat16)
            rows[:n] = reference.rows_of_rank(case, want, per_rank, rank, most)
            back, weights, event = buffer.combine(rows, flat[3], flat[2], bias)
            equal(back, reference.combined(case, rank, terms, per_rank=per_rank), "combined rows")
            equal(weights, torch.where(case.topk_idx[rank] >= 0, case.topk_weights[rank], 0.0), "combined weights")
            assert event.event is None
            rows = torch.full((wide[0].size(0), H), float("nan"), dtype=torch.bfloat16)
            rows[:end] = reference.rows_of_selections(want, per_selection, most)
            back, weights, _ = buffer.combine(rows, wide[3], wide[2], bias)
            equal(back, reference.combined(case, rank, terms, per_selection=per_selection), "combined expanded rows")
            equal(weights, torch.where(case.topk_idx[rank] >= 0, case.topk_weights[rank], 0.0), "combined weights of rows")
            if len(terms) != 1:
                back, none, _ = buffers[False].combine(rows, wide[3], bias=bias)
                wanted = reference.combined(case, rank, terms, per_selection=per_selection, multiple=False)
                equal(back, wanted, "combined expanded rows, rounded once")
                assert none is None
    assert (buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == ((2, 2) if nodes else (1, case.num_ranks))


@contextlib.contextmanager
def two_ranks_a_node(wanted=True):
    if wanted:
        os.environ["DEEP_EP_RANKS_PER_NODE"] = "2"
    try:
        yield
    finally:
        os.environ.pop("DEEP_EP_RANKS_PER_NODE", None)


@pytest.mark.parametrize("tokens", [[13], [20, 7], [9, 24, 0, 5], [0, 0]], ids=str)
def test_round_trip(ranks, tokens):
    ranks(len(tokens)).run(round_trip, tokens, {"num_topk": 4})


def test_many_selections_and_int32(ranks):
    ranks(4).run(round_trip, [6, 3, 5, 4], {"num_topk": 9, "index_dtype": torch.int32})


def test_between_nodes(ranks):
    ranks(4).run(round_trip, [9, 14, 0, 5], {"num_topk": 4}, True)


def cached(group, nodes=False):
    with two_ranks_a_node(nodes):
        buffer = make_buffer(group)
    rank = buffer.rank_idx
    case = make_case([9, 14, 0, 5][: buffer.num_ranks], hidden=H, num_topk=4, drop=0.2)
    want = reference.expected(case, rank, M, 8)
    weights = [torch.rand(each.shape, generator=torch.Generator().manual_seed(i)) for i, each in enumerate(case.topk_weights)]
    other = reference.expected(make_case_with(case, weights), rank, M, 8)
    for cpu_sync in (True, False):
        flat = send(buffer, case, expert_alignment=8, do_cpu_sync=cpu_sync)[3]
        wide = send(buffer, case, expert_alignment=8, do_cpu_sync=cpu_sync, do_expand=True)[3]
        send(buffer, make_case([3] * buffer.num_ranks, hidden=H, seed=4))
        for handle in (flat, wide):
            result = buffer.dispatch(case.x[rank], handle=handle)
            assert result[3] is handle
            check_rows(want, result, False, with_weights=False)
            check_rows(other, buffer.dispatch(case.x[rank], topk_weights=weights[rank], handle=handle), False)
        check_rows(want, buffer.dispatch(case.x[rank], handle=wide, do_expand=True), True, with_weights=False)
        options = dict(handle=wide, do_expand=True, do_zero_padding=True, num_experts=case.num_experts, expert_alignment=8)
        result = buffer.dispatch(case.x[rank], topk_weights=weights[rank], num_max_tokens_per_rank=M, **options)
        check_rows(other, result, True, zeroed=True)
        rows = [torch.randn(len(x), 16, generator=torch.Generator().manual_seed(i)) for i, x in enumerate(case.x)]
        result = buffer.dispatch(rows[rank], handle=wide, do_expand=True)
        narrow = reference.expected(case, rank, M, 8, rows)
        check_rows(narrow, result, True, with_weights=False)


def make_case_with(case, weights):
    import dataclasses

    return dataclasses.replace(case, topk_weights=weights)


def test_cached(ranks):
    ranks(2).run(cached)
    ranks(4).run(cached, True)


def scales(group):
    buffer = make_buffer(group, use_fp8_dispatch=True)
    rank = buffer.rank_idx
    case = make_case([9, 14, 3, 5][: buffer.num_ranks], hidden=128, num_topk=4, drop=0.2)
    rows8 = [x.to(torch.float8_e4m3fn) for x in case.x]
    want = reference.expected(case, rank, M, 8, [x.view(torch.uint8) for x in rows8])
    generator = torch.Generator().manual_seed(5)
    handle = send(buffer, case, do_expand=True, expert_alignment=8)[3]
    for width, dtype in ((1, torch.float32), (3, torch.int32), (4, torch.float32)):
        values = [(torch.rand(len(x), width, generator=generator) * 1000).to(dtype) for x in case.x]
        want_scales = reference.expected(case, rank, M, 8, values).x
        for given in (values[rank], values[rank].t().contiguous().t()):
            for tma in (False, True):
                for expand in (False, True):
                    options = {"use_tma_aligned_col_major_sf": tma, "do_expand": expand}
                    zero = {"do_zero_padding": True} if expand else {}
                    for cpu_sync in (True, False):
                        sent = send(
                            buffer, case, (rows8[rank], given), expert_alignment=8, do_cpu_sync=cpu_sync, **options, **zero
                        )
                        check_scales(want, want_scales, sent, tma, expand)
                    check_scales(want, want_scales, buffer.dispatch((rows8[rank], given), handle=handle, **options, **zero), tma, expand)


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


def test_scales(ranks):
    ranks(2).run(scales)


def handle_attributes(group):
    """What engines do with a handle between dispatch and combine."""
    buffer = make_buffer(group)
    rank = buffer.rank_idx
    case = make_case([9, 14, 0, 5][: buffer.num_ranks], hidden=H, num_topk=4, drop=0.2)
    want = reference.expected(case, rank, M, 16)
    per_selection, per_rank = reference.selection_values(case, H), reference.rank_values(case, H)
    flat_rows = reference.rows_of_rank(case, want, per_rank, rank, M)
    n = len(want.ids)
    for cpu_sync in (True, False):
        def fresh(**options):
            return send(buffer, case, expert_alignment=16, do_cpu_sync=cpu_sync, **options)[3]

        def padded(rows, size):
            result = torch.full((size, H), float("nan"), dtype=torch.bfloat16)
            result[: rows.size(0)] = rows
            return result

        wanted = reference.combined(case, rank, (), per_rank=per_rank)
        # 1. The layout is changed by hand.
        handle = fresh(do_expand=True)
        handle.do_expand = False
        equal(buffer.combine(padded(flat_rows, handle.num_recv_tokens), handle)[0], wanted, "do_expand = False")
        # 2. Selections are added up by the program: row i stands for received token i.
        handle = fresh(do_expand=True)
        handle.recv_src_metadata[:, 2:] = -1
        handle.recv_src_metadata[:, 2] = torch.arange(handle.recv_src_metadata.size(0))
        for extra in (0, 5):
            rows = padded(flat_rows, handle.num_recv_tokens + extra)
            equal(buffer.combine(rows, handle)[0], wanted, "slots written in place")
        # 3. Another tensor, or a part of it.
        handle = fresh(do_expand=True)
        handle.recv_src_metadata = handle.recv_src_metadata[:n].clone()
        rows = reference.rows_of_selections(want, per_selection, M)
        equal(buffer.combine(rows, handle)[0], reference.combined(case, rank, (), per_selection=per_selection), "metadata[:n]")
        # 4. Everything from a dispatch that was made again.
        for expand in (False, True):
            handle, again = fresh(do_expand=expand), fresh(do_expand=expand)
            for name, value in vars(handle).items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(value[:n], getattr(again, name)[:n]), f"{name} differs from call to call"
                    setattr(handle, name, getattr(again, name))
            del again
            if expand:
                rows = padded(reference.rows_of_selections(want, per_selection, M), handle.num_expanded_tokens)
                equal(buffer.combine(rows, handle)[0], reference.combined(case, rank, (), per_selection=per_selection), "again")
            else:
                equal(buffer.combine(padded(flat_rows, handle.num_recv_tokens), handle)[0], wanted, "again")
            check_rows(want, buffer.dispatch(case.x[rank], handle=handle, do_expand=expand), expand, with_weights=False)
    copied = send(buffer, case)[3]
    kept = send(buffer, case, do_handle_copy=False)[3]
    assert kept.topk_idx is case.topk_idx[rank] and copied.topk_idx is not case.topk_idx[rank]
    assert torch.equal(copied.topk_idx, kept.topk_idx)


def test_handle_attributes(ranks):
    ranks(2).run(handle_attributes)
    ranks(4).run(handle_attributes)


def duplicates(group):
    """An expert twice in a row: one received row, two expanded ones."""
    buffer = make_buffer(group)
    idx = torch.tensor([[0, 0, 1], [-1, -1, -1], [1, 3, 1]])
    x = torch.arange(3, dtype=torch.bfloat16).unsqueeze(1).expand(3, H).contiguous() + 1
    rows, none, weights, handle, _ = buffer.dispatch(x, idx, torch.ones(3, 3), num_experts=4, do_expand=True)
    assert none is None and weights.tolist() == [1.0] * rows.size(0)
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == ([4, 6] if buffer.rank_idx == 0 else [0, 2])
    back, back_weights, _ = buffer.combine(rows, handle, weights)
    assert back[:, 0].tolist() == [3.0, 0.0, 9.0]
    assert back_weights.tolist() == [[1.0] * 3, [0.0] * 3, [1.0] * 3]


def test_duplicates(ranks):
    ranks(2).run(duplicates)


def tail_of_anything(group):
    """Rows of the metadata behind the received ones hold anything, and x has a row for each received one only."""
    buffers = {multiple: make_buffer(group, allow_multiple_reduction=multiple) for multiple in (True, False)}
    case = make_case([9, 14], hidden=H, num_topk=4, drop=0.2)
    per_selection = reference.selection_values(case, H)
    for multiple, buffer in buffers.items():
        rank = buffer.rank_idx
        want = reference.expected(case, rank, M, 1)
        handle = send(buffer, case, do_cpu_sync=False, do_expand=True)[3]
        for tail in (2**30, -(2**30)):
            handle.recv_src_metadata[len(want.ids) :] = tail
            weights = spread_weights(want, want.weights) if multiple else None
            x = reference.rows_of_selections(want, per_selection, M)
            back, back_weights, _ = buffer.combine(x, handle, weights)
            equal(back, reference.combined(case, rank, (), per_selection=per_selection, multiple=multiple), "combined rows")
            if multiple:
                equal(back_weights, torch.where(case.topk_idx[rank] >= 0, case.topk_weights[rank], 0.0), "weights")
            again = buffer.dispatch(case.x[rank], handle=handle, do_expand=True, do_zero_padding=True)
            check_rows(want, again, True, zeroed=True, with_weights=False)


def test_tail_of_anything(ranks):
    ranks(2).run(tail_of_anything)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_one_row_with_scales(width):
    """What travels beside a single row is cut out of a wider one."""
    buffer = ElasticBuffer(Alone, num_max_tokens_per_rank=M, hidden=H, num_topk=3)
    x, idx = torch.ones(1, H).to(torch.float8_e4m3fn), torch.tensor([[0, 2, -1]])
    row_scales, weights = torch.rand(1, width), torch.rand(1, 3)
    handle = buffer.dispatch((x, row_scales), idx, num_experts=4, do_expand=True)[3]
    for options, wanted in (({}, None), ({"topk_weights": weights}, weights[0, :2].tolist())):
        result = buffer.dispatch((x, row_scales), handle=handle, do_expand=True, **options)
        (rows, scales_of_rows), _, weights_of_rows = result[:3]
        assert torch.equal(scales_of_rows, row_scales.expand(2, -1)) and rows.shape == (2, H)
        assert (weights_of_rows is None) if wanted is None else (weights_of_rows.tolist() == wanted)


def test_streams_that_use_a_handle(monkeypatch):
    """A call that reads a given handle does so on its own stream."""
    seen = {}

    def finish(self, inputs, outputs):
        seen.update(inputs=[id(each) for each in inputs], outputs=[id(each) for each in outputs])
        return EventOverlap()

    buffer = ElasticBuffer(Alone, num_max_tokens_per_rank=M, hidden=H, num_topk=2)
    x = torch.ones(3, H, dtype=torch.bfloat16)
    handle = buffer.dispatch(x, torch.zeros(3, 2, dtype=torch.int64), num_experts=2)[3]
    held = handle._tensors()
    assert len(held) > 5 and handle.recv_src_metadata is not None
    monkeypatch.setattr(CallStream, "finish", finish)
    rows = buffer.dispatch(x, handle=handle)[0]
    for name in ("inputs", "outputs"):
        assert {id(each) for each in held} <= set(seen[name])
    assert id(x) in seen["inputs"] and id(rows) in seen["outputs"]
    buffer.combine(rows, handle)
    assert {id(each) for each in held} <= set(seen["inputs"])


def held_between_nodes(group):
    """Rows that programs keep, many times the size of the buffer."""
    with two_ranks_a_node():
        buffer = make_buffer(group, num_bytes=16 << 20, hidden=HELD, num_max_tokens_per_rank=64)
    x = torch.full((64, HELD), float(buffer.rank_idx), dtype=torch.bfloat16)
    idx = torch.arange(4).expand(64, 4).contiguous()  # every rank gets every token
    kept = []
    for _ in range(12):
        rows, local, weights, handle, _ = buffer.dispatch(x, idx, torch.ones(64, 4), num_experts=4)
        kept.append((rows, local, weights))
        kept.append(buffer.dispatch(x, handle=handle)[:1])
    for rows, *_ in kept:
        assert rows[::64, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert sum(each[0].numel() * 2 for each in kept) > 190 << 20 > 2 * buffer.num_bytes


def test_held_between_nodes(ranks):
    ranks(4).run(held_between_nodes)


def other_settings(group):
    rank = dist.get_rank(group)
    try:
        os.environ["DEEP_EP_RANKS_PER_NODE"] = "1" if rank else "0"
        with pytest.raises(RankMismatch, match="DEEP_EP_RANKS_PER_NODE is '.?' here and '.?' on rank .*allowed") as raised:
            make_buffer(group)
        plain_sentence(str(raised.value))
    finally:
        del os.environ["DEEP_EP_RANKS_PER_NODE"]


def test_ranks_with_other_settings(ranks):
    ranks(2).run(other_settings)


def backward(group):
    """Training as Megatron and NeMo do it: gradients go the other way, by combine and by cached dispatch."""
    buffer = make_buffer(group)
    rank = buffer.rank_idx
    case = make_case([9, 14], hidden=H, num_topk=4, drop=0.2)
    want = reference.expected(case, rank, M, 1)
    options = {"async_with_compute_stream": True, "allocate_on_comm_stream": True, "previous_event": buffer.capture()}
    x = case.x[rank].clone().requires_grad_()
    rows, local, weights, handle, event = send(buffer, case, x, **options)
    assert event.event is not None
    event.current_stream_wait()
    check_rows(want, (rows, local, weights), False)
    # Gradient of dispatch: combine, with the gradients of the weights.
    grad, grad_weights, event = buffer.combine(rows, handle, weights * 2, num_sms=handle.num_sms, **options)
    with event(release_handle=True):
        pass
    assert event.event is None
    copies = torch.tensor([len({e // case.local_experts for e in row if e >= 0}) for row in case.topk_idx[rank].tolist()])
    assert torch.allclose(grad.float(), case.x[rank].float() * copies.unsqueeze(1), rtol=0.02)
    equal(grad_weights, torch.where(case.topk_idx[rank] >= 0, case.topk_weights[rank] * 2, 0.0), "gradients of weights")
    # Gradient of combine: a cached dispatch.
    again, _, _, same, _ = buffer.dispatch(case.x[rank], handle=handle, num_sms=handle.num_sms, do_cpu_sync=False)
    assert same is handle
    equal(again, rows, "cached rows")


def test_backward(ranks):
    ranks(2).run(backward)


def events(group):
    buffer = make_buffer(group)
    rank = buffer.rank_idx
    case = make_case([9, 14], hidden=H, num_topk=4)
    want = reference.expected(case, rank, M, 1)
    captured = ElasticBuffer.capture()
    assert isinstance(captured, EventHandle)
    for previous, asynchronous, allocate in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 1), (1, 1, 1)):
        for event in (captured, EventOverlap(captured), EventOverlap()) if previous else (None,):
            options = {"async_with_compute_stream": asynchronous, "allocate_on_comm_stream": allocate,
                       "previous_event": event, "previous_event_before_epilogue": event}  # fmt: skip
            result = send(buffer, case, **options)
            assert (result[4].event is not None) == bool(asynchronous)
            with result[4]:
                pass
            check_rows(want, result, False)
            buffer.combine(result[0], result[3], **options)  # the result is dropped
    for wrong, kind in ((captured, ValueError), (3, TypeError)):
        with pytest.raises(kind, match="previous_event"):
            send(buffer, case, previous_event=wrong)
    called = []
    event = send(buffer, case, async_with_compute_stream=True)[4]
    event.register_hook_after_wait(lambda: called.append(1))
    event.current_stream_wait()
    assert called == [1]
    for options in ({}, {"use_comm_stream": False}, {"with_cpu_sync": True}, {"sequential": False}):
        buffer.barrier(**options)


def test_events_and_barrier(ranks):
    ranks(2).run(events)


def late(group):
    """A barrier holds everybody until the last one comes; no-sync calls of many sizes in a row; two buffers alive."""
    import time

    buffer, other = make_buffer(group), make_buffer(group)
    dist.barrier(group)
    begin = time.monotonic()
    if buffer.rank_idx == 1:
        time.sleep(0.3)
    buffer.barrier(with_cpu_sync=True)
    assert time.monotonic() - begin > 0.25
    handles = []
    for most in (24, 8, 16, 8):  # as decoding with batches of several sizes
        case = make_case([most, most - 3], hidden=H, num_topk=4, seed=most)
        for each in (buffer, other):
            rows, local, weights, handle, _ = send(each, case, num_max_tokens_per_rank=most, do_cpu_sync=False)
            local.fill_(7)  # programs write there
            handles.append((each, case, most, rows, handle))
    for each, case, most, rows, handle in handles:
        want = reference.expected(case, each.rank_idx, most, 1)
        check_rows(want, each.dispatch(case.x[each.rank_idx], handle=handle), False, with_weights=False)
        per_rank = reference.rank_values(case, H)
        rows[: len(want.ids)] = reference.rows_of_rank(case, want, per_rank, each.rank_idx, most)
        equal(each.combine(rows, handle)[0], reference.combined(case, each.rank_idx, (), per_rank=per_rank), "combined")


def test_several_sizes_and_buffers(ranks):
    ranks(2).run(late)


def wrong_use(group):
    buffer = make_buffer(group)
    single = make_buffer(group, allow_multiple_reduction=False)
    rank, ranks = buffer.rank_idx, buffer.num_ranks
    case = make_case([6] * ranks, hidden=H, num_topk=4)
    x, idx, weights = case.x[rank], case.topk_idx[rank], case.topk_weights[rank]
    flat, wide = send(buffer, case), send(buffer, case, do_expand=True)
    rows, handle = flat[0], flat[3]
    many = torch.zeros(M + 1, 4, dtype=torch.int64)

    def call(x=x, idx=idx, **options):
        return lambda: buffer.dispatch(x, idx, **{"topk_weights": weights, "num_experts": case.num_experts, **options})

    calls = [
        (ValueError, "topk_idx is None", call(idx=None)),
        (TypeError, "topk_idx is of type list", call(idx=[[1]])),
        (ValueError, "topk_idx is torch.float32", call(idx=idx.float())),
        (ValueError, "topk_idx has .* tokens, allowed", lambda: buffer.dispatch(torch.zeros(M + 1, H), many, num_experts=4)),
        (ValueError, "num_experts is None", call(num_experts=None)),
        (ValueError, "num_experts is 7", call(num_experts=7)),
        (TypeError, "num_experts is 8.0", call(num_experts=8.0)),
        (ValueError, "expert_alignment is 0", call(expert_alignment=0)),
        (ValueError, "do_zero_padding", call(do_zero_padding=True)),
        (ValueError, "recv_stats has 3", call(cumulative_local_expert_recv_stats=torch.zeros(3, dtype=torch.int32))),
        (ValueError, "recv_stats is given", lambda: buffer.dispatch(
            x, handle=handle, cumulative_local_expert_recv_stats=torch.zeros(4, dtype=torch.int32))),
        (AssertionError, "num_qps", call(num_qps=10**6)),
        (AssertionError, "do_cpu_sync", lambda: buffer.dispatch(x, handle=handle, do_cpu_sync=True)),
        (AssertionError, "topk_idx", lambda: buffer.dispatch(x, idx, handle=handle)),
        (AssertionError, "expert_alignment is 2", lambda: buffer.dispatch(x, handle=handle, expert_alignment=2)),
        (AssertionError, "num_experts is 4", lambda: buffer.dispatch(x, handle=handle, num_experts=4)),
        (ValueError, "do_expand", lambda: buffer.dispatch(x, handle=handle, do_expand=True)),
        (ValueError, "^x ", lambda: buffer.dispatch(x[1:], handle=handle)),
        (TypeError, "handle is of type tuple", lambda: buffer.dispatch(x, handle=())),
        (TypeError, "x_scales", call(x=(x, 1.0))),
        (ValueError, "x_scales", call(x=(x, torch.ones(6, 1).double()))),
        (ValueError, "^x lies on a device", call(x=x.to("meta"))),
        (TypeError, "handle is of type NoneType", lambda: buffer.combine(rows, None)),
        (ValueError, "^x is torch.float16", lambda: buffer.combine(rows.half(), handle)),
        (ValueError, "^x has", lambda: buffer.combine(torch.cat([rows, rows]), handle)),
        (ValueError, "topk_weights is of shape", lambda: buffer.combine(rows, handle, flat[2][:, :1].contiguous())),
        (ValueError, "topk_weights is given", lambda: single.combine(wide[0], wide[3], wide[2])),
        (ValueError, "bias_0 is of shape", lambda: buffer.combine(rows, handle, bias=x[1:])),
        (TypeError, "bias is of type int", lambda: buffer.combine(rows, handle, bias=1)),
        (NotImplementedError, "pp_send", lambda: buffer.pp_send(x, 0)),
        (NotImplementedError, "engram", lambda: ElasticBuffer.get_engram_storage_size_hint(1, 2, 3)),
    ]  # fmt: skip
    for number, (kind, text, function) in enumerate(calls):
        with pytest.raises(kind, match=text) as raised:
            function()
            raise RuntimeError(f"call {number}, about {text}, went through")
        plain_sentence(str(raised.value))
    check_rows(reference.expected(case, rank, M, 1), send(buffer, case), False)


def test_wrong_use(ranks):
    ranks(2).run(wrong_use)


CALL = "num_sms=0, num_qps=0, previous_event=None, previous_event_before_epilogue=None, async_with_compute_stream=False, " \
       "allocate_on_comm_stream=False"  # fmt: skip
SIGNATURES = {
    "__init__": "self, group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, hidden=0, num_topk=0, "
    "use_fp8_dispatch=False, deterministic=False, allow_hybrid_mode=True, allow_multiple_reduction=True, "
    "prefer_overlap_with_compute=True, sl_idx=3, num_allocated_qps=0, num_cpu_timeout_secs=300, "
    "num_gpu_timeout_secs=100, explicitly_destroy=False",
    "get_buffer_size_hint": "group, num_max_tokens_per_rank, hidden, num_topk=0, use_fp8_dispatch=False, "
    "allow_hybrid_mode=True, allow_multiple_reduction=True",
    "capture": "",
    "get_comm_stream": "self",
    "destroy": "self",
    "get_physical_domain_size": "self",
    "get_logical_domain_size": "self",
    "barrier": "self, use_comm_stream=True, with_cpu_sync=False, sequential=True",
    "get_theoretical_num_sms": "self, num_experts, num_topk, num_scaleout_topk=0, rdma_gbs=0, nvlink_gbs=0, "
    "sm_read_gbs=200, sm_write_gbs=50",
    "get_theoretical_num_qps": "self, num_sms",
    "dispatch": "self, x, topk_idx=None, topk_weights=None, cumulative_local_expert_recv_stats=None, num_experts=None, "
    "num_max_tokens_per_rank=None, expert_alignment=None, " + CALL + ", handle=None, do_handle_copy=True, "
    "do_cpu_sync=None, do_expand=False, do_zero_padding=False, use_tma_aligned_col_major_sf=False",
    "combine": "self, x, handle, topk_weights=None, bias=None, " + CALL,
}


def test_calls_that_are_left_out():
    buffer = ElasticBuffer(Alone, 2 << 20)
    for name in [name for name in vars(OptionalCalls) if not name.startswith("_")]:
        for owner in (ElasticBuffer, buffer):
            with pytest.raises(NotImplementedError, match=f"^{name}: this library has no Engram, pipeline or all-gather calls"):
                getattr(owner, name)(1, more=2)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    parameters = []
    for parameter in inspect.signature(getattr(ElasticBuffer, name)).parameters.values():
        assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        default = "" if parameter.default is inspect.Parameter.empty else f"={parameter.default!r}"
        parameters.append(parameter.name + default)
    assert ", ".join(parameters) == SIGNATURES[name]


def test_handle_signature():
    assert ", ".join(list(inspect.signature(EPHandle.__init__).parameters)[1:]) == (
        "do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms, topk_idx, num_recv_tokens, "
        "num_expanded_tokens, num_recv_tokens_per_expert_list, psum_num_recv_tokens_per_scaleup_rank, "
        "psum_num_recv_tokens_per_expert, num_unaligned_recv_tokens_per_expert, recv_src_metadata, dst_buffer_slot_idx, "
        "token_metadata_at_forward, channel_linked_list"
    )


def test_sizes_and_attributes():
    hint = ElasticBuffer.get_buffer_size_hint
    base = dict(num_max_tokens_per_rank=128, hidden=1024, num_topk=8)
    size = hint(Alone, **base)
    assert size % (2 << 20) == 0 and size > 0
    for name in base:
        assert hint(Alone, **{**base, name: 2 * base[name]}) >= size
    buffer = ElasticBuffer(Alone, **base, explicitly_destroy=True)
    assert buffer.num_bytes == size and buffer.group is Alone and buffer.num_max_tokens_per_rank == 128
    assert (buffer.num_ranks, buffer.rank_idx, buffer.scaleup_rank_idx, buffer.scaleout_rank_idx) == (1, 0, 0, 0)
    assert buffer.get_logical_domain_size() == buffer.get_physical_domain_size() == (1, 1)
    assert buffer.num_allocated_qps == 129 and ElasticBuffer(Alone, 2 << 20, allow_hybrid_mode=0).num_allocated_qps == 17
    sms = buffer.get_theoretical_num_sms(num_experts=256, num_topk=8)
    assert sms % 2 == 0 and sms >= 4
    assert buffer.get_theoretical_num_qps(4) == 65 and buffer.get_theoretical_num_qps(100) == 129
    assert buffer.get_theoretical_num_sms(256, 8, 0, rdma_gbs=50, nvlink_gbs=400, sm_read_gbs=100, sm_write_gbs=25) % 2 == 0
    with pytest.raises(AssertionError, match="num_scaleout_topk is 2"):
        buffer.get_theoretical_num_sms(256, 8, num_scaleout_topk=2)
    assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks, buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == (1,) * 4
    settings = ("deterministic", "allow_hybrid_mode", "allow_multiple_reduction", "prefer_overlap_with_compute")
    for given in (0, 1):
        other = ElasticBuffer(Alone, 4 << 20, 2 << 20, **{name: given for name in settings})
        assert [getattr(other, name) for name in settings] == [bool(given)] * 4
        assert other.num_cpu_bytes == 2 << 20 and not other.explicitly_destroy
    with pytest.raises(RuntimeError, match="get_comm_stream: the buffer is on the CPU"):
        other.get_comm_stream()
    assert buffer.explicitly_destroy and buffer.runtime is not None
    buffer.destroy()
    assert buffer.runtime is None
    buffer.destroy()
    with pytest.raises(AssertionError):
        ElasticBuffer(Alone, 2 << 20).destroy()
    with pytest.raises(RuntimeError, match="destroy"):
        buffer.barrier()
    calls = [
        (ValueError, "num_bytes is None", lambda: ElasticBuffer(Alone)),
        (ValueError, "num_bytes is 100", lambda: ElasticBuffer(Alone, 100)),
        (TypeError, "num_bytes is 2097152.0", lambda: ElasticBuffer(Alone, 2097152.0)),
        (ValueError, "num_cpu_bytes is 4194304", lambda: ElasticBuffer(Alone, 2 << 20, 4 << 20)),
        (TypeError, "hidden is 7168.0", lambda: ElasticBuffer(Alone, num_max_tokens_per_rank=8, hidden=7168.0)),
        (ValueError, "num_topk is 64", lambda: hint(Alone, 128, 1024, 64)),
        (TypeError, "group is of type str", lambda: ElasticBuffer("group", 2 << 20)),
    ]
    for kind, text, call in calls:
        with pytest.raises(kind, match=text):
            call()


def test_more_sms_for_more_ranks():
    from deep_ep.buffers import model

    assert model.expected_ranks(8, 256, 1) == pytest.approx(1) and 5 < model.expected_ranks(8, 256, 8) < 8
    assert model.expected_ranks(1, 4, 4) == 1


def beside_the_first_interface(group):
    """An ElasticBuffer and a Buffer with low-latency calls on one group."""
    import test_low_latency_calls as low_latency

    buffer, first = make_buffer(group), low_latency.make_buffer(group)
    case = make_case([9, 14], hidden=H, num_topk=4)
    small = low_latency.ll_case([low_latency.M] * 2)
    for _ in range(2):
        result = send(buffer, case)
        low_latency.reference.check_dispatched(
            small, first.rank, low_latency.M, low_latency.dispatch(first, small, use_fp8=False)
        )
        check_rows(reference.expected(case, buffer.rank_idx, M, 1), result, False)
    assert isinstance(first, Buffer)


def test_beside_the_first_interface(ranks):
    ranks(2).run(beside_the_first_interface)
