"""Rules of the package: errors that Python's switches do not remove, settings read before ranks meet, and names that are shown."""

import os
import sys
from unittest import mock

import pytest
import torch.distributed as dist
from cluster import on_ranks
from common import output_of
from test_errors import Alone

import deep_ep
from deep_ep import Buffer, ElasticBuffer, peers
from deep_ep.errors import Error, InvalidArgument

OPTIMISED = """
import torch
from deep_ep import Buffer, ElasticBuffer, EventOverlap

class Alone:
    rank, size = 0, 1
    Get_rank, Get_size, allgather = lambda self: 0, lambda self: 1, lambda self, value: [value]

assert False, "this is python -O"
second, first = ElasticBuffer(Alone(), 2 << 20), Buffer(None, comm=Alone())
idx, x = torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 64)
handle = second.dispatch(x, idx, num_experts=2, num_max_tokens_per_rank=4)[3]
once = EventOverlap()
once.register_hook_after_wait(print)
for call in (
    first.destroy, second.destroy, EventOverlap().current_stream_wait, lambda: once.register_hook_after_wait(print),
    lambda: Buffer.set_num_sms(3), lambda: first.dispatch(x),
    lambda: first.get_local_buffer_tensor(torch.int8, torch.Size((1 << 40,))),
    lambda: second.dispatch(x, idx, handle=handle), lambda: second.dispatch(x, handle=handle, do_cpu_sync=True),
    lambda: second.dispatch(x, handle=handle, num_experts=4), lambda: second.combine(x, handle, num_qps=10**6),
    lambda: second.get_theoretical_num_sms(2, 2, 1),
):
    try:
        call()
    except AssertionError as error:
        if str(error) and isinstance(error, ValueError):
            continue
    print("went through:", call)
    raise SystemExit(1)
"""


def test_rules_hold_under_o():
    output_of(sys.executable, "-O", "-c", OPTIMISED, seconds=120)


@on_ranks(2)
def test_no_rank_waits_for_one_with_a_wrong_setting(group):
    makers = (
        lambda: Buffer(group, num_rdma_bytes=1 << 22, low_latency_mode=True, explicitly_destroy=True),
        lambda: ElasticBuffer(group, 2 << 20, explicitly_destroy=True),
    )
    odd = dist.get_rank(group) == 1
    for make in makers:
        with mock.patch.dict(os.environ, {"DEEP_EP_RANKS_PER_NODE": "two"} if odd else {}):
            with pytest.raises(Error, match="environment variable DEEP_EP_RANKS_PER_NODE='two': not a whole") as raised:
                make()
        assert isinstance(raised.value, InvalidArgument) == odd and (odd or "failed on rank 1" in str(raised.value))
        with mock.patch.dict(os.environ, {"NVSHMEM_QP_DEPTH": "deep"} if odd else {}):
            make().destroy()


def test_a_time_out_other_than_the_default_holds(monkeypatch):
    given = []
    make = peers.NativeOwner._make

    def noted(*arguments, **options):
        given.append(options)
        return make(*arguments, **options)

    monkeypatch.setattr(peers.NativeOwner, "_make", noted)
    ElasticBuffer(Alone, 2 << 20)
    ElasticBuffer(Alone, 2 << 20, num_gpu_timeout_secs=100)
    ElasticBuffer(Alone, 2 << 20, num_gpu_timeout_secs=7)
    assert [options["timeout_s"] for options in given] == [None, None, 7.0]


def test_names_that_are_shown():
    assert all(hasattr(deep_ep, name) for name in deep_ep.__all__)
    assert not hasattr(deep_ep, "torch")
