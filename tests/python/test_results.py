"""What programs do with the memory of results: it is PyTorch's, so ``resize_(0)``, ``record_stream`` and the like hold, and
nothing of PyTorch is changed for it."""

import ctypes
import gc
import pickle

import pytest
import torch
from common import run_program, run_with_older_pytorch
from normal_mode import CONFIG, equal, send_rows
from test_errors import Alone
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from deep_ep import Buffer, _native, peers

HIDDEN = 2048


def sent(buffer, x, idx, num_experts, **options):
    return send_rows(buffer, x, idx, torch.ones(idx.shape, dtype=torch.float32), num_experts, config=CONFIG, **options)


def of_buffer(buffer, tensor):
    begin = buffer.runtime.local_memory()
    return 0 <= tensor.data_ptr() - begin.data_ptr() < begin.numel()


def large(fill, hidden=HIDDEN):
    return torch.full((2048, hidden), float(fill), dtype=torch.bfloat16)


def low_latency(buffer, x, idx, **options):
    return buffer.low_latency_dispatch(x, idx, 16, 4, **options)


def results_of_every_call(buffer):
    """Of a buffer of one rank, but for handles. Some are what later calls are given."""
    x, idx = torch.ones(16, 512, dtype=torch.bfloat16), torch.arange(32).reshape(16, 2) % 4
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 4)
    yield from (per_rank, per_expert, in_rank)
    quantised = (x.to(torch.float8_e4m3fn), torch.ones(16, 4))
    (rows, scales), local, weights, _, handle, _ = sent(buffer, quantised, idx, 4)
    yield from (rows, scales, local, weights)
    again = buffer.dispatch(x, handle=handle, config=CONFIG)[0]
    yield from (again, *buffer.combine(again, handle, weights, config=CONFIG)[:2])
    for options in ({"use_fp8": False}, {}, {"round_scale": True, "use_ue8m0": True}):
        rows, count, handle, _, _ = low_latency(buffer, x, idx, **options)
        yield from (*rows, count) if isinstance(rows, tuple) else (rows, count)
    yield buffer.low_latency_combine(torch.ones(4, 16, 512).to(x), idx, torch.ones(16, 2), handle)[0]


def bits(tensor):
    """Of a contiguous one: rows that are undefined may be no numbers."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(-1).view(torch.uint8)


def make_buffer_of_one(**options):
    return Buffer(None, 1 << 20, 1 << 22, low_latency_mode=True, comm=Alone, **options)


def test_importing_changes_nothing():
    """In a process of its own: here everything is imported."""
    program = """
import torch, torch.distributed
kinds = (torch, torch.Tensor, torch.UntypedStorage, torch.cuda, torch.cuda.memory)
before = [dict(vars(kind)) for kind in kinds]
import deep_ep
from test_errors import Alone
buffer = deep_ep.Buffer(None, 1 << 20, comm=Alone)
x, idx = torch.ones(3, 64, dtype=torch.bfloat16), torch.zeros(3, 1, dtype=torch.int64)
per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 2)
rows = buffer.dispatch(x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert)[0]
rows.untyped_storage().resize_(0)
for kind, old in zip(kinds, before):
    changed = [name for name, value in old.items() if vars(kind).get(name, None) is not value]
    new = [name for name in vars(kind) if name not in old and kind in (torch.Tensor, torch.UntypedStorage)]
    print(kind, changed, new)
"""
    printed = run_program(program).stdout.splitlines()
    assert len(printed) == 5 and all(line.endswith("[] []") for line in printed), printed


def test_results_are_pytorchs():
    buffer = make_buffer_of_one()
    for each in list(results_of_every_call(buffer)):
        storage = each.untyped_storage()
        assert storage.resizable() and not of_buffer(buffer, each)
        wanted = each.clone() if each.is_contiguous() else None
        if wanted is not None and each.dtype == torch.bfloat16:  # plain pickle has no 8-bit floating point
            wanted = pickle.loads(pickle.dumps(each))
        storage.resize_(storage.nbytes() + 64)
        if wanted is not None:
            assert torch.equal(bits(each), bits(wanted))
        view = each.detach()
        assert view.untyped_storage().resize_(0).nbytes() == 0 == each.untyped_storage().nbytes()
        assert each.data_ptr() == 0


def test_handles_outlive_freed_results():
    """A handle's tensors are the library's."""
    buffer = make_buffer_of_one()
    idx = torch.arange(32).reshape(16, 2) % 4
    x = torch.ones(16, 512, dtype=torch.bfloat16)
    rows, local, weights, _, handle, _ = sent(buffer, x, idx, 4)
    low_rows, count, low, _, _ = low_latency(buffer, x, idx, use_fp8=False)
    for each in (rows, local, weights, low_rows, count):
        each.untyped_storage().resize_(0)
    del rows, local, weights, low_rows, count
    gc.collect()
    equal(buffer.combine(x, handle, config=CONFIG)[0], x, "combined")
    equal(buffer.dispatch(x, handle=handle, config=CONFIG)[0], x, "dispatched again")
    combined = buffer.low_latency_combine(torch.ones(4, 16, 512).to(x), idx, torch.ones(16, 2), low)[0]
    assert (combined == 2).all()


def test_rows_of_types_that_travel_as_they_are():
    """Rows of any type, also of those that the library does nothing with."""
    names = ("float16", "int8", "float64", "int64", "float8_e5m2", "float32", "uint16", "uint32", "uint64", "float8_e4m3fnuz",
             "float8_e5m2fnuz", "float8_e8m0fnu", "complex32")  # fmt: skip
    buffer = make_buffer_of_one()
    idx = torch.tensor([[0], [1], [0]])
    for dtype in [getattr(torch, name) for name in names if hasattr(torch, name)]:
        x = torch.arange(3 * 64, dtype=torch.uint8).view(3, 64).view(dtype)
        rows, *_, handle, _ = sent(buffer, x, idx, 2)
        for each in (rows, buffer.dispatch(x, handle=handle, config=CONFIG)[0]):
            assert each.dtype == dtype and torch.equal(each.view(torch.uint8), x.view(torch.uint8)), dtype


class Noted(TorchDispatchMode):
    """The operations of PyTorch that are made in its block, each behind a call of ``first``."""

    def __init__(self, first=lambda: None):
        super().__init__()
        self.names, self.first = [], first

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.first()
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


class Asked(TorchFunctionMode):
    """What PyTorch is asked in its block by way of a mode, as ``torch.set_default_device`` sets one."""

    def __init__(self):
        super().__init__()
        self.questions = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.questions.append(function)
        return function(*args, **(kwargs or {}))


def another_buffer_ends_within_a_call():
    x, idx = torch.ones(16, 64, dtype=torch.bfloat16), torch.zeros(16, 1, dtype=torch.int64)
    buffer = Buffer(None, 1 << 20, comm=Alone)
    for call in (lambda: buffer.get_dispatch_layout(idx, 2), lambda: sent(buffer, x, idx, 2)):
        others = [Buffer(None, 1 << 20, comm=Alone)]
        with Noted(others.clear):
            call()
        assert not others


def test_another_buffer_ends_within_a_call():
    """While PyTorch makes a result, as in a garbage collection. With a newer one no mode sees how results are made."""
    run_with_older_pytorch("test_results", "another_buffer_ends_within_a_call")


@pytest.mark.parametrize("use_fp8", [True, False])
def test_low_latency_calls_make_no_operations(use_fp8):
    """Each operation of PyTorch, and each question where a mode is on, costs a call about a microsecond: results are made in
    their final form, and arguments are looked at by functions of C."""
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this PyTorch is older than the quick ways")
    buffer = Buffer(None, 0, 1 << 22, low_latency_mode=True, comm=Alone)
    x, idx = torch.ones(16, 512, dtype=torch.bfloat16), torch.arange(32).reshape(16, 2) % 4
    outputs, weights = torch.ones(4, 16, 512).to(x), torch.ones(16, 2)
    with Noted() as counted, Asked() as asked:
        rows, count, handle, _, _ = low_latency(buffer, x, idx, use_fp8=use_fp8)
        combined, _, _ = buffer.low_latency_combine(outputs, idx, weights, handle)
    assert counted.names == [] and asked.questions == []
    results = (*rows, count, combined) if use_fp8 else (rows, count, combined)
    handed_out = [each for each in (*results, *handle[:2]) if not each.untyped_storage().resizable()]
    assert len(handed_out) == 2, "only src_info and layout_range are memory of the library, which is handed out by DLPack"
    if use_fp8:
        assert rows[1].untyped_storage().nbytes() == 4 * 16 * (512 // 128) * 4 and rows[1].transpose(1, 2).is_contiguous()


class Segments:
    """The part of PyTorch's pools on the CPU: tensors whose memory is a segment of the heap, taken as PyTorch does it."""

    def __init__(self, *_):
        self.out, self.larger = [], []
        library = ctypes.CDLL(_native.__file__)
        self.take, self.free = library.deep_ep_allocate_segment, library.deep_ep_free_segment
        self.take.restype, self.take.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self.free.restype = None
        self.free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]

    def make_in_heap(self, wanted, on_communication, used_by_other, segment):
        assert not on_communication and not used_by_other
        self.larger += [segment] if segment else []
        made = []
        for shape, strides, dtype in wanted:
            bytes = max(torch.Size(shape).numel() * dtype.itemsize, 1)
            address = self.take(bytes, 0, None)
            if address is None:
                for each in made:
                    self.give_back(each)
                return None
            memory = (ctypes.c_uint8 * bytes).from_address(address)
            made.append(torch.frombuffer(memory, dtype=torch.uint8).view(dtype).as_strided(shape, strides))
        self.out += made
        return made

    def give_back(self, tensor):
        self.out = [each for each in self.out if each.data_ptr() != tensor.data_ptr()]
        self.free(tensor.data_ptr(), tensor.untyped_storage().nbytes(), 0, None)


def test_rows_land_in_segments_of_the_heap(monkeypatch):
    segments = Segments()
    monkeypatch.setattr(peers, "Results", lambda *_: segments)
    buffer = Buffer(None, 1 << 20, comm=Alone)
    idx = torch.zeros(2048, 1, dtype=torch.int64)
    held, here = [], []
    for i in range(12):  # 8 MiB each
        result = sent(buffer, large(i), idx, 2)
        assert (result[0] == i).all()
        here.append(of_buffer(buffer, result[0]))
        assert of_buffer(buffer, result[4][2]) == here[-1], "all that peers write lies there, or nothing"
        equal(buffer.combine(result[0], result[4], config=CONFIG)[0], large(i), "combined")
        held.append(result)
    assert here[0] and not here[-1] and here == sorted(here, reverse=True)
    assert segments.larger == [16 << 20], "room for two such calls, asked for once"
    first = held[0][0].data_ptr()
    for each in segments.out[:]:
        segments.give_back(each)
    for _ in range(64):  # calls after one in vain do not ask
        again = sent(buffer, large(50), idx, 2)[0]
        if of_buffer(buffer, again):
            break
    assert again.data_ptr() == first and (again == 50).all(), "what was given back"
    assert segments.take(512, 0, None) is None, "outside a call there is no heap"
    segments.free(12345, 0, 0, None)  # of no segment
