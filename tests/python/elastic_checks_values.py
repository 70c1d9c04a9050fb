"""Checks of values: what is received and combined, in every layout."""

import time

import elastic_reference as reference
import torch
import torch.distributed as dist
from elastic_cases import check_handle, check_rows, check_scales
from elastic_check_parts import H, M, check, expanded_rows, flat_rows, kept_weights, on_host
from test_calls import equal


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
