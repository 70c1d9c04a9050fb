"""Single-batch overlap as SGLang calls it: another thread stands for the GEMM that writes x while combine sends."""

import threading

import torch
from cluster import on_ranks
from low_latency_calls import M, combine, dispatch, ll_case, make_buffer, outputs_of
from test_errors import refused


def signals_of(x, block_m, dtype=torch.int32):
    """Zeros as SGLang makes them: for blocks of 64 rows, whatever ``block_m`` is; without one, a word for an expert."""
    experts, rows, _ = x.shape
    return torch.zeros(experts * ((rows + 63) // 64) if block_m else experts, dtype=dtype, device=x.device)


def produce(x, made, signals, block_m, value):
    """The GEMM: expert by expert, the last one first, and signals in as many steps as it has tiles."""
    words = signals.view(torch.int32)
    for expert in reversed(range(x.size(0))):
        step = block_m or x.size(1)
        for block, begin in enumerate(range(0, x.size(1), step)):
            made[expert, begin : begin + step] = x[expert, begin : begin + step]
            words[expert * ((x.size(1) + step - 1) // step) + block] += value


def forms(x, count):
    """Both protocols: keywords of combine, and what ``produce`` takes beside ``x`` and what it makes."""
    for block_m in (64, 128, 0):
        signals = signals_of(x, block_m, torch.int32 if block_m else torch.uint32)
        if block_m:
            form = dict(packed_recv_count=count, comp_signal=signals, block_m=block_m, threshold=8, num_sms=3)
        else:
            form = dict(src_signals=signals, src_signal_expect_value=78)
        yield form, (signals, block_m, 8 if block_m else 78)


@on_ranks(2)
def test_overlap(group):
    buffer = make_buffer(group)
    rank = buffer.rank
    case = ll_case([M] * buffer.group_size)
    _, count, handle, _, _ = dispatch(buffer, case, use_fp8=False)
    x = outputs_of(case)[rank]
    wanted, _, hook = combine(buffer, case, x, handle, return_recv_hook=True)
    hook()
    for form, signalled in forms(x, count):
        made = torch.full_like(x, float("nan"))
        out = torch.empty_like(wanted)
        gemm = threading.Thread(target=produce, args=(x, made, *signalled))
        gemm.start()
        back, event, hook = combine(
            buffer, case, made, handle, use_logfmt=False, zero_copy=False, async_finish=False, return_recv_hook=True,
            out=out, combine_wait_recv_cost_stats=None, overlap=True, **form,
        )  # fmt: skip
        gemm.join()
        hook()
        assert event.event is None and back is out and torch.equal(out, wanted)

    # Blackwell without signals: as if all were there. Without overlap the others have no effect.
    for form in (
        dict(overlap=True, src_signals=None, src_signal_expect_value=0),
        dict(overlap=False, src_signals=None, src_signal_expect_value=0),
        dict(overlap=False, packed_recv_count=None, comp_signal=None, block_m=64, threshold=0, num_sms=3),
    ):
        back, _, hook = combine(buffer, case, x, handle, return_recv_hook=True, **form)
        hook()
        assert torch.equal(back, wanted)

    signals = signals_of(x, 64)
    for options, text in (
        (dict(src_signals=signals, src_signal_expect_value=1), "return_recv_hook"),
        (dict(return_recv_hook=True, comp_signal=signals, src_signals=signals), "both given"),
        (dict(return_recv_hook=True, packed_recv_count=count), "comp_signal"),
        (dict(return_recv_hook=True, comp_signal=signals, threshold=0), "threshold is 0"),
        (dict(return_recv_hook=True, comp_signal=signals, threshold=1, block_m=1), "signals has .* elements"),
    ):
        refused((ValueError, text, lambda: combine(buffer, case, x, handle, overlap=True, **options)))
    masked = make_buffer(group, enable_shrink=True)
    handle = dispatch(masked, case, use_fp8=False)[2]
    refused((NotImplementedError, "masking", lambda: combine(masked, case, x, handle, return_recv_hook=True, overlap=True)))
