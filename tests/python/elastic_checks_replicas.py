"""Checks of replicas of experts: calls recorded into a CUDA graph."""

import torch
from elastic_check_parts import check, recorded_graph

from deep_ep import BufferAllocator, EPBuffer

SLOTS, EXPERTS, BYTES = 4, 2, 1 << 20  # slots and own experts of a rank, bytes of an expert


def make(ranks):
    """A buffer, slots for weights and for gradients."""
    plan = BufferAllocator()
    slots, grads = plan.allocate((SLOTS, BYTES), torch.uint8), plan.allocate((SLOTS, BYTES // 4), torch.float32)
    buffer = EPBuffer(ranks.group, 2 << 20, lb_allocation_plan_or_num_bytes=plan, explicitly_destroy=True)
    return buffer, slots, grads


def mapping_of(ranks, step):
    """Slot s of rank r holds expert r + s + step of all, but for one that is empty."""
    rank, slot = torch.arange(ranks.size).unsqueeze(1), torch.arange(SLOTS)
    mapping = (rank + slot + step) % (ranks.size * EXPERTS)
    mapping[:, step % SLOTS] = -1
    return mapping.to(torch.int32)


def weights_of(ranks, step):
    first = ranks.rank * EXPERTS
    return torch.tensor([[first + i + 10 * step + 1] for i in range(EXPERTS)]).expand(-1, BYTES).to(torch.uint8).contiguous()


def check_slots(ranks, slots, step, empty):
    for slot, expert in enumerate(mapping_of(ranks, step)[ranks.rank].tolist()):
        want = empty if expert < 0 else expert + 10 * step + 1
        assert (slots[slot] == want).all(), f"slot {slot} in step {step}: not {want} everywhere"


def check_sums(ranks, sums, step, before):
    for local in range(EXPERTS):
        want = before
        for rank, row in enumerate(mapping_of(ranks, step).tolist()):
            want += sum(rank + slot + 1 for slot, expert in enumerate(row) if expert == ranks.rank * EXPERTS + local)
        assert (sums[local] == want).all(), f"expert {local} in step {step}: not {want} everywhere"


def fill_grads(ranks, grads):
    for slot in range(SLOTS):
        grads[slot].fill_(ranks.rank + slot + 1)


@check()
def replicas_in_a_graph(ranks):
    buffer, slots, grads = make(ranks)
    mapping, own = ranks.there(mapping_of(ranks, 0)), ranks.there(weights_of(ranks, 0))
    sums = torch.zeros(EXPERTS, BYTES // 4, device=ranks.device)

    def step():
        buffer.lb_prefetch_weights(slots, own, mapping).wait()
        buffer.lb_reduce_grads(grads, sums, mapping).wait()

    graph, _ = recorded_graph(step)
    for number in range(1, 5):
        mapping.copy_(mapping_of(ranks, number))
        own.copy_(weights_of(ranks, number))
        slots.fill_(200)
        fill_grads(ranks, grads)
        sums.fill_(7.0)
        graph.replay()
        check_slots(ranks, slots, number, 200)
        check_sums(ranks, sums, number, 7.0)
        buffer.barrier()  # replays overwrite what the checks read
    del graph
    buffer.destroy()
