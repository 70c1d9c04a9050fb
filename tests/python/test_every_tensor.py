"""Every tensor that a call takes: other dtypes of the same width are refused, and it is kept until the call's work has ended."""

import copy
import dataclasses
import functools
import gc
import inspect
import weakref
from typing import Any, Tuple
from unittest import mock

import torch
from test_errors import Alone

from deep_ep import Buffer, ElasticBuffer, EPBuffer, EventOverlap, HybridEPBuffer
from deep_ep.errors import InvalidArgument
from deep_ep.peers import NativeOwner
from deep_ep.utils.math import per_token_cast_to_fp8

TOKENS, TOPK, HIDDEN, EXPERTS, M = 3, 2, 128, 4, 4
INDEX, WORD = (torch.int32, torch.int64), (torch.int32, torch.uint32)
ROWS, FLOAT, INT, LONG, BOOL = ((each,) for each in (torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.bool))
ANY = ()  # the call moves bytes
OF_A_WIDTH = {
    1: (torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2),
    2: (torch.bfloat16, torch.float16, torch.int16, torch.uint16),
    4: (torch.float32, torch.int32, torch.uint32),
    8: (torch.int64, torch.float64, torch.uint64, torch.complex64),
}


@dataclasses.dataclass
class Call:
    function: Any
    arguments: dict
    dtypes: dict  #: what each tensor may have, by the names of arguments, and of attributes for those of an EPHandle
    asynchronous: str = ""  #: the option with which the call returns an event
    keeps_results: bool = False  #: they are of the current stream, and the communication stream uses them
    unread: Tuple[str, ...] = ()
    options: dict = dataclasses.field(default_factory=dict)

    def __call__(self, **changes):
        return self.function(**{**self.arguments, **self.options, **changes})


def leaves(value, name="", path=()):
    """(name, path, tensor) of each tensor in an argument, a tuple, or a handle."""
    if isinstance(value, torch.Tensor):
        yield name, path, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, key, (*path, key))
    elif isinstance(value, (tuple, list)):
        for key, each in enumerate(value):
            yield from leaves(each, name, (*path, key))
    elif dataclasses.is_dataclass(value):
        for key, each in vars(value).items():
            yield from leaves(each, key, (*path, key))


def with_other(value, path, other):
    """A copy of ``value`` with another tensor at ``path``."""
    if not path:
        return other
    changed = list(value) if isinstance(value, tuple) else copy.copy(value)
    if dataclasses.is_dataclass(value):
        setattr(changed, path[0], with_other(getattr(value, path[0]), path[1:], other))
    else:
        changed[path[0]] = with_other(value[path[0]], path[1:], other)
    return tuple(changed) if isinstance(value, tuple) else changed


@functools.lru_cache(maxsize=None)
def calls():
    """Each call of the package that takes tensors, on a single rank, with all that it may be given at once."""
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    eight = per_token_cast_to_fp8(x)
    idx, weights = torch.tensor([[0, 1], [2, 3], [3, 0]]), torch.rand(TOKENS, TOPK)
    bias = torch.zeros_like(x), torch.ones_like(x)
    counts, waits = torch.zeros(EXPERTS, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    mapping = torch.full((1, 2), -1, dtype=torch.int32)
    made = {}

    def add(name, function, dtypes, arguments, *more, **options):
        made[name] = Call(function, arguments, dtypes, *more, **options)
        return made[name]()

    normal = Buffer(None, 1 << 22, comm=Alone)
    given = "async_finish", False
    layout = add("layout", normal.get_dispatch_layout, {"topk_idx": INDEX}, {"topk_idx": idx}, *given, options={"num_experts": EXPERTS})
    # uint8 is a way to write bool, and the handle holds no tensor that is read by itself.
    unread = "num_tokens_per_rank", "num_tokens_per_rdma_rank"
    dtypes = {"x": ANY, **dict.fromkeys(unread, ANY), "num_tokens_per_expert": INT, "is_token_in_rank": (*BOOL, torch.uint8)}
    of_layout = {"num_tokens_per_rank": layout[0], "num_tokens_per_rdma_rank": layout[0].clone(), "is_token_in_rank": layout[3],
                 "num_tokens_per_expert": layout[2]}  # fmt: skip
    selections, of_selections = {"topk_idx": idx, "topk_weights": weights}, {"topk_idx": INDEX, "topk_weights": FLOAT}
    sent = add("dispatch", normal.dispatch, {**dtypes, **of_selections}, {"x": eight, **of_layout, **selections}, *given,
               unread=unread)  # fmt: skip
    add("cached dispatch", normal.dispatch, {"x": ANY, "handle": ANY}, {"x": x, "handle": sent[4]}, *given)
    add("combine", normal.combine, {"x": ROWS, "topk_weights": FLOAT, "bias": ROWS, "handle": ANY},
        {"x": x, "handle": sent[4], "topk_weights": weights, "bias": bias}, *given)  # fmt: skip

    bytes_of_calls = Buffer.get_low_latency_rdma_size_hint(M, HIDDEN, 1, EXPERTS)
    small = Buffer(None, 0, bytes_of_calls, low_latency_mode=True, comm=Alone)
    given = "async_finish", True
    dtypes = {"x": ROWS, "topk_idx": INDEX, "cumulative_local_expert_recv_stats": INT, "dispatch_wait_recv_cost_stats": LONG,
              "arrival_counters": LONG, "x_global_scale": FLOAT, "combine_weights": FLOAT}  # fmt: skip
    tensors = x, idx, counts, waits, torch.zeros(EXPERTS, 1, dtype=torch.int64), torch.ones(1), weights
    few = add("low-latency dispatch", small.low_latency_dispatch, dtypes, dict(zip(dtypes, tensors)), *given,
              options={"num_max_dispatch_tokens_per_rank": M, "num_experts": EXPERTS, "use_nvfp4": True})  # fmt: skip
    rows = torch.zeros(EXPERTS, M, HIDDEN, dtype=torch.bfloat16)
    dtypes = {"x": ROWS, **of_selections, "combine_wait_recv_cost_stats": LONG, "out": ROWS, "handle": ANY}
    # The handle's tensors are of the library, or are not read.
    arguments = dict(zip(dtypes, (rows, idx, weights, waits, torch.zeros_like(x), few[2])))
    add("low-latency combine", small.low_latency_combine, dtypes, arguments, *given)
    handle = small.low_latency_dispatch(x, idx, M, EXPERTS)[2]
    for form, words, allowed, options in (
        ("src_signals", EXPERTS, WORD, {"src_signal_expect_value": 1}),
        ("comp_signal", EXPERTS, INT, {"block_m": 64, "threshold": 1, "packed_recv_count": counts}),
    ):
        overlap = {**arguments, "handle": handle, form: torch.ones(words, dtype=torch.int32)}
        options = {"overlap": True, "return_recv_hook": True, **options}
        whole = functools.wraps(small.low_latency_combine)(lambda **given: small.low_latency_combine(**given)[2]())
        add(form, whole, {**dtypes, form: allowed}, overlap, options=options)
    masked = Buffer(None, 0, bytes_of_calls, low_latency_mode=True, enable_shrink=True, comm=Alone)
    add("masks", masked.low_latency_query_mask_buffer, {"mask_status": INT}, {"mask_status": torch.zeros(1, dtype=torch.int32)})

    dtypes = {"x": ANY, **of_selections, "cumulative_local_expert_recv_stats": INT}
    # What a handle says to later calls.
    of_handle = {
        "_topk_idx": INDEX, "psum_num_recv_tokens_per_scaleup_rank": INT, "recv_src_metadata": INT, "psum_num_recv_tokens_per_expert": INT,
        "_local": INT, "dst_buffer_slot_idx": INT, "num_unaligned_recv_tokens_per_expert": ANY,
    }  # fmt: skip
    asynchronous = "async_with_compute_stream", False
    for kind, deferred in ((ElasticBuffer, {}), (EPBuffer, {}), (EPBuffer, {"defer_epilogue": True})):
        name = kind.__name__ + (" deferred" if deferred else "")
        buffer = kind(Alone, num_max_tokens_per_rank=M, hidden=HIDDEN, num_topk=TOPK)
        result = buffer.dispatch(x, idx, weights, num_experts=EXPERTS, do_expand=True)
        cached = {**of_handle, "dst_buffer_slot_idx": ANY}
        for call, function, of_call, arguments, options in (
            ("dispatch", buffer.dispatch, dtypes, dict(zip(dtypes, (eight, idx, weights, counts))), {"num_experts": EXPERTS}),
            ("cached dispatch", buffer.dispatch, {"x": ANY, "topk_weights": FLOAT, **cached},
             {"x": x, "topk_weights": weights, "handle": result[3]}, {"do_expand": True, "do_zero_padding": True}),
            ("combine", buffer.combine, {"x": ROWS, "topk_weights": FLOAT, "bias": ROWS, **of_handle,
                                         "psum_num_recv_tokens_per_expert": ANY, "_local": ANY},
             {"x": result[0], "topk_weights": result[2], "bias": bias, "handle": result[3]}, {}),
        ):  # fmt: skip
            given = {**options, **deferred, **({"async_with_compute_stream": True} if deferred else {})}
            add(f"{name}, {call}", function, of_call, arguments, *asynchronous, options=given)

    replicas = EPBuffer(Alone, 2 << 20, lb_allocation_plan_or_num_bytes=2 << 20)
    memory = replicas.runtime.lb_storage
    slots, grads, own = memory[:512].view(2, 256), memory[512:1024].view(torch.float32).view(2, 64), torch.zeros(3, 64)
    dtypes = {"redundant_expert_weights": ANY, "expert_weights": ANY, "redundancy_mapping": INT}
    add("prefetch", replicas.lb_prefetch_weights, dtypes, dict(zip(dtypes, ([slots], [own], mapping))), "always")
    dtypes = {"redundant_expert_grads": FLOAT, "expert_grads": FLOAT, "redundancy_mapping": INT}
    add("reduce", replicas.lb_reduce_grads, dtypes, dict(zip(dtypes, (grads, own, mapping))), "always")

    hybrid = HybridEPBuffer(Alone2(), HIDDEN, M, EXPERTS)
    routing = torch.eye(EXPERTS, dtype=torch.bool)[:TOKENS].contiguous()
    dtypes = {"hidden": ANY, "routing_map": BOOL, "probs": FLOAT}
    permuted = add("permute", hybrid.dispatch_with_permute, dtypes, dict(zip(dtypes, (x, routing, torch.rand(TOKENS, EXPERTS)))))
    dtypes = {"hidden": ANY, "topk_idx": INDEX, "topk_weights": (*FLOAT, *ROWS, torch.float16)}
    add("permute selections", hybrid.dispatch_with_permute, dtypes, {"hidden": x, **selections},
        options={"num_of_experts": EXPERTS, "scaling_factor": None})  # fmt: skip
    add("unpermute", hybrid.combine_with_unpermute, {"hidden": ROWS, "probs": FLOAT, "handle": ANY},
        {"hidden": permuted[0], "probs": permuted[1], "handle": permuted[4]})  # fmt: skip
    return made


def Alone2():
    return mock.Mock(wraps=Alone, size=lambda: 1, rank=lambda: 0)


def test_the_table_has_every_tensor():
    covered = {}
    for call in calls().values():
        covered.setdefault(call.function.__qualname__, set()).update(call.arguments, call.options)
        assert set(call.arguments) <= {*call.dtypes, "handle"}
    for kind in (Buffer, ElasticBuffer, EPBuffer, HybridEPBuffer):
        for name, function in inspect.getmembers(kind, inspect.isfunction):
            taken = {
                each.name for each in inspect.signature(function).parameters.values()
                if any(word in str(each.annotation) for word in ("Tensor", "Rows", "Bias")) and not name.startswith("_")
            }  # fmt: skip
            missing = taken - covered.get(function.__qualname__, set())
            assert not missing, (function.__qualname__, missing)


def test_other_dtypes_of_the_same_width():
    accepted = []
    for name, call in calls().items():
        for argument, path, tensor in leaves(call.arguments):
            allowed = call.dtypes.get(argument, ANY)
            for dtype in {one for each in allowed for one in OF_A_WIDTH[each.itemsize]} - set(allowed):
                other = tensor.to(dtype) if dtype.itemsize != tensor.dtype.itemsize else tensor.view(dtype)
                try:
                    call(**{path[0]: with_other(call.arguments, path, other)[path[0]]})
                except InvalidArgument:
                    continue
                except Exception as error:
                    accepted.append(f"{name}, {argument}: {dtype} raises {error!r}")
                else:
                    accepted.append(f"{name}, {argument}: {dtype}")
        call()  # it works as before
    assert not accepted, "\n".join(accepted)


def memory_of(tensors):
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_events_keep_all_tensors(monkeypatch):
    """An event keeps what the call was given; or the communication stream is made known to each tensor, as on a GPU."""
    stream, kept, end_of_call = object(), [], NativeOwner._event

    def on_a_gpu(self, event, *inputs):
        with mock.patch.object(self, "_comm_stream", stream), mock.patch.object(torch.Tensor, "is_cuda", True):
            return end_of_call(self, event, *inputs)

    monkeypatch.setattr(NativeOwner, "_event", on_a_gpu)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, user: kept.append(tensor) if user is stream else None)
    for avoid in ("0", "1"):
        monkeypatch.setenv("EP_AVOID_RECORD_STREAM", avoid)
        for name, call in calls().items():
            if not call.asynchronous:
                continue
            kept.clear()
            result = call(**({} if call.asynchronous == "always" else {call.asynchronous: True}))
            event = next(one for one in (result if isinstance(result, tuple) else (result,)) if isinstance(one, EventOverlap))
            assert event.event is not None, name
            given = {argument: value for argument, value in call.arguments.items() if argument not in call.unread}
            have = memory_of(each for _, _, each in leaves([kept, list(event.extra_tensors or ())]))
            for argument, _, tensor in leaves([given, result if call.keeps_results else ()]):
                assert memory_of([tensor]) <= have, f"{name}, {argument} is not kept"


class Memory(bytearray):
    """Of a tensor: it lives as long as any view of it."""


def in_own_memory(tensor, name, living):
    memory = Memory(tensor.nbytes)
    living[name] = weakref.ref(memory)
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)


def test_the_second_half_of_a_call_keeps_all_tensors():
    """A receive part, or sums that are made later, read and write tensors that the program may have dropped."""
    deferred = "EPBuffer deferred, combine"
    for name in ("low-latency dispatch", "low-latency combine", "src_signals", "comp_signal", deferred):
        call, living = calls()[name], {}
        given = {
            argument: in_own_memory(value, argument, living) if isinstance(value, torch.Tensor) else value
            for argument, value in call.arguments.items()
        }
        if name == deferred:
            living.clear()  # the first half has read them
            given["bias"] = tuple(in_own_memory(each, f"bias {i}", living) for i, each in enumerate(given["bias"]))
            given["handle"] = copy.copy(given["handle"])
            given["handle"].topk_idx = in_own_memory(given["handle"].topk_idx, "topk_idx", living)
            finish = call(**given).wait
        else:
            send = getattr(call.function, "__wrapped__", call.function)
            finish = send(**{**call.options, **given, "return_recv_hook": True})[-1]
        del given
        gc.collect()
        assert [argument for argument, each in living.items() if each() is None] == [], f"{name} keeps all"
        finish()
        gc.collect()
        assert [argument for argument, each in living.items() if each() is not None] == [], f"{name} has ended"
