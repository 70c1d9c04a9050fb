"""The surface: names, signatures, defaults, and what needs neither peers nor CUDA."""

import copy
import pathlib
import pickle
import re
import subprocess
import sys

import pytest
import torch
from common import run_program, signature_of
from test_errors import Alone, refused
from test_helpers import SIGNATURES as HELPERS
from time_scale import scaled

import deep_ep
import deep_ep.buffer
import deep_ep.utils
from deep_ep import Buffer, Config, EventOverlap
from deep_ep.errors import PeerTimeout, WrongUse
from deep_ep.utils import EventHandle

CALL = "previous_event=None, async_finish=False, allocate_on_comm_stream=False"
DISPATCH = (
    "self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None, "
    "num_tokens_per_expert=None, topk_idx=None, topk_weights=None, expert_alignment=1, num_worst_tokens=0, config=None, " + CALL
)
COMBINE = "self, x, handle, topk_weights=None, bias=None, config=None, " + CALL
SIGNATURES = {
    Buffer.__init__: "self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=24, "
    "allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, use_fabric=False, explicitly_destroy=False, "
    "enable_shrink=False, comm=None, *, tcp_store_group=None, rank=None, num_ranks=None",
    Buffer.is_sm90_compiled: "",
    Buffer.set_num_sms: "new_num_sms",
    Buffer.capture: "",
    Buffer.get_low_latency_rdma_size_hint: "num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts",
    Buffer.get_dispatch_config: "num_ranks",
    Buffer.get_combine_config: "num_ranks",
    Buffer.get_comm_stream: "self",
    Buffer.get_local_buffer_tensor: "self, dtype, size=None, offset=0, use_rdma_buffer=False",
    Buffer.destroy: "self",
    Buffer.get_dispatch_layout: "self, topk_idx, num_experts, " + CALL,
    Buffer.dispatch: DISPATCH,
    Buffer.internode_dispatch: DISPATCH,
    Buffer.combine: COMBINE,
    Buffer.internode_combine: COMBINE,
    Buffer.clean_low_latency_buffer: "self, num_max_dispatch_tokens_per_rank, hidden, num_experts",
    Buffer.low_latency_dispatch: "self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, "
    "cumulative_local_expert_recv_stats=None, dispatch_wait_recv_cost_stats=None, use_fp8=True, round_scale=False, "
    "use_ue8m0=False, async_finish=False, return_recv_hook=False, arrival_counters=None, arrival_rows=0, "
    "use_nvfp4=False, x_global_scale=None, align_fp8_quantization=False, combine_weights=None",
    Buffer.low_latency_combine: "self, x, topk_idx, topk_weights, handle, use_logfmt=False, zero_copy=False, "
    "async_finish=False, return_recv_hook=False, out=None, combine_wait_recv_cost_stats=None, *, "
    "overlap=False, packed_recv_count=None, comp_signal=None, block_m=64, threshold=0, num_sms=3, "
    "src_signals=None, src_signal_expect_value=0",
    Buffer.low_latency_update_mask_buffer: "self, rank_to_mask, mask=False",
    Buffer.low_latency_query_mask_buffer: "self, mask_status",
    Buffer.low_latency_clean_mask_buffer: "self",
    Buffer.set_tcp_store_group: "self, store",
    Buffer.connect_ranks: "self, remote_ranks, activate=True",
    Buffer.disconnect_ranks: "self, remote_ranks",
    Buffer.get_next_low_latency_combine_buffer: "self, handle",
    EventOverlap.__init__: "self, event=None, extra_tensors=None",
    Config.__init__: "self, num_sms=20, num_max_nvl_chunked_send_tokens=6, num_max_nvl_chunked_recv_tokens=256, "
    "num_max_rdma_chunked_send_tokens=6, num_max_rdma_chunked_recv_tokens=256",
    Config.get_nvl_buffer_size_hint: "self, hidden_bytes, num_ranks",
    Config.get_rdma_buffer_size_hint: "self, hidden_bytes, num_ranks",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_signature(function):
    assert signature_of(function) == SIGNATURES[function]


# Engines that find these behind ``import deep_ep`` alone use them.
ATTRIBUTES = [
    "Buffer", "Config", "ElasticBuffer", "EPHandle", "EventHandle", "EventOverlap", "topk_idx_t", "__version__",
    "get_physical_domain_size", "get_logical_domain_size", "legacy.Buffer", "buffers.legacy.Buffer",
    "buffers.elastic.ElasticBuffer", "buffers.elastic.EPHandle", "utils.EventHandle", "utils.EventOverlap",
    "utils.event.EventHandle", "utils.check_nvlink_connections", *(f"utils.{name}" for name in HELPERS),
]  # fmt: skip


def test_names():
    assert {path for path in ATTRIBUTES if "." not in path} <= set(deep_ep.__all__)
    assert all(hasattr(deep_ep, name) for name in deep_ep.__all__) and not hasattr(deep_ep, "torch")
    assert deep_ep.ElasticBuffer is deep_ep.buffers.elastic.ElasticBuffer and deep_ep.EPHandle is deep_ep.buffers.elastic.EPHandle
    assert isinstance(deep_ep.topk_idx_t, torch.dtype)
    assert issubclass(PeerTimeout, TimeoutError) and issubclass(PeerTimeout, RuntimeError)
    for module in (deep_ep.buffer, deep_ep.legacy, deep_ep.buffers.legacy):
        assert module.Buffer is Buffer and module.Config is Config
    for module in (deep_ep.utils, deep_ep.utils.event):
        assert module.EventOverlap is EventOverlap and module.EventHandle is EventHandle is deep_ep.buffer.EventHandle
    assert Buffer.internode_dispatch is Buffer.dispatch and Buffer.internode_combine is Buffer.combine
    assert Buffer.is_sm90_compiled() is True


def test_version():
    """One everywhere: what `test_wheel.py` knows of the wheel and the command, and here the library's and the package's."""
    root = pathlib.Path(__file__).resolve().parents[2]
    project = re.search(r"deep_ep\s+VERSION ([0-9.]+)", (root / "CMakeLists.txt").read_text()).group(1)
    assert deep_ep.__version__ == project
    assert re.search(rf"^## \[{re.escape(project)}\] - \d{{4}}-\d\d-\d\d$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_without_pytorch():
    """Importing says what is missing, in one sentence."""
    program = "import sys; sys.modules['torch'] = None; import deep_ep"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=scaled(60))
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("ModuleNotFoundError: deep_ep needs PyTorch 2.4 or later, which is not")
    assert "During handling" not in done.stderr and "direct cause" not in done.stderr


def test_one_import_is_enough_and_quiet():
    program = f"""
import functools, os, threading, torch
before = threading.active_count(), len(os.listdir("/proc/self/task"))
import deep_ep
for path in {ATTRIBUTES!r}:
    *module, name = path.split(".")
    assert hasattr(functools.reduce(getattr, module, deep_ep), name), path  # how vLLM asks
config = deep_ep.Config(24, 8, 256)
config.get_nvl_buffer_size_hint(14336, 8), deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256)
deep_ep.Buffer.get_dispatch_config(8)
assert before == (threading.active_count(), len(os.listdir("/proc/self/task"))), "import started a thread"
assert not torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    from test_errors import Alone
    deep_ep.Buffer(None, comm=Alone).get_dispatch_layout(torch.zeros(3, 2, dtype=torch.int64), 4)
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
    run_program(program)


def test_config():
    assert Config(24, 8, 256).num_sms == 24
    Config(**{"num_sms": 24, "num_max_nvl_chunked_send_tokens": 6, "num_max_nvl_chunked_recv_tokens": 512,
              "num_max_rdma_chunked_send_tokens": 8, "num_max_rdma_chunked_recv_tokens": 128})  # fmt: skip
    assert Config(24, 8, 720, 24, 128).num_max_rdma_chunked_recv_tokens == 144
    refused(
        (ValueError, "num_sms", lambda: Config(-2)),
        (ValueError, "num_max_nvl_chunked_send_tokens", lambda: Config(20, 0)),
        (ValueError, "num_max_nvl_chunked_send_tokens", lambda: Config(20, 256, 256)),
        (ValueError, "num_max_rdma_chunked_send_tokens", lambda: Config(20, 6, 256, 65, 128)),
    )


def test_hints():
    """Sizes are computed, and checked, in C++ (buffer/options_test.cpp)."""
    for ranks in (1, 4, 8, 12, 72, 100):
        size = Config(20).get_nvl_buffer_size_hint(14336, ranks)
        assert isinstance(size, int) and 0 < size < 2**31 and size % 128 == 0
        assert Config(20).get_rdma_buffer_size_hint(14336, ranks) == 0
    assert Config().get_nvl_buffer_size_hint(2**70, 8) == 2**31 - 128
    base = {"num_max_dispatch_tokens_per_rank": 128, "hidden": 7168, "num_ranks": 8, "num_experts": 288}
    size = Buffer.get_low_latency_rdma_size_hint(**base)
    assert isinstance(size, int) and size % 128 == 0 and 0 < size < 256e6
    refused(
        (ValueError, "num_ranks", lambda: Config().get_nvl_buffer_size_hint(14336, 0)),
        (ValueError, "num_ranks is 0", lambda: Config().get_rdma_buffer_size_hint(14336, 0)),
        (ValueError, "hidden", lambda: Buffer.get_low_latency_rdma_size_hint(**{**base, "hidden": 0})),
    )


def test_default_configs():
    assert Buffer.num_sms == 20
    with pytest.raises(AssertionError):
        Buffer.set_num_sms(21)
    try:
        Buffer.set_num_sms(24)
        for ranks in (1, 3, 8, 160, 500):
            assert Buffer.get_dispatch_config(ranks).num_sms == Buffer.get_combine_config(ranks).num_sms == 24
    finally:
        Buffer.set_num_sms(20)
    for get in (Buffer.get_dispatch_config, Buffer.get_combine_config):
        refused((ValueError, "num_ranks", lambda: get(0)), (TypeError, "num_ranks", lambda: get(True)))


def test_event_overlap():
    event = EventOverlap()
    assert event.event is None and event.extra_tensors is None
    with event as entered:
        assert entered is event
    with pytest.raises(AssertionError):
        event.current_stream_wait()
    calls = []
    captured = Buffer.capture()
    captured.register_hook_after_wait(lambda: calls.append(1))
    with pytest.raises(AssertionError, match="hook"):
        captured.register_hook_after_wait(print)
    captured.current_stream_wait()
    captured.current_stream_wait()
    assert calls == [1]
    captured.extra_tensors = [torch.zeros(1)]
    with captured(release_handle=True) as entered:
        assert entered is captured and captured.event is not None
    assert captured.event is None and captured.extra_tensors is None
    captured = Buffer.capture()
    assert isinstance(captured.event, EventHandle)
    captured.current_stream_wait()
    captured.current_stream_wait()
    copy.copy(captured.event).current_stream_wait()
    with pytest.raises(TypeError):
        pickle.dumps(captured.event)


def test_attributes_and_destroy():
    with pytest.raises(ValueError, match="group"):
        Buffer(None)
    comm = Alone()
    buffer = Buffer(None, 1 << 20, 0, comm=comm)
    assert buffer.group is comm and buffer.group_size == 1 and buffer.rank == 0
    assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (1 << 20, 0)
    assert (buffer.low_latency_mode, buffer.explicitly_destroy, buffer.enable_shrink) == (False, False, False)
    assert buffer.runtime is not None
    with pytest.raises(AssertionError, match="explicitly_destroy=True") as raised:
        buffer.destroy()
    assert isinstance(raised.value, WrongUse) and isinstance(raised.value, RuntimeError)
    assert buffer.get_dispatch_layout(torch.zeros(4, 1, dtype=torch.int64), 2)[0].tolist() == [4]
    buffer = Buffer(None, comm=comm, explicitly_destroy=True)
    buffer.destroy()
    assert buffer.runtime is None
    buffer.destroy()
    refused((RuntimeError, "destroy", lambda: buffer.get_dispatch_layout(torch.zeros(1, 1, dtype=torch.int64), 1)))
    for name, value in (("num_nvl_bytes", 100), ("num_rdma_bytes", -128), ("num_nvl_bytes", 2**80), ("num_qps_per_rank", -4)):
        refused((ValueError, name, lambda: Buffer(None, comm=comm, **{name: value})))


def test_describe():
    buffer = Buffer(None, 1 << 22, 1 << 22, low_latency_mode=True, comm=Alone())
    for text in (buffer.describe(), deep_ep.ElasticBuffer(Alone(), 2 << 20).describe()):
        assert "rank 0 of 1 on cpu" in text, text
    assert "low latency: room for" in buffer.describe()


def test_local_buffer_tensor():
    buffer = Buffer(None, 1 << 16, comm=Alone())
    everything = buffer.get_local_buffer_tensor(torch.bfloat16)
    assert everything.shape == (1 << 15,) and everything.dtype == torch.bfloat16
    everything.fill_(3)
    part = buffer.get_local_buffer_tensor(torch.float32, torch.Size((4, 8)), offset=64)
    assert part.shape == (4, 8)
    assert part.data_ptr() == everything.data_ptr() + 64
    assert (part.view(torch.bfloat16) == 3).all()
    with pytest.raises(AssertionError, match="size"):
        buffer.get_local_buffer_tensor(torch.int8, torch.Size((1 << 17,)))


def test_attributes_of_low_latency_buffers(monkeypatch):
    options = {"num_rdma_bytes": 1 << 22, "low_latency_mode": True, "comm": Alone()}
    for text, depth in (("", 1024), ("many", 1024), ("-1", 1024), ("99999999999", 1024), ("0x800", 2048)):
        monkeypatch.setenv("NVSHMEM_QP_DEPTH", text)
        assert Buffer(None, **options).nvshmem_qp_depth == depth
    buffer = Buffer(None, enable_shrink=True, **options)
    assert (buffer.num_rdma_bytes, buffer.enable_shrink, buffer.low_latency_mode) == (1 << 22, True, True)
    assert not hasattr(Buffer(None, comm=Alone()), "nvshmem_qp_depth")


def test_module_needs_no_torch_library():
    module = deep_ep._native.__file__
    needed = subprocess.run(["ldd", module], check=True, capture_output=True, text=True).stdout
    assert "libc.so" in needed
    for library in ("libtorch", "libc10", "libcudart", "libcuda."):
        assert library not in needed
