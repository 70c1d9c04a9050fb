"""Rules of the package: errors that Python's switches do not remove, and settings read before ranks meet."""

import ast
import os
import pathlib
from unittest import mock

import pytest
import torch.distributed as dist
from cluster import on_ranks
from test_errors import Alone

import deep_ep
from deep_ep import Buffer, ElasticBuffer, peers
from deep_ep.errors import Error, InvalidArgument


def test_rules_hold_under_o():
    """Python's switch -O removes asserts: none is in the package, whose errors are AssertionErrors where upstream's are."""
    package = pathlib.Path(deep_ep.__file__).resolve().parent
    files = list(package.rglob("*.py"))
    assert len(files) > 20
    for path in files:
        assert not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(path.read_text()))), path


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
