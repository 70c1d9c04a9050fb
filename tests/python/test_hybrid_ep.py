"""HybridEPBuffer against a plain reference, of data that every rank can make; calls as Megatron, torchtitan and Automodel make them."""

import random

import elastic_reference
import pytest
import reference
import torch
from cluster import on_ranks

from deep_ep import HybridEPBuffer, HybridEpConfigInstance
from deep_ep.errors import RankMismatch
from deep_ep.hybrid_ep_buffer import indices_to_map
from deep_ep.utils.math import align

H = 128


class Case:
    """Rows, maps and probs of all ranks."""

    def __init__(self, ranks, tokens, local, seed, density=0.3):
        generator = torch.Generator().manual_seed(seed)
        self.ranks, self.tokens, self.local = ranks, tokens, local
        self.rows = torch.randn(ranks, tokens, H, generator=generator).to(torch.bfloat16)
        self.map = torch.rand(ranks, tokens, ranks * local, generator=generator) < density
        self.map[:, :1] = False  # a row of padding
        self.probs = torch.rand(self.map.shape, generator=generator) * self.map


class Wanted:
    """What rank ``rank`` gets: ``pairs`` of a global token and a local expert for each permuted row, ``None`` in gaps."""

    def __init__(self, case, rank, step=1, budget=None):
        experts = case.ranks * case.local  # of which each is a selection, or not
        sent = reference.Case(experts, case.rows, torch.where(case.map, torch.arange(experts), -1), case.probs)
        want = elastic_reference.expected(sent, rank, case.tokens, step)
        self.tokens, first = want.ids, rank * case.local
        self.pairs = [each and (want.ids[each[0]], each[1] - first) for each in want.selections][:budget]
        room = float("inf") if budget is None else budget
        self.counts = [max(0, min(count, room - start)) for start, count in zip(want.starts, want.counts)]
        self.padded = [align(count, step) for count in self.counts]
        self.overflow = int(want.starts[-1] + want.counts[-1] > room)

    def permuted(self, values, experts=None):
        """``values`` ``[R * T, ...]``; with ``experts`` the column of each pair's, behind so many others."""
        result = torch.zeros(len(self.pairs), *values.shape[1 + (experts is not None) :], dtype=values.dtype)
        for at, pair in enumerate(self.pairs):
            if pair is not None:
                result[at] = values[pair[0]] if experts is None else values[pair[0], experts + pair[1]]
        return result


def output_of(case, rank, size):
    """What the experts of a rank make: any number in rows that exist, NaN elsewhere (but in ``permuted`` gaps)."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(size, H, generator=generator).to(torch.bfloat16), torch.rand(size, generator=generator)


def combined(case, owner, wanted, outputs, probs):
    """Sums of each rank in float32, rounded, and then of the ranks; probs at their places."""
    total = torch.zeros(case.tokens, H)
    back = torch.zeros(case.tokens, case.ranks * case.local)
    for rank in range(case.ranks):
        part = torch.zeros(case.tokens, H)
        for at, pair in enumerate(wanted[rank].pairs):
            if pair is None or pair[0] // case.tokens != owner:
                continue
            token = pair[0] % case.tokens
            part[token] += outputs[rank][at].float()
            back[token, rank * case.local + pair[1]] = probs[rank][at]
        total += part.to(torch.bfloat16).float()
    return total.to(torch.bfloat16), back


def check(case, rank, result, want, non_blocking, cached=False, probs=True):
    rows, row_probs, scales, counts, handle = result
    size = len(want.pairs)
    filled = sum(want.padded)
    assert rows.shape[0] >= size and scales is None and type(handle) is tuple and len(handle) == 11
    assert torch.equal(rows[:filled], want.permuted(case.rows.flatten(0, 1))[:filled])
    if probs:
        assert torch.equal(row_probs[:filled], want.permuted(case.probs.flatten(0, 1), rank * case.local)[:filled])
    else:
        assert row_probs is None
    if cached:
        assert counts is None
    else:
        assert counts.dtype == torch.int64 and counts.tolist() == want.padded
    assert handle[-1].dtype == torch.int32 and handle[-1].tolist() == [want.overflow]
    assert handle[3].tolist() == [len(want.tokens)] and handle[7].tolist() == want.counts and handle[8] == case.tokens
    assert isinstance(handle[9], HybridEpConfigInstance) and handle[9].num_of_experts_per_rank == case.local
    mine = case.map.flatten(0, 1)[:, rank * case.local : (rank + 1) * case.local]
    assert torch.equal(handle[4][: len(want.tokens)], mine[want.tokens])


def there_and_back(group, seeds):
    rank, ranks = group.rank(), group.size()
    buffer = HybridEPBuffer(group, H, 16, 4)
    for seed in seeds:
        choose = random.Random(seed)
        case = Case(ranks, choose.choice([0, 1, 5, 17]), choose.choice([1, 3, 4]), seed, choose.choice([0.0, 0.1, 0.4, 1.0]))
        step = choose.choice([None, 0, 1, 4, 8])
        non_blocking = choose.random() < 0.6
        pad = step or 1
        whole = [Wanted(case, each, pad) for each in range(ranks)]
        budget = None
        if non_blocking:  # of all ranks alike, as programs choose it: some drop, some have room
            most = max(sum(each.padded) for each in whole)
            budget = -(-int(most * choose.choice([0, 0.4, 0.8, 1, 1.5])) // pad) * pad
        wanted = [Wanted(case, each, pad, budget) for each in range(ranks)]
        with_probs = choose.random() < 0.7
        result = buffer.dispatch_with_permute(
            hidden=case.rows[rank], routing_map=case.map[rank], probs=case.probs[rank] if with_probs else None,
            num_permuted_tokens=budget, pad_multiple=step, non_blocking=non_blocking,
        )  # fmt: skip
        check(case, rank, result, wanted[rank], non_blocking, probs=with_probs)
        size = result[0].size(0)
        assert size == (budget if non_blocking else sum(wanted[rank].padded))
        outputs = [output_of(case, each, len(wanted[each].pairs)) for each in range(ranks)]
        rows, row_probs = torch.full((size, H), float("nan"), dtype=torch.bfloat16), torch.full((size,), float("nan"))
        filled = len(wanted[rank].pairs)
        rows[:filled], row_probs[:filled] = outputs[rank]
        want_rows, want_probs = combined(case, rank, wanted, [o[0] for o in outputs], [o[1] for o in outputs])
        for _ in range(2):
            back, back_probs = buffer.combine_with_unpermute(
                hidden=rows, probs=row_probs if with_probs else None, handle=result[4], pad_multiple=step
            )
            assert torch.equal(back, want_rows) and back.dtype == torch.bfloat16
            assert torch.equal(back_probs, want_probs) if with_probs else back_probs is None
        again = Case(ranks, case.tokens, case.local, seed + 1000)
        again.map, again.probs = case.map, case.probs
        size = torch.tensor(sum(wanted[rank].padded)) if choose.random() < 0.5 else sum(wanted[rank].padded)
        cached = buffer.dispatch_with_permute(
            hidden=again.rows[rank], probs=case.probs[rank] if with_probs else None, handle=result[4],
            num_permuted_tokens=size, pad_multiple=step,
        )  # fmt: skip
        check(again, rank, cached, wanted[rank], non_blocking, cached=True, probs=with_probs)


@pytest.mark.parametrize("size", [2, 4])
def test_there_and_back(ranks, size):
    ranks(size).run(there_and_back, list(range(20)))


def selections(group):
    """Selections instead of a map."""
    rank, ranks = group.rank(), group.size()
    buffer = HybridEPBuffer(group, H, 16, 3)
    case = Case(ranks, 9, 3, 5)
    idx = torch.stack([torch.randperm(3 * ranks)[:2] for _ in range(9)])
    weights = torch.rand(9, 2)
    routing_map, dense = indices_to_map(idx, weights, 9, 3 * ranks)
    assert routing_map.sum() == 18 and torch.equal(dense.gather(1, idx), weights) and dense.count_nonzero() == 18
    assert indices_to_map(idx, None, 9, 3 * ranks)[1] is None
    a = buffer.dispatch_with_permute(hidden=case.rows[rank], topk_idx=idx, topk_weights=weights, num_of_experts=3 * ranks)
    b = buffer.dispatch_with_permute(hidden=case.rows[rank], routing_map=routing_map, probs=dense)
    assert all(torch.equal(x, y) for x, y in zip(a[:2], b[:2]))


def test_selections(ranks):
    ranks(3).run(selections)


@on_ranks(2)
def test_growth(group):
    """Calls that are larger than the buffer."""
    rank, ranks = group.rank(), group.size()
    buffer = HybridEPBuffer(
        group=group, hidden_dim=H, max_num_of_tokens_per_rank=16, num_local_experts=2, use_fp8=False, num_sms_dispatch_api=24,
        num_sms_combine_api=24, load_cached_kernels=True, use_shared_buffer=True, enable_custom_allgather=True,
        num_sms_preprocessing_api=32, num_blocks_permute=8, num_blocks_unpermute=8,
    )  # fmt: skip
    assert buffer.group is group
    case = Case(ranks, 6, 2, 3)
    result = buffer.dispatch_with_permute(hidden=case.rows[rank], routing_map=case.map[rank], pad_multiple=4)
    check(case, rank, result, Wanted(case, rank, 4), False, probs=False)
    config = buffer.configurer.buffer_config
    assert config.max_num_of_tokens_per_rank == 512 and config.num_of_experts_per_rank == 2
    for tokens, local in ((600, 2), (600, 40)):  # more experts than a handle has columns
        large = Case(ranks, tokens, local, 4, 0.02)
        first = buffer.dispatch_with_permute(hidden=large.rows[rank], routing_map=large.map[rank])
        check(large, rank, first, Wanted(large, rank), False, probs=False)
        assert config.max_num_of_tokens_per_rank == 640 and config.num_of_experts_per_rank == local
        back, _ = buffer.combine_with_unpermute(hidden=first[0], handle=first[4], fuse_unpermute_combine=False)
        parts = large.map[rank].view(tokens, ranks, local).sum(dim=2)
        whole = sum((large.rows[rank].float() * parts[:, each : each + 1]).to(torch.bfloat16).float() for each in range(ranks))
        assert torch.equal(back, whole.to(torch.bfloat16))
    # A handle from before the buffer grew.
    again = buffer.dispatch_with_permute(hidden=case.rows[rank], handle=result[4], num_permuted_tokens=result[0].size(0))
    assert torch.equal(again[0], result[0])


def check_sums(buffer, rows, idx, **options):
    """Rows go to the experts that ``idx`` names, and come back as they are: a sum of each rank, rounded, then of the ranks."""
    ranks, experts = buffer.group_size, 8
    result = buffer.dispatch_with_permute(hidden=rows, topk_idx=idx, num_of_experts=experts, pad_multiple=4, **options)
    back, _ = buffer.combine_with_unpermute(hidden=result[0], handle=result[4], pad_multiple=4)
    of_rank = [(idx // (experts // ranks) == rank).sum(dim=1, keepdim=True) for rank in range(ranks)]
    assert torch.equal(back, sum((rows.float() * n).bfloat16().float() for n in of_rank).bfloat16())
    return result


@on_ranks(2)
def test_ranks_with_different_numbers_of_tokens(group):
    rank = group.rank()
    buffer = HybridEPBuffer(group, H, (100, 1000)[rank], 4)
    config = buffer.configurer.buffer_config
    assert config.max_num_of_tokens_per_rank == 1024  # on both

    def inputs(tokens):
        generator = torch.Generator().manual_seed(tokens)
        return torch.randn(tokens, H, generator=generator).bfloat16(), torch.rand(tokens, 8, generator=generator).topk(2).indices

    for tokens in ((7, 12), (0, 12), (600, 3), (1, 1)):
        handle = check_sums(buffer, *inputs(tokens[rank]))[4]
        assert handle[8] == tokens[rank] and handle[4].size(0) >= handle[3]
    check_sums(buffer, *inputs((7, 12)[rank]), non_blocking=True, num_permuted_tokens=64, num_of_tokens_per_rank=12)
    check_sums(buffer, *inputs((7, 1100)[rank]), num_of_tokens_per_rank=1100)
    check_sums(buffer, *inputs(3))  # makes the larger buffer
    assert config.max_num_of_tokens_per_rank == buffer._buffer.num_max_tokens_per_rank == 1152
    with pytest.raises(ValueError, match="num_of_tokens_per_rank is 2, allowed: 3 or more"):
        check_sums(buffer, *inputs(3), num_of_tokens_per_rank=2)
    check_sums(buffer, *inputs(3))
    with pytest.raises(RankMismatch, match="maximum of tokens of a rank is (1152|1344) .*give num_of_tokens_per_rank"):
        check_sums(buffer, *inputs((7, 1300)[rank]))


@on_ranks(2)
def test_mistakes(group):
    rank, ranks = group.rank(), group.size()
    buffer = HybridEPBuffer(group, H, 16, 2)
    case = Case(ranks, 6, 2, 3, 1.0)
    for error, text, options in (
        (AssertionError, "num_permuted_tokens is None", dict(non_blocking=True)),
        (AssertionError, "multiple of pad_multiple", dict(non_blocking=True, num_permuted_tokens=30, pad_multiple=4)),
        (ValueError, "routing_map is None", dict(routing_map=None)),
        (ValueError, "routing_map is of shape", dict(routing_map=case.map[rank][1:])),
        (ValueError, "handle is tuple", dict(routing_map=None, handle=(1, 2), num_permuted_tokens=4)),
        (NotImplementedError, "use_fp8 is True", dict(use_fp8=True)),
        (TypeError, "pad_multiple is 2.0", dict(pad_multiple=2.0)),
        (ValueError, "pad_multiple is -4, allowed: 0 or more", dict(pad_multiple=-4)),
        (ValueError, "pad_multiple is 1048577, allowed: at most 1048576", dict(pad_multiple=(1 << 20) + 1)),
    ):
        with pytest.raises(error, match=text):
            buffer.dispatch_with_permute(**{"hidden": case.rows[rank], "routing_map": case.map[rank], **options})
    for error, text, sizes in (
        (TypeError, "hidden_dim is 128.0", (128.0, 16, 2)),
        (ValueError, "hidden_dim is 0, allowed: 1 or more", (0, 16, 2)),
        (ValueError, "max_num_of_tokens_per_rank is -1, allowed: 0 or more", (H, -1, 2)),
        (ValueError, "num_local_experts is 0, allowed: 1 or more", (H, 16, 0)),
    ):
        with pytest.raises(error, match=text):
            HybridEPBuffer(group, *sizes)
    text = "num_local_experts is 0" if rank == 1 else "the arguments of rank 1 are refused, which its own error says"
    with pytest.raises(ValueError, match=text):  # no rank waits for the one
        HybridEPBuffer(group, H, 16, 0 if rank == 1 else 2)
    with pytest.raises(ValueError, match="num_permuted_tokens is 8, allowed: 20 or more"):  # found when rows have come
        buffer.dispatch_with_permute(hidden=case.rows[rank], routing_map=case.map[rank], num_permuted_tokens=8)
    with pytest.raises(RuntimeError, match="a row has more than 32 experts, allowed: at most so many"):
        buffer.dispatch_with_permute(hidden=case.rows[rank], routing_map=torch.ones(6, 34, dtype=torch.bool))
    result = buffer.dispatch_with_permute(hidden=case.rows[rank], routing_map=case.map[rank], use_host_meta=True)
    with pytest.raises(AssertionError, match="num_permuted_tokens"):
        buffer.dispatch_with_permute(hidden=case.rows[rank], handle=result[4])
