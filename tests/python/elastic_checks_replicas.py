"""Checks of replicas of experts: calls recorded into a CUDA graph."""

import torch
from elastic_check_parts import check, recorded_graph
from normal_mode import equal

from deep_ep import BufferAllocator, EPBuffer

SLOTS, EXPERTS, BYTES = 4, 2, 1 << 20  # slots and own experts of a rank, bytes of an expert


def rows_of(values, like):
    return values.to(like.device, like.dtype).unsqueeze(1).expand_as(like).contiguous()


@check()
def replicas_in_a_graph(ranks):
    """Slot s of rank r holds expert r + s + step of all, but for one that is empty, and gradients r + s + 1."""
    plan = BufferAllocator()
    slots, grads = plan.allocate((SLOTS, BYTES), torch.uint8), plan.allocate((SLOTS, BYTES // 4), torch.float32)
    buffer = EPBuffer(ranks.group, 2 << 20, lb_allocation_plan_or_num_bytes=plan, explicitly_destroy=True)
    places = torch.arange(ranks.size).unsqueeze(1) + torch.arange(SLOTS)
    mapping = ranks.there(torch.full_like(places, -1, dtype=torch.int32))
    own, sums = (ranks.there(torch.zeros(EXPERTS, *each.shape[1:], dtype=each.dtype)) for each in (slots, grads))

    def step():
        buffer.lb_prefetch_weights(slots, own, mapping).wait()
        buffer.lb_reduce_grads(grads, sums, mapping).wait()

    graph, _ = recorded_graph(step)
    grads.copy_(rows_of(places[ranks.rank] + 1, grads))
    mine = torch.arange(EXPERTS) + ranks.rank * EXPERTS
    for number in range(1, 5):
        experts = (places + number) % (ranks.size * EXPERTS)
        experts[:, number % SLOTS] = -1
        mapping.copy_(experts)
        own.copy_(rows_of(mine + 10 * number, own))
        slots.fill_(200)
        sums.fill_(7)
        graph.replay()
        held = torch.where(experts < 0, 200, experts + 10 * number)[ranks.rank]
        equal(slots, rows_of(held, slots), f"slots in step {number}")
        added = torch.stack([(places + 1)[experts == expert].sum() + 7 for expert in mine])
        equal(sums, rows_of(added, sums), f"sums in step {number}")
        buffer.barrier()  # replays overwrite what the checks read
    del graph
    buffer.destroy()
