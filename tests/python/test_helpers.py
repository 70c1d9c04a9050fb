"""deep_ep.utils: what test scripts in the manner of upstream's import."""

import functools
import importlib
import math
import os
import types
import unittest.mock

import pytest
import torch
import torch.distributed as dist
from cluster import on_ranks
from common import signature_of

import deep_ep
from deep_ep.utils import envs, gate, nvlink, refs, testing
from deep_ep.utils import math as numbers
from deep_ep.utils.testing import bench, bench_kineto

# Parameters and defaults of upstream's helpers, as scripts of its three generations call them.
SIGNATURES = {
    "envs.init_dist": "local_rank, num_local_ranks, seed=0",
    "envs.init_seed": "global_seed",
    "envs.dist_print": "s='', once_in_node=False",
    "envs.get_local_seed": "",
    "envs.get_global_seed": "",
    "envs.get_physical_domain_size": "group",
    "envs.get_logical_domain_size": "group, allow_hybrid_mode=True",
    "envs.check_nvlink_connections": "group",
    "envs.check_torch_deterministic": "",
    "envs.get_nvlink_gbs": "factor=0.9",
    "envs.get_rdma_gbs": "nic_name='mlx5_0'",
    "envs.check_fast_rdma_atomic_support": "nic_name='mlx5_0'",
    "envs.get_sm_read_gbs": "",
    "envs.get_sm_write_gbs": "",
    "envs.EnvOverride": "envs",
    "math.align": "x, y",
    "math.ceil_div": "x, y",
    "math.safe_div": "a, b",
    "math.calc_diff": "x, y",
    "math.count_bytes": "*tensors",
    "math.hash_tensor": "t",
    "math.hash_tensors": "*tensors",
    "math.per_token_cast_to_fp8": "x",
    "math.per_token_cast_back": "x_fp8, x_scales",
    "math.inplace_unique": "x, num_slots",
    "math.create_grouped_scores": "scores, group_idx, num_groups",
    "gate.get_unbalanced_scores": "num_tokens, num_experts, num_ranks, num_topk, ratio, precise",
    "refs.dispatch": "x, topk_idx, topk_weights, num_max_tokens_per_rank, num_experts",
    "refs.generate_pre_combine_data": "src_token_global_idx, num_max_tokens_per_rank, num_topk, hidden",
    "refs.ordered_accumulate": "data, initial_value=None",
    "refs.combine": "y, topk_idx, num_scaleout_ranks, num_scaleup_ranks, num_experts, bias, reduce_in_local, "
    "reduce_in_scaleup",
    "testing.bench": "fn, num_warmups=30, num_tests=30, post_fn=None, flush_l2=True",
    "testing.bench_kineto": "fn, kernel_names, num_tests=30, suppress_kineto_output=False, trace_path=None, "
    "flush_l2=True, barrier_comm_profiling=False, num_kernels_per_period=1, barrier=None",
    "testing.flush_l2_cache": "enabled=True",
    "testing.parse_num_bytes": "text",
    "event.EventOverlap": "event=None, extra_tensors=None",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    module, function = name.split(".")
    loaded = importlib.import_module(f"deep_ep.utils.{module}")
    assert signature_of(getattr(loaded, function)) == SIGNATURES[name]


def test_numbers():
    assert (numbers.ceil_div(7, 4), numbers.align(7, 4), numbers.align(8, 4), numbers.align(0, 4)) == (2, 8, 8, 0)
    assert numbers.safe_div(0, 0) == 0 and numbers.safe_div(3, 2) == 1.5
    with pytest.raises(ZeroDivisionError):
        numbers.safe_div(1, 0)
    x = torch.ones(3, 4, dtype=torch.bfloat16)
    assert numbers.count_bytes((x, [x, (None, torch.ones(2, dtype=torch.int64))])) == 24 + 24 + 16
    assert numbers.count_bytes((x, x), None, x) == 72 and numbers.count_bytes(None) == numbers.count_bytes() == 0
    assert numbers.calc_diff(x, x) == 0 and numbers.calc_diff(x, 2 * x) > 0.01
    assert numbers.hash_tensor(x) == numbers.hash_tensor(x.flip(0)) != 0 == numbers.hash_tensors(x, (None, [x.flip(0)]))
    assert numbers.hash_tensors(x, 2 * x) == numbers.hash_tensor(x) ^ numbers.hash_tensor(2 * x)
    assert numbers.hash_tensor(torch.ones(3, dtype=torch.uint8)) == 3
    assert numbers.hash_tensor(torch.empty_strided((1,), (16,), dtype=torch.int32).fill_(7)) == 7
    idx = torch.tensor([[2, 0, 2], [-1, 1, 1], [-1, -1, -1]])
    numbers.inplace_unique(idx, 3)
    assert idx.tolist() == [[2, 0, -1], [1, -1, -1], [-1, -1, -1]]
    scores = numbers.create_grouped_scores(torch.ones(2, 4), torch.tensor([[0], [1]]), 2)
    assert scores.tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]


def test_eight_bits():
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x[1] = 0
    x[2] = 3.0
    rows, scales = numbers.per_token_cast_to_fp8(x)
    assert rows.dtype == torch.float8_e4m3fn and scales.shape == (5, 2) and scales.dtype == torch.float32
    for given in (scales, scales.t().contiguous().t()):
        back = numbers.per_token_cast_back(rows, given)
        assert back.dtype == torch.bfloat16 and numbers.calc_diff(back, x) < 1e-3
        assert (back[1] == 0).all() and (back[2] == 3).all()
    exponents = torch.tensor([[127 + 1, 127, 7, 7]] * 5, dtype=torch.uint8).view(torch.int32)  # two of them are padding
    signs = rows.float().sign().to(torch.float8_e4m3fn)
    packed = numbers.per_token_cast_back(signs, exponents)
    assert packed[0, :128].abs().amax() == 2 and packed[0, 128:].abs().amax() == packed[3, 128:].abs().amax() == 1
    column = torch.empty_strided((5, 1), (1, 24), dtype=torch.int32).copy_(exponents)  # as low-latency calls give it
    assert torch.equal(numbers.per_token_cast_back(signs, column), packed)
    odd = x[:, :200].contiguous()
    assert numbers.calc_diff(numbers.per_token_cast_back(*numbers.per_token_cast_to_fp8(odd)), odd) < 1e-3
    odd[:, 128:] *= 1000  # the scales are of 128 channels, and of 72
    assert torch.allclose(numbers.per_token_cast_back(*numbers.per_token_cast_to_fp8(odd)), odd, rtol=0.1, atol=1e-2 * 448)
    assert numbers.per_token_cast_back(rows[:0], scales[:0]).shape == (0, 256)


@pytest.mark.parametrize("ratio", [1.0, 2.0])
def test_unbalanced_scores(ratio):
    torch.manual_seed(3)
    ranks, experts, topk = 4, 32, 4
    scores = gate.get_unbalanced_scores(2048, experts, ranks, topk, ratio, True)
    assert scores.shape == (2048, experts) and scores.dtype == torch.float32
    counts = gate._tokens_of_ranks(scores, ranks, topk)
    others = counts[1:]
    assert counts[0] / others.mean() == pytest.approx(ratio, rel=0.1)
    assert ratio == 1 or (others.max() - others.min()) / others.mean() < 0.02


def test_sums():
    data = refs.generate_pre_combine_data(torch.tensor([3, 4]), 8, 3, 16)
    assert data.shape == (2, 3, 16) and data.dtype == torch.bfloat16 and data.unique().numel() > 40
    assert torch.equal(data[1:], refs.generate_pre_combine_data(torch.tensor([4]), 8, 3, 16))
    total = (data[:, 0].float() + data[:, 1].float() + data[:, 2].float()).to(torch.bfloat16)
    assert torch.equal(refs.ordered_accumulate(data), total)
    # Three ranks of two experts; the second rank has the first and the last slot, so it comes last.
    idx = torch.tensor([[2, 0, 3]])
    y = torch.tensor([1.0, 2.0**-7, 2.0**-7]).view(1, 3, 1).to(torch.bfloat16)
    assert refs.combine(y, idx, 1, 3, 6, None, False, False).item() == 1 + 2.0**-6
    bias = torch.full((1, 1), 256.0, dtype=torch.bfloat16)
    merged = (torch.tensor(1 + 2.0**-7).to(torch.bfloat16).float() + 2.0**-7 + 256).to(torch.bfloat16)
    assert refs.combine(y, idx, 1, 3, 6, bias, True, False) == merged
    assert refs.combine(y, torch.full_like(idx, -1), 1, 3, 6, (None, bias), True, False) == 256


@on_ranks(2)
def test_exchange(group):
    envs.dist_print(f"rank {dist.get_rank()}", once_in_node=True)
    with unittest.mock.patch.object(deep_ep.Buffer, "__init__", side_effect=AssertionError("counting nodes made a buffer")):
        assert envs.get_physical_domain_size(group) == envs.get_logical_domain_size(group) == (1, 2)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    idx = torch.tensor([[0, 2], [3, -1], [1, 0]]) if rank == 0 else torch.tensor([[2, 3]])
    x = torch.arange(idx.size(0) * 4, dtype=torch.float32).view(-1, 4) + 100 * rank
    rows, local, weights, ids, sources = refs.dispatch((x.to(torch.float8_e4m3fn), x), idx, idx.float(), 10, 2 * ranks)
    want = {0: ([0, 2], [[0, -1], [1, 0]], [2, 0]), 1: ([0, 1, 10], [[-1, 0], [1, -1], [0, 1]], [2, 1])}[rank]
    assert ids.tolist() == want[0] and local.tolist() == want[1] and sources.tolist() == want[2]
    assert ids.dtype == sources.dtype == torch.int32 and rows[0].dtype == torch.float8_e4m3fn
    assert rows[1][:, 0].tolist() == [100 * (i // 10) + 4 * (i % 10) for i in want[0]]
    assert weights.shape == local.shape


@on_ranks(2)
def test_exchange_of_nothing(group):
    idx = torch.tensor([[0, 1]]) if dist.get_rank() == 0 else torch.zeros(0, 2, dtype=torch.int64)
    idx = idx if dist.get_rank() else -torch.ones_like(idx)
    rows, local, weights, ids, sources = refs.dispatch(torch.ones(idx.size(0), 4), idx, idx.float(), 10, 4)
    assert rows.shape == (0, 4) and local.shape == weights.shape == (0, 2) and ids.shape == (0,) and sources.tolist() == [0, 0]


def test_facts_about_the_machine(monkeypatch):
    before = envs.get_global_seed(), torch.initial_seed()
    try:
        envs.init_seed(7)
        first = torch.rand(2)
        envs.init_seed(7)
        assert torch.equal(first, torch.rand(2)) and envs.get_global_seed() == envs.get_local_seed() == 7
    finally:
        envs.init_seed(before[0])
        torch.manual_seed(before[1])
    assert envs.get_logical_domain_size(types.SimpleNamespace(size=lambda: 6), allow_hybrid_mode=True) == (1, 6)
    assert envs.get_nvlink_gbs(0.5) == envs.get_nvlink_gbs(1.0) / 2 > 0
    assert envs.get_rdma_gbs("no such NIC") == 0 and not envs.check_fast_rdma_atomic_support("no such NIC")
    envs.check_torch_deterministic()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(AssertionError, match="fill_uninitialized_memory"):
        envs.check_torch_deterministic()
    envs.check_nvlink_connections(types.SimpleNamespace(size=lambda: 1))
    assert envs.get_sm_read_gbs() > envs.get_sm_write_gbs() > 0


def test_environment_for_a_block(monkeypatch):
    monkeypatch.setenv("A_NAME", "before")
    monkeypatch.delenv("ANOTHER", raising=False)
    with envs.EnvOverride([("A_NAME", "in it", True), ("ANOTHER", 3, True), ("A_THIRD", "1", False)]):
        assert (os.environ["A_NAME"], os.environ["ANOTHER"]) == ("in it", "3") and "A_THIRD" not in os.environ
    assert os.environ["A_NAME"] == "before" and "ANOTHER" not in os.environ
    with pytest.raises(KeyError), envs.EnvOverride([("A_NAME", None, True)]):
        os.environ["A_NAME"]
    assert os.environ["A_NAME"] == "before"


def test_gpus_without_nvlink(monkeypatch):
    """What two ranks with PCIe GPUs find: NVLink, none, no answer of the driver's library, and GPUs of two machines."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-PCIE-40GB")
    monkeypatch.setattr(nvlink._native, "gpu_address", lambda ordinal: "0000:01:00.0")
    group = types.SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    places, answers = [("here", "0000:01:00.0"), ("here", "0000:03:00.0")], []
    monkeypatch.setattr(dist, "all_gather_object", lambda gathered, mine, group: gathered.__setitem__(slice(None), places))
    check = functools.partial(envs.check_nvlink_connections, group)
    with pytest.warns(UserWarning, match="NVML does not say whether GPUs 0000:01:00.0 and 0000:03:00.0"):
        check()  # there is no such library here
    monkeypatch.setattr(nvlink, "joined_by_nvlink", lambda *addresses: answers.pop())
    answers += [False, True]
    check()
    with pytest.raises(AssertionError, match="GPUs 0000:01:00.0 and 0000:03:00.0 have no NVLink"):
        check()
    places[1] = ("there", "0000:03:00.0")
    check()
    with pytest.raises(AssertionError, match="group has 3 ranks with PCIe GPUs"):
        envs.check_nvlink_connections(types.SimpleNamespace(size=lambda: 3))


def test_timing_without_gpu():
    calls = []
    mean, least, most = bench(lambda: calls.append(1))
    assert 0 <= least <= mean <= most and calls
    if not torch.cuda.is_available():
        assert math.isnan(bench_kineto(lambda: None, "kernel"))
        assert all(map(math.isnan, bench_kineto(lambda: None, ("one", "two"))))


def test_numbers_of_bytes():
    sizes = {"1048576": 1 << 20, "512k": 512 << 10, "1.5M": 3 << 19, " 2GiB ": 2 << 30, "3 kb": 3072, "1T": 1 << 40}
    assert {text: testing.parse_num_bytes(text) for text in sizes} == sizes
    for text in ("", "0", "0.1", "-1", "1x", "k", "1.2.3", "1 2"):
        with pytest.raises(ValueError, match="text is"):
            testing.parse_num_bytes(text)


def kernel(name):
    return f"deep_ep::cuda::{name}_kernel(deep_ep::Params)"


SLEEP = "at::cuda::(anonymous namespace)::spin_kernel(long)"


def event(correlation, start, name, us, kind="kernel"):
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": us, "args": {"correlation": correlation}}


def profile_of(call, calls=2, barrier=(), other="gemm"):
    """What is recorded of calls that launch kernels with these names and microseconds, out of order."""
    launched = []
    for _ in range(calls):
        launched += [("fill", 9), (SLEEP, 10000), *[(kernel(name), us) for name, us in barrier], (SLEEP, 1)]
        launched += [*[(kernel(name), us) for name, us in call], (other, 50), (SLEEP, 1)]
    events = [event(number, 0.0, name, us) for number, (name, us) in enumerate(launched)]
    return testing.split_into_calls(events[::-1], calls, 2)


BARRIER = (("notify", 7), ("dispatch", 7))
DISPATCH = [("layout", 1), ("notify", 2), ("dispatch", 30), ("number_selections", 3), ("spread_rows", 4)]
COMBINE = [("sum_rows", 5), ("notify", 2), ("dispatch", 40), ("sum_rows", 2), ("sum_rows", 6)]


@pytest.mark.parametrize("call, journey, epilogue", [
    (DISPATCH, 33, 7), (DISPATCH[:3], 33, 1e-3), (COMBINE, 47, 8), ([("dispatch_and_notify_internode", 5), ("spread_rows", 1)], 5, 1),
])  # fmt: skip
def test_kernels_of_upstreams_are_ours_of_the_call(call, journey, epilogue):
    """What a barrier or a GEMM runs does not count, and nothing is NaN or 0, by which scripts divide."""
    calls = profile_of(call, barrier=BARRIER)
    for name in ("dispatch", "combine"):
        behind = "copy" if name == "dispatch" else "reduce"
        assert testing.seconds_of(f"{name}_impl", calls) == pytest.approx(journey * 1e-6)
        assert testing.seconds_of(f"{name}_{behind}_epilogue_impl", calls) == pytest.approx(epilogue * 1e-6)


def test_a_barrier_is_the_mean_of_its_kernels():
    calls = profile_of([("barrier", 6), ("barrier", 8)], barrier=(("barrier", 900),))
    assert testing.seconds_of("barrier", calls) == pytest.approx(7e-6)


def test_kernels_of_a_trace():
    """Work counts where it was launched, a graph's in the order of its start; what the host does does not count."""
    events = [
        event(1, 1.0, "cudaLaunchKernel", 2.0, "cuda_runtime"), event(3, 1.0, SLEEP, 1), event(1, 2.0, SLEEP, 1),
        event(2, 9.5, kernel("barrier"), 6.25), event(2, 9.0, "Memset (Device)", 1.5, "gpu_memset"),
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    ]  # fmt: skip
    (call,) = testing.split_into_calls(events, 1, 1)
    assert call == [("Memset (Device)", 1.5e-6), (kernel("barrier"), 6.25e-6)]
    with pytest.raises(AssertionError, match="recorded 2 sleeps for 2 calls, expected 4"):
        testing.split_into_calls(events, 2, 1)


def test_profiling_is_left_to_other_tools(monkeypatch):
    monkeypatch.setenv("EP_USE_NVIDIA_TOOLS", "1")
    assert bench_kineto(None, "dispatch_impl") == 1 and bench_kineto(None, ("one", "two")) == (1, 1)
