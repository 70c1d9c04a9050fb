"""deep_ep.utils: what test scripts in the manner of upstream's import."""

import importlib
import math
import types

import pytest
import torch
import torch.distributed as dist

from deep_ep.utils import envs, gate, refs
from deep_ep.utils import math as numbers
from deep_ep.utils.testing import bench, bench_kineto

NAMES = {
    "event": "EventHandle EventOverlap",
    "envs": "init_dist init_seed dist_print get_local_seed get_global_seed get_physical_domain_size get_logical_domain_size "
    "check_nvlink_connections check_torch_deterministic get_nvlink_gbs get_rdma_gbs check_fast_rdma_atomic_support",
    "math": "align ceil_div calc_diff safe_div count_bytes per_token_cast_to_fp8 per_token_cast_back inplace_unique "
    "create_grouped_scores hash_tensor hash_tensors",
    "gate": "get_unbalanced_scores",
    "refs": "dispatch combine generate_pre_combine_data ordered_accumulate",
    "testing": "bench bench_kineto flush_l2_cache",
}


@pytest.mark.parametrize("module", NAMES)
def test_names(module):
    loaded = importlib.import_module(f"deep_ep.utils.{module}")
    for name in NAMES[module].split():
        assert callable(getattr(loaded, name)) and name in loaded.__all__


def test_numbers():
    assert (numbers.ceil_div(7, 4), numbers.align(7, 4), numbers.align(8, 4), numbers.align(0, 4)) == (2, 8, 8, 0)
    assert numbers.safe_div(0, 0) == 0 and numbers.safe_div(3, 2) == 1.5
    x = torch.ones(3, 4, dtype=torch.bfloat16)
    assert numbers.count_bytes((x, [x, (None, torch.ones(2, dtype=torch.int64))])) == 24 + 24 + 16
    assert numbers.calc_diff(x, x) == 0 and numbers.calc_diff(x, 2 * x) > 0.01
    assert numbers.hash_tensors(x, x.flip(0)) == 2 * numbers.hash_tensor(x)
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
    packed = numbers.per_token_cast_back(signs, exponents.repeat(1, 2))  # of 32 channels each
    assert packed[0, :32].abs().amax() == 2 and packed[0, 32:64].abs().amax() == 1
    odd = x[:, :200].contiguous()
    assert numbers.calc_diff(numbers.per_token_cast_back(*numbers.per_token_cast_to_fp8(odd)), odd) < 1e-3
    odd[:, 128:] *= 1000  # the scales are of 128 channels, and of 72
    assert torch.allclose(numbers.per_token_cast_back(*numbers.per_token_cast_to_fp8(odd)), odd, rtol=0.1, atol=1e-2 * 448)
    assert numbers.per_token_cast_back(rows[:0], scales[:0]).shape == (0, 256)


@pytest.mark.parametrize("ratio", [1.0, 1.5, 2.0])
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


def exchanged(group):
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


def nothing_exchanged(group):
    idx = torch.tensor([[0, 1]]) if dist.get_rank() == 0 else torch.zeros(0, 2, dtype=torch.int64)
    idx = idx if dist.get_rank() else -torch.ones_like(idx)
    rows, local, weights, ids, sources = refs.dispatch(torch.ones(idx.size(0), 4), idx, idx.float(), 10, 4)
    assert rows.shape == (0, 4) and local.shape == weights.shape == (0, 2) and ids.shape == (0,) and sources.tolist() == [0, 0]


def test_exchange(ranks):
    ranks(2).run(exchanged)
    ranks(2).run(nothing_exchanged)


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


def test_timing_without_gpu():
    calls = []
    mean, least, most = bench(lambda: calls.append(1))
    assert 0 <= least <= mean <= most and calls
    if not torch.cuda.is_available():
        assert math.isnan(bench_kineto(lambda: None, "kernel"))
        assert all(map(math.isnan, bench_kineto(lambda: None, ("one", "two"))))
