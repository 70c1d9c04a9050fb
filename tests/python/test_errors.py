"""Wrong use raises, names the argument, and leaves the buffer usable; a rank that dies makes the others time out."""

import os
import re
import signal
import time

import pytest
import reference
import torch
from cluster import Cluster
from reference import make_case
from test_calls import CONFIG, check_received, send
from time_scale import scaled

from deep_ep import Buffer
from deep_ep.errors import RankMismatch


def wrong_use(group):
    buffer = Buffer(group, 1 << 22)
    rank, ranks = buffer.rank, buffer.group_size
    case = make_case([6] * ranks, hidden=32)
    result = send(buffer, case)
    rows, handle = result[0], result[4]
    per_rank, per_expert, in_rank = reference.layout(case, rank)
    x, idx, weights = case.x[rank], case.topk_idx[rank], case.topk_weights[rank]
    layout = dict(num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert)

    def dispatch(**changes):
        arguments = dict(layout, x=x, topk_idx=idx, topk_weights=weights, config=CONFIG)
        return lambda: buffer.dispatch(**{**arguments, **changes})

    def cached(x, handle=handle):
        return lambda: buffer.dispatch(x, handle=handle, config=CONFIG)

    def combine(*arguments, **options):
        return lambda: buffer.combine(*arguments, config=CONFIG, **options)

    with_list = [x.to(torch.float8_e4m3fn)]
    calls = [
        (ValueError, "topk_idx", lambda: buffer.get_dispatch_layout(idx.float(), 12)),
        (ValueError, "topk_idx", lambda: buffer.get_dispatch_layout(idx.t(), 12)),
        (ValueError, "topk_idx", lambda: buffer.get_dispatch_layout(idx[0], 12)),
        (TypeError, "topk_idx", lambda: buffer.get_dispatch_layout([[1]], 12)),
        (ValueError, "num_experts", lambda: buffer.get_dispatch_layout(idx, 0)),
        (ValueError, "num_experts", lambda: buffer.get_dispatch_layout(idx, ranks * 3 + 1)),
        (ValueError, "^x ", dispatch(x=x[:, :5])),
        (ValueError, "^x ", dispatch(x=x.t())),
        (ValueError, "^x ", dispatch(x=x[0])),
        (ValueError, "^x ", dispatch(x=with_list)),
        (TypeError, "^x ", dispatch(x=None)),
        (TypeError, "x_scales", dispatch(x=(x.to(torch.float8_e4m3fn), 1.0))),
        (ValueError, "x_scales", dispatch(x=(x.to(torch.float8_e4m3fn), torch.ones(5, 1)))),
        (ValueError, "x_scales", dispatch(x=(x.to(torch.float8_e4m3fn), torch.ones(6, 1).double()))),
        (ValueError, "is_token_in_rank", dispatch(is_token_in_rank=in_rank[:, :1])),
        (ValueError, "is_token_in_rank", dispatch(is_token_in_rank=in_rank.int())),
        (ValueError, "num_tokens_per_rank", dispatch(num_tokens_per_rank=per_rank.long())),
        (ValueError, "num_tokens_per_expert", dispatch(num_tokens_per_expert=per_expert[1:])),
        (ValueError, "topk_weights", dispatch(topk_weights=None)),
        (ValueError, "topk_weights", dispatch(topk_weights=weights.double())),
        (ValueError, "topk_weights", dispatch(topk_weights=weights[:, :1])),
        (ValueError, "topk_idx", dispatch(topk_idx=idx[1:])),
        (ValueError, "expert_alignment", dispatch(expert_alignment=0)),
        (ValueError, "num_worst_tokens", dispatch(num_worst_tokens=-1)),
        (TypeError, "previous_event", dispatch(previous_event=type("Event", (), {"event": 3})())),
        (AssertionError, "num_tokens_per_rank", dispatch(num_tokens_per_rank=None)),
        (AssertionError, "is_token_in_rank", dispatch(is_token_in_rank=None)),
        (AssertionError, "num_tokens_per_expert", dispatch(num_tokens_per_expert=None)),
        (AssertionError, "topk_idx", lambda: buffer.dispatch(x, handle=handle, topk_idx=idx, config=CONFIG)),
        (AssertionError, "ranks", lambda: buffer.dispatch(x, handle=handle)),
        (ValueError, "^x ", cached(x[1:])),
        (TypeError, "handle", cached(x, handle[0])),
        (ValueError, "handle", cached(x, handle[:3])),
        (ValueError, r"handle\[5\]", cached(x, handle[:5] + (handle[5].float(),))),
        (ValueError, "^x ", combine(rows[1:], handle)),
        (ValueError, "^x ", combine(rows.half(), handle)),
        (TypeError, "^x ", combine((rows, rows), handle)),
        (TypeError, "handle", combine(rows, None)),
        (ValueError, "topk_weights", combine(rows, handle, weights[:1].expand(rows.size(0) + 1, -1).contiguous())),
        (ValueError, "bias_0", combine(rows, handle, bias=x[1:])),
        (ValueError, "bias_1", combine(rows, handle, bias=(None, x.float()))),
        (ValueError, "bias", combine(rows, handle, bias=(x,))),
        (TypeError, "bias", combine(rows, handle, bias=1.0)),
    ]
    for number, (kind, text, call) in enumerate(calls):
        with pytest.raises(kind, match=text):
            call()
            raise RuntimeError(f"call {number}, about {text}, went through")
    check_received(send(buffer, case), reference.dispatched(case, rank), rank)


def test_wrong_use(ranks):
    ranks(3).run(wrong_use)


def mismatch(group):
    buffer = Buffer(group, 1 << 22)
    rank, ranks = buffer.rank, buffer.group_size
    for change in ("hidden", "num_topk", "index_dtype"):
        options = {"hidden": 32, "num_topk": 2, "index_dtype": torch.int64}
        if rank == 1:
            options[change] = {"hidden": 64, "num_topk": 3, "index_dtype": torch.int32}[change]
        with pytest.raises(RankMismatch, match="rank 1"):
            send(buffer, make_case([6] * ranks, **options))
    case = make_case([6] * ranks)
    check_received(send(buffer, case), reference.dispatched(case, rank), rank)
    with pytest.raises(ValueError, match="heap_bytes"):
        Buffer(group, (100 << 20) * (1 + rank))


def test_ranks_that_disagree(ranks):
    ranks(3).run(mismatch)


def start(group):
    global killed_test_buffer
    killed_test_buffer = Buffer(group, 1 << 22, explicitly_destroy=True)
    return os.getpid()


def dispatch_without_one(group):
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"rank \d waited .* s for rank 2") as raised:
        send(killed_test_buffer, make_case([6] * killed_test_buffer.group_size))
    assert isinstance(raised.value, RuntimeError)
    seconds = time.monotonic() - begin
    with pytest.raises(TimeoutError):
        send(killed_test_buffer, make_case([6] * killed_test_buffer.group_size))
    killed_test_buffer.destroy()
    return seconds


def test_killed_rank(monkeypatch):
    deadline = scaled(3)
    monkeypatch.setenv("DEEP_EP_TIMEOUT_S", str(deadline))
    cluster = Cluster(3)
    try:
        processes = cluster.run(start)
        os.kill(processes[2], signal.SIGKILL)
        for seconds in cluster.run(dispatch_without_one, ranks=[0, 1]):
            assert 0.8 * deadline < seconds < 3 * deadline + scaled(10)
    finally:
        cluster.close(kill=True)
