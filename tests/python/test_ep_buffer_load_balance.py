"""``lb_prefetch_weights`` and ``lb_reduce_grads`` of V2.5 on CPU ranks, and the memory of plans, against plain loops."""

import pytest
import torch
from cluster import on_ranks
from elastic_cases import H
from test_ep_buffer import make_buffer
from test_errors import Alone, refused

from deep_ep import BufferAllocator, EPBuffer

MIB = 1 << 20


@on_ranks(2)
def test_several_tensors(group):
    """Lists of tensors of other shapes and types than the slots', and a single one; between other calls, and for longer than the
    buffer. Values: elastic_checks_replicas.py, and in C++ (buffer/load_balance)."""
    ranks, rank, sizes = group.size(), group.rank(), (4096, 64, 8224)
    plan = BufferAllocator()
    pools = [plan.allocate((2, size), torch.uint8) for size in sizes]
    buffer = make_buffer(group, lb_allocation_plan_or_num_bytes=plan, explicitly_destroy=True)
    own = [torch.full((2, size), 10 * rank + i, dtype=torch.uint8) for i, size in enumerate(sizes)]
    mapping = torch.tensor([[2 * ((each + 1) % ranks), -1] for each in range(ranks)], dtype=torch.int32)
    x, idx = torch.full((5, H), rank + 1, dtype=torch.bfloat16), torch.tensor([[0, 2 * ranks - 1]] * 5)
    rows, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=2 * ranks)
    waits = buffer.dispatch(x, handle=handle, async_with_compute_stream=True, defer_epilogue=True)
    event = buffer.lb_prefetch_weights(
        tuple(pool.unflatten(1, (-1, 2, 8)) for pool in pools), tuple(each.view(torch.float32).unflatten(1, (-1, 4)) for each in own),
        mapping, num_sms=3, previous_event=buffer.capture(),
    )  # fmt: skip
    assert event.event is not None and event.wait() is None
    assert torch.equal(waits.wait()[0], rows) and torch.equal(buffer.combine(rows, handle)[0], 2 * x)
    for i, pool in enumerate(pools):
        assert (pool[0] == 10 * ((rank + 1) % ranks) + i).all() and (pool[1] == 0).all()
    buffer.lb_prefetch_weights(pools[0], own[0] + 1, mapping).wait()
    kept = pools[0]
    del plan, pools
    buffer.destroy()
    assert (kept[0] == 10 * ((rank + 1) % ranks) + 1).all()


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
    buffer = EPBuffer(Alone, 2 << 20, lb_allocation_plan_or_num_bytes=nothing_planned)
    assert nothing_planned.materialized and buffer.num_lb_bytes == 0 and buffer.runtime.lb_storage.shape == (0,)


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
    # Checks of the library have tests in C++ (buffer/load_balance).
    refused(
        (RuntimeError, "has 2 tensors and expert_weights 1, allowed: equally many, 1 to 16", lambda: push([pool, pool], own, mapping)),
        (TypeError, "expert_weights is of type NoneType", lambda: push([pool, pool], [own, None], mapping)),
        (TypeError, "redundant_expert_weights is of type NoneType", lambda: push(None, own, mapping)),
        (RuntimeError, r"redundant_expert_weights\[0\] is .*contiguous", lambda: push(pool[:, ::2], own, mapping)),
        (RuntimeError, r"expert_weights\[1\] is torch.bfloat16 of shape \(3, 512\) and strides \(1024, 2\), allowed: contiguous",
         lambda: push([pool, pool], [own, own.view(torch.bfloat16)[:, ::2]], mapping)),
        (RuntimeError, r"expert_weights\[0\] is .*contiguous", lambda: push(pool, own.view(3, 2, 1024).transpose(1, 2), mapping)),
        (RuntimeError, r"redundant_expert_weights\[0\] is .* of shape \(\)", lambda: push(pool[0, 0], own, mapping)),
        (RuntimeError, r"experts in expert_weights\[0\] is 0", lambda: push(pool, own[:0, :4], mapping)),
        (RuntimeError, r"redundant_expert_weights\[0\] does not lie in the heap", lambda: push(pool.clone(), own, mapping)),
        (RuntimeError, "redundancy_mapping has dtype int64", lambda: push(pool, own, mapping.long())),
        (RuntimeError, "num_sms is -2, allowed: 0 or more", lambda: push(pool, own, mapping, num_sms=-2)),
        (TypeError, "previous_event is of type int", lambda: push(pool, own, mapping, previous_event=3)),
        (RuntimeError, "redundant_expert_grads has dtype uint8", lambda: pull(pool, sums, mapping)),
        (RuntimeError, "expert_grads has dtype bfloat16", lambda: pull(grads, sums.bfloat16(), mapping)),
    )  # fmt: skip
    push(pool, own, mapping).wait()
