"""Wrong use raises, names the argument, and leaves the buffer usable."""

import copy
import inspect
import pickle

import pytest
import reference
import torch
import torch.distributed as dist
from cluster import on_ranks
from normal_mode import CONFIG, check_received, send, send_rows
from reference import make_case

from deep_ep import Buffer, Config, ElasticBuffer, EPBuffer, HybridEPBuffer, _native, errors, ops
from deep_ep.errors import RankMismatch
from deep_ep.exchanges import bootstrap_of
from deep_ep.meetings import StoreRanks


def refused(*calls):
    """Each is (kind, text, call): the call raises that kind, with the text, no stack of C++ and no signature of a binding."""
    for kind, text, call in calls:
        with pytest.raises(kind, match=text) as raised:
            call()
            pytest.fail(f"what {text} is about went through")
        for trace in ("frame #", "Exception raised from", "incompatible function arguments", "Invoked with"):
            assert trace not in str(raised.value), raised.value


class Alone:
    """A communicator of one."""

    rank, size = 0, 1  # numbers, as mpi4py has them
    Get_rank = staticmethod(lambda: 0)
    Get_size = staticmethod(lambda: 1)
    allgather = staticmethod(lambda value: [value])


def test_wrong_types_before_any_call():
    buffer = Buffer(None, 0, 1 << 22, low_latency_mode=True, enable_shrink=True, comm=Alone)
    x, idx = torch.zeros(3, 128, dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.int64)
    hint, masked = Buffer.get_low_latency_rdma_size_hint, buffer.low_latency_update_mask_buffer
    outside = type("Outside", (Alone,), {"Get_rank": staticmethod(lambda: -1)})
    refused(
        (TypeError, "num_nvl_bytes is 1000000.0", lambda: Buffer(None, 1e6, comm=Alone)),
        (TypeError, "group is of type str", lambda: Buffer("group")),
        (TypeError, "group is of type int", lambda: Buffer(None, comm=3)),
        (ValueError, "rank is -1, allowed: 0 to 0", lambda: Buffer(None, comm=outside)),
        (
            TypeError,
            "allow_nvlink_for_low_latency is of type str, expected True or False",
            lambda: Buffer(None, allow_nvlink_for_low_latency_mode="x", comm=Alone),
        ),
        (ValueError, "memory is [0-9]+, which is out of range", lambda: ElasticBuffer(Alone, 1 << 70)),
        (TypeError, "num_sms is 20.0", lambda: Config(20.0)),
        (TypeError, "num_ranks is None", lambda: Config().get_rdma_buffer_size_hint(14336, None)),
        (TypeError, "num_max_dispatch_tokens_per_rank is 128.0", lambda: hint(128.0, 7168, 8, 256)),
        (TypeError, "rank_to_mask is 0.5", lambda: masked(0.5, True)),
        (TypeError, "mask_status is of type int", lambda: buffer.low_latency_query_mask_buffer(3)),
        (TypeError, "handle is of type int", lambda: buffer.get_next_low_latency_combine_buffer(3)),
        (ValueError, "handle has 2 elements, expected the tuple of 5", lambda: buffer.get_next_low_latency_combine_buffer((x, idx))),
        (TypeError, "num_max_dispatch_tokens_per_rank is of type float, expected an integer", lambda: buffer.low_latency_dispatch(x, idx, 8.0, 4)),
        (ValueError, "^x lies on a device .*: meta", lambda: buffer.low_latency_dispatch(x.to("meta"), idx, 8, 4)),
        (TypeError, "dtype is of type str", lambda: buffer.get_local_buffer_tensor("int8")),
        (TypeError, "size is of type int", lambda: buffer.get_local_buffer_tensor(torch.int8, 3)),
    )


def test_every_class_is_raised(monkeypatch):
    """Each class, and no other one; what the library throws between ranks: test_recovery.py and below."""
    monkeypatch.setenv("DEEP_EP_TIMEOUT_S", "0.1")
    options = dict(comm=Alone, low_latency_mode=True)
    small, masked = Buffer(None, 0, 1 << 22, **options), Buffer(None, 0, 1 << 22, **options, enable_shrink=True)
    gone = Buffer(None, comm=Alone, explicitly_destroy=True)
    gone.destroy()
    x, idx, weights = torch.zeros(3, 128, dtype=torch.bfloat16), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    handle = masked.low_latency_dispatch(x, idx, 4, 1)[2]
    rows = torch.zeros(1, 4, 128, dtype=torch.bfloat16)
    deaf = type("Deaf", (Alone,), {"allgather": staticmethod(lambda value: [value[:-1]])})
    causes = {
        "Error": lambda: _native.Buffer(bootstrap_of(Alone), 1000, 0, None),  # there is no such GPU
        "InvalidArgument": lambda: small.low_latency_dispatch(x, idx, 0, 1),
        "WrongUse": lambda: Buffer.set_num_sms(3),
        "Unsupported": lambda: masked.low_latency_combine(rows, idx, weights, handle, return_recv_hook=True, overlap=True),
        "RankMismatch": lambda: Buffer(None, comm=deaf),
        "OutOfMemory": lambda: send_rows(small, x, idx, weights, 1, num_worst_tokens=1),
        "PeerTimeout": lambda: StoreRanks(dist.HashStore(), 0, 2, [1]),
        "UseAfterDestroy": lambda: gone.get_dispatch_layout(idx, 1),
    }
    classes = {name for name, one in vars(errors).items() if inspect.isclass(one) and issubclass(one, errors.Error)}
    assert set(causes) == classes
    for name, cause in causes.items():
        with pytest.raises(errors.Error) as raised:
            cause()
        assert type(raised.value) is getattr(errors, name), (name, raised.value)


@on_ranks(3)
def test_rank_outside_of_the_group(group):
    part = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        with pytest.raises(ValueError, match="group is .*, allowed: a group with this process"):
            Buffer(part)
    else:
        Buffer(part)


@on_ranks(3)
def test_wrong_use(group):
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

    # Checks of the library have tests in C++ (buffer/arguments_test.cpp): here, errors arrive as Python's, with their text.
    refused(
        (ValueError, "topk_idx", lambda: buffer.get_dispatch_layout(idx.float(), 12)),
        (TypeError, "topk_idx", lambda: buffer.get_dispatch_layout([[1]], 12)),
        (TypeError, "num_experts is of type float, expected an integer", lambda: buffer.get_dispatch_layout(idx, 12.0)),
        (ValueError, "^x ", dispatch(x=x.t())),
        (ValueError, "^x ", dispatch(x=[x.to(torch.float8_e4m3fn)])),
        (TypeError, "^x ", dispatch(x=None)),
        (TypeError, "x_scales", dispatch(x=(x.to(torch.float8_e4m3fn), 1.0))),
        (MemoryError, "num_worst_tokens", dispatch(num_worst_tokens=1)),
        (TypeError, "previous_event", dispatch(previous_event=type("Event", (), {"event": 3})())),
        (TypeError, "previous_event is of type int", dispatch(previous_event=3)),
        (TypeError, "config is of type int", dispatch(config=24)),
        (TypeError, "expert_alignment is of type float, expected an integer", dispatch(expert_alignment=2.0)),
        (ValueError, "^x lies on a device .*: meta", dispatch(x=x.to("meta"))),
        (ValueError, "^topk_weights has layout torch.sparse_coo", dispatch(topk_weights=weights.to_sparse())),
        (ValueError, "^topk_idx has dtype bits8, allowed: int32 or int64$", lambda: buffer.get_dispatch_layout(torch.empty(3, 2, dtype=torch.bits8), 12)),
        (AssertionError, "num_tokens_per_rank", dispatch(num_tokens_per_rank=None)),
        (AssertionError, "topk_idx", lambda: buffer.dispatch(x, handle=handle, topk_idx=idx, config=CONFIG)),
        (TypeError, "handle", cached(x, handle[0])),
        (ValueError, r"handle\[1\]", cached(x, (handle[0], handle[0], *handle[2:]))),
        (TypeError, "^x ", combine((rows, rows), handle)),
        (TypeError, "handle", combine(rows, None)),
        (ValueError, "bias", combine(rows, handle, bias=(x,))),
        (TypeError, "bias", combine(rows, handle, bias=1.0)),
    )
    check_received(send(buffer, case), reference.dispatched(case, rank), rank)


class Plain(torch.Tensor):
    pass


class Wrapper(torch.Tensor):
    """As distributed tensors are: of another class, without memory."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError


@on_ranks(1)
def test_tensors_whose_memory_does_not_hold_their_values(group):
    """In every interface; a plain subclass is a tensor like others."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    buffer = Buffer(group, 0, Buffer.get_low_latency_rdma_size_hint(4, 128, 1, 4), low_latency_mode=True)
    elastic, v25 = (kind(group, num_max_tokens_per_rank=4, hidden=128) for kind in (ElasticBuffer, EPBuffer))
    x, idx, weights = torch.randn(3, 128).bfloat16(), torch.tensor([[0, 1]] * 3), torch.rand(3, 2)
    per, _, per_expert, inside, _ = buffer.get_dispatch_layout(idx, 4)
    hybrid = HybridEPBuffer(group, 128, 16, 4)
    calls = {
        "v1": lambda x, idx, weights: buffer.dispatch(x, None, per, None, inside, per_expert, idx, weights),
        "v2": lambda x, idx, weights: elastic.dispatch(x, idx, weights, num_experts=4),
        "v2.5": lambda x, idx, weights: v25.dispatch(x, idx, weights, num_experts=4, do_handle_copy=False),
        "low latency": lambda x, idx, weights: buffer.low_latency_dispatch(x, idx, 4, 4, combine_weights=weights),
    }
    late, fake = AsyncCollectiveTensor(x), FakeTensorMode().from_tensor(x)
    distributed = DTensor.from_local(x, init_device_mesh("cpu", (1,)), [Replicate()])
    for name, call in calls.items():
        refused(
            (ValueError, r"^x must be .* negative bit: pass its resolve_neg\(\)", lambda: call(torch._neg_view(x), idx, weights)),
            (ValueError, r"^topk_idx must be .*resolve_neg", lambda: call(x, torch._neg_view(-idx), weights)),
            (ValueError, r"_weights must be .*resolve_neg", lambda: call(x, idx, torch._neg_view(weights))),
            (ValueError, r"^x must be .* of class AsyncCollectiveTensor: .*wait\(\)", lambda: call(late, idx, weights)),
            (ValueError, r"^x must be .* of class DTensor: .*to_local\(\)", lambda: call(distributed, idx, weights)),
            (ValueError, r"^x must be .* of class FakeTensor: .*deep_ep.ops", lambda: call(fake, idx, weights)),
            (ValueError, r"^x must be .* of class Wrapper: .*memory", lambda: call(Wrapper(x), idx, weights)),
            (ValueError, "_weights has dtype float64, allowed: float32$", lambda: call(x, idx, weights.double())),
            (ValueError, "^topk_idx has dtype int16, allowed: int32 or int64$", lambda: call(x, idx.short(), weights)),
        )
        if name != "low latency":  # complex rows are rows of bytes
            conj = torch.randn(3, 32, dtype=torch.complex64).conj()
            refused((ValueError, r"^x must be .* conjugate bit: pass its resolve_conj\(\)", lambda: call(conj, idx, weights)))
        call(x.as_subclass(Plain), idx, weights)
    routing = {"topk_idx": idx, "topk_weights": weights, "num_of_experts": 4}
    refused(
        (ValueError, "^x must be .*vmap", lambda: torch.func.vmap(lambda one: calls["v1"](one, idx, weights))(x[None])),
        (ValueError, "^x must be .*resolve_neg", lambda: hybrid.dispatch_with_permute(hidden=torch._neg_view(x), **routing)),
    )
    state = ops.state_of(elastic)  # PyTorch resolves what its operators are given
    rows = [ops.dispatch(state, given, idx, weights, 4)[0] for given in (x, torch._neg_view(-x))]
    assert torch.equal(*rows)


@on_ranks(1)
def test_low_latency_errors_use_the_words_of_python(group):
    buffer = Buffer(group, 0, Buffer.get_low_latency_rdma_size_hint(4, 128, 1, 4), low_latency_mode=True)
    x, idx = torch.zeros(3, 128, dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.int64)
    hint = Buffer.get_low_latency_rdma_size_hint
    calls = (
        lambda: buffer.low_latency_dispatch(x, idx, 30000, 4),
        lambda: buffer.low_latency_dispatch(x, idx, 40000, 4),
        lambda: hint(60000, 7168, 8, 256),
    )
    for call in calls:
        with pytest.raises(ValueError, match="num_max_dispatch_tokens_per_rank") as raised:
            call()
        text = str(raised.value)
        assert "low_latency.bytes" not in text and " max_tokens" not in text and not text.startswith("max_tokens"), text
    with pytest.raises(ValueError, match="num_rdma_bytes .*Buffer.get_low_latency_rdma_size_hint"):
        calls[0]()
    with pytest.raises(ValueError, match="without enable_shrink"):
        buffer.low_latency_resume()
    elastic = ElasticBuffer(group, num_max_tokens_per_rank=4, hidden=128)
    with pytest.raises(ValueError, match="^num_max_tokens_per_rank is 0"):
        elastic.dispatch(x, idx, num_experts=4, num_max_tokens_per_rank=0)


@on_ranks(1)
def test_buffers_are_neither_copied_nor_pickled(group):
    made = (Buffer(group), *(kind(group, num_max_tokens_per_rank=4, hidden=128) for kind in (ElasticBuffer, EPBuffer)))
    for buffer in (*made, HybridEPBuffer(group, 128, 16, 4)):
        for act in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=f"^{type(buffer).__name__} cannot be copied or pickled: .*make one in each process"):
                act(buffer)


@on_ranks(3)
def test_ranks_that_disagree(group):
    """What must be equal is tested in C++ (buffer/disagreement_test.cpp): here, that ranks name the one that differs, and go on."""
    buffer = Buffer(group, 1 << 22)
    rank, ranks = buffer.rank, buffer.group_size
    with pytest.raises(RankMismatch, match="rank 1"):
        send(buffer, make_case([6] * ranks, hidden=64 if rank == 1 else 32))
    case = make_case([6] * ranks)
    check_received(send(buffer, case), reference.dispatched(case, rank), rank)
    with pytest.raises(ValueError, match="heap_bytes"):
        Buffer(group, (100 << 20) * (1 + rank))
