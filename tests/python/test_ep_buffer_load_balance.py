"""``lb_prefetch_weights`` and ``lb_reduce_grads`` of V2.5 on CPU ranks, and the memory of plans, against plain loops."""

import random

import pytest
import torch
from elastic_cases import H
from test_ep_buffer import make_buffer
from test_errors import Alone, plain_sentence

from deep_ep import BufferAllocator, EPBuffer

MIB = 1 << 20
SENTINEL = 0xA5


def make_mapping(ranks, slots, local_experts, seed, empty=0.3):
    """Each rank's row names experts of others, -1, and numbers that are no expert."""
    draw = random.Random(seed)
    experts = ranks * local_experts
    rows = []
    for rank in range(ranks):
        others = [e for e in range(experts) if e // local_experts != rank]
        row = [draw.choice(others) if draw.random() >= empty else draw.choice((-1, -7, experts, experts + 5)) for _ in range(slots)]
        rows.append([-1] * slots if seed % 4 == 0 and rank == 1 else row)
    return torch.tensor(rows, dtype=torch.int32)


def weights_of(expert, number, count):
    return ((torch.arange(count) + 7 * expert + 3 * number) % 251).to(torch.uint8)


def holder(mapping, rank, slot, local_experts):
    expert = int(mapping[rank, slot])
    return expert if 0 <= expert < mapping.size(0) * local_experts else None


def prefetch(group, sizes, slots, local_experts):
    ranks, rank = group.size(), group.rank()
    with torch.inference_mode():
        plan = BufferAllocator()
        pools = [plan.allocate((slots, size), torch.uint8) for size in sizes]
        unused = plan.allocate((slots, 64), torch.uint8)
        buffer = EPBuffer(group, 2 * MIB, lb_allocation_plan_or_num_bytes=plan, explicitly_destroy=True)
        mine = range(rank * local_experts, (rank + 1) * local_experts)
        own = [torch.stack([weights_of(e, i, size) for e in mine]) for i, size in enumerate(sizes)]
        for seed in range(5):
            mapping = make_mapping(ranks, slots, local_experts, seed)
            storage = buffer.runtime.lb_storage
            storage.fill_(SENTINEL)
            want = storage.clone()
            for i, (pool, size) in enumerate(zip(pools, sizes)):
                at = pool.data_ptr() - storage.data_ptr()
                for slot in range(slots):
                    expert = holder(mapping, rank, slot, local_experts)
                    if expert is not None and (seed < 4 or i == 0):
                        want[at + slot * size : at + (slot + 1) * size] = weights_of(expert, i, size)
            if seed == 1:  # other shapes and types of the same bytes
                event = buffer.lb_prefetch_weights(
                    tuple(pool.unflatten(1, (-1, 2, 8)) for pool in pools),
                    tuple(each.view(torch.float32).unflatten(1, (-1, 4)) for each in own),
                    mapping, num_sms=3, previous_event=buffer.capture(),
                )  # fmt: skip
            elif seed == 4:  # a single tensor; the others are not touched
                event = buffer.lb_prefetch_weights(pools[0], own[0], mapping)
            else:
                event = buffer.lb_prefetch_weights(pools, own, mapping)
            assert event.event is not None and event.wait() is None
            wrong = (storage != want).nonzero()
            assert len(wrong) == 0, f"seed {seed}: {len(wrong)} bytes, the first at {int(wrong[0])}"
        assert (unused == SENTINEL).all()
        kept = pools[0]
        before = kept.clone()
        del storage, plan, unused, pools
        buffer.destroy()
        assert torch.equal(kept, before)  # memory outlives the buffer


@pytest.mark.parametrize("ranks_of, sizes, slots, local_experts", [
    (2, (40032, 4096, 32), 5, 3),
    (4, (8192, 64, 8224), 3, 2),
], ids=str)  # fmt: skip
def test_prefetch(ranks, ranks_of, sizes, slots, local_experts):
    ranks(ranks_of).run(prefetch, sizes, slots, local_experts)


def between_other_calls(group):
    """Between a dispatch and its combine, before a deferred wait, and many times in a row."""
    buffer = make_buffer(group, lb_allocation_plan_or_num_bytes=2 * MIB)
    rank, ranks = buffer.rank_idx, buffer.num_ranks
    pool = buffer.runtime.lb_storage[: 4 * 4096].view(4, 4096)
    own = torch.stack([weights_of(2 * rank + i, 0, 4096) for i in range(2)])
    x = torch.full((5, H), rank + 1, dtype=torch.bfloat16)
    idx = torch.tensor([[0, 2 * ranks - 1]] * 5)
    for seed in (1, 2, 3, 5, 6, 7):  # no empty rows
        mapping = make_mapping(ranks, 4, 2, seed, empty=0)
        rows, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=2 * ranks)
        waits = buffer.dispatch(x, handle=handle, async_with_compute_stream=True, defer_epilogue=True)
        buffer.lb_prefetch_weights(pool, own, mapping).wait()
        again = waits.wait()[0]
        assert torch.equal(rows, again)
        combined = buffer.combine(rows, handle)[0]
        assert torch.equal(combined, 2 * x)
        for slot in range(4):
            assert torch.equal(pool[slot], weights_of(int(mapping[rank, slot]), 0, 4096))


def test_between_other_calls(ranks):
    ranks(2).run(between_other_calls)


def test_without_memory_for_replicas():
    buffer = EPBuffer(Alone, 2 * MIB, explicitly_destroy=True)
    storage = buffer.runtime.lb_storage
    assert buffer.num_lb_bytes == 0 and storage.dtype == torch.uint8 and storage.shape == (0,)
    buffer.destroy()


def test_plan():
    plan = BufferAllocator()
    small, words, nothing = plan.allocate((3, 5), torch.float32), plan.allocate((), torch.int64), plan.allocate((0, 7), torch.bool)
    last = plan.allocate((2, 1 << 20), torch.bfloat16)
    assert all(each.is_meta for each in (small, words, nothing, last)) and not plan.materialized
    assert [at >> 20 for _, at in plan.allocations] == [0, 2, 4, 4] and plan.num_bytes == 8 << 20
    kept = [{"weights": last}]
    buffer = EPBuffer(Alone, 2 << 20, lb_allocation_plan_or_num_bytes=plan, explicitly_destroy=True)
    assert buffer.num_bytes == 2 << 20 and buffer.num_lb_bytes == 8 << 20
    storage = buffer.runtime.lb_storage
    assert storage.dtype == torch.uint8 and storage.shape == (plan.num_bytes,) and plan.materialized
    assert kept[0]["weights"] is last and not last.is_meta and last.shape == (2, 1 << 20) and words.shape == ()
    assert small.data_ptr() == storage.data_ptr() and last.data_ptr() == storage.data_ptr() + (4 << 20)
    last.fill_(3)
    small.fill_(1)
    assert (storage[4 << 20 :].view(torch.bfloat16) == 3).all()
    del storage
    buffer.destroy()
    assert (last == 3).all() and (small == 1).all()
    for mistake in (
        lambda: plan.allocate((1,), torch.int8),
        lambda: plan.materialize(torch.empty(8 << 20, dtype=torch.uint8)),
        lambda: EPBuffer(Alone, 2 << 20, lb_allocation_plan_or_num_bytes=plan),
    ):
        with pytest.raises(AssertionError, match="has been given to a buffer"):
            mistake()
    with pytest.raises(ValueError, match=r"storage is .* allowed: contiguous torch.uint8 of shape \(0,\)"):
        BufferAllocator().materialize(torch.empty(1))
    nothing_planned = BufferAllocator()
    EPBuffer(Alone, 2 << 20, lb_allocation_plan_or_num_bytes=nothing_planned)
    assert nothing_planned.materialized


def test_wrong_use():
    buffer = EPBuffer(Alone, 2 * MIB, lb_allocation_plan_or_num_bytes=2 * MIB)
    pool = buffer.runtime.lb_storage[:4096].view(2, 2048)
    own, mapping = torch.zeros(3, 2048, dtype=torch.uint8), torch.full((1, 2), -1, dtype=torch.int32)
    grads = buffer.runtime.lb_storage[4096:8192].view(torch.float32).view(2, 512)
    sums = torch.zeros(3, 512)
    push, pull = buffer.lb_prefetch_weights, buffer.lb_reduce_grads
    assert buffer.lb_get_theoretical_num_sms() == 16
    push(pool, own, mapping).wait()
    pull(grads, sums, mapping).wait()
    # What the library checks is tested in C++ (buffer/load_balance).
    calls = [
        (RuntimeError, "has 2 tensors and expert_weights 1, allowed: equally many, 1 to 16", lambda: push([pool, pool], own, mapping)),
        (TypeError, r"expert_weights\[1\] is of type NoneType", lambda: push([pool, pool], [own, None], mapping)),
        (TypeError, "redundant_expert_weights is of type NoneType", lambda: push(None, own, mapping)),
        (RuntimeError, r"redundant_expert_weights\[0\] is torch.uint8 of shape", lambda: push(pool[:, ::2], own, mapping)),
        (RuntimeError, r"expert_weights\[0\] is torch.uint8 of shape \(0, 4\)", lambda: push(pool, own[:0, :4], mapping)),
        (RuntimeError, r"redundant_expert_weights\[0\] does not lie in the heap", lambda: push(pool.clone(), own, mapping)),
        (RuntimeError, "redundancy_mapping is torch.int64", lambda: push(pool, own, mapping.long())),
        (RuntimeError, "num_sms is -2, allowed: 0 or more", lambda: push(pool, own, mapping, num_sms=-2)),
        (TypeError, "previous_event is of type int", lambda: push(pool, own, mapping, previous_event=3)),
        (RuntimeError, "redundant_expert_grads is torch.uint8", lambda: pull(pool, sums, mapping)),
        (RuntimeError, "expert_grads is torch.bfloat16", lambda: pull(grads, sums.bfloat16(), mapping)),
    ]  # fmt: skip
    for kind, text, call in calls:
        with pytest.raises(kind, match=text) as raised:
            call()
        plain_sentence(str(raised.value))
    push(pool, own, mapping).wait()
