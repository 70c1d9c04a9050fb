"""Checks of sizes that programs have, with times."""

import torch
from elastic_check_parts import SPIN, check


def milliseconds(call, runs=5):
    for _ in range(2):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SPIN // 10)
    begin.record()
    for _ in range(runs):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / runs


def shape(ranks, tokens, hidden, topk, experts):
    buffer = ranks.buffer(num_max_tokens_per_rank=tokens, hidden=hidden, num_topk=topk)
    generator = torch.Generator(device="cuda").manual_seed(ranks.rank)
    x = torch.randn(tokens, hidden, generator=generator, device="cuda").to(torch.bfloat16)
    idx = torch.rand(tokens, experts, generator=generator, device="cuda").topk(topk, dim=1).indices
    weights = torch.rand(tokens, topk, generator=generator, device="cuda")
    owners = torch.div(idx, experts // ranks.size, rounding_mode="floor")
    times = {}
    for expand in (False, True):
        for cpu_sync in (True, False):
            options = {"num_experts": experts, "do_expand": expand, "do_cpu_sync": cpu_sync}
            rows, _, received, handle, _ = buffer.dispatch(x, idx, weights, **options)
            combined, back, _ = buffer.combine(rows, handle, received)
            if expand:  # on each rank the copies of a token are added and rounded
                parts = [x.float() * (owners == q).sum(dim=1, keepdim=True) for q in range(ranks.size)]
                wanted = sum(part.to(torch.bfloat16).float() for part in parts).to(torch.bfloat16)
                close = (combined.float() - wanted.float()).abs() <= 0.02 * wanted.float().abs()
                assert bool(close.all()), "combined expanded rows"
            else:
                copies = sum((owners == q).any(dim=1, keepdim=True).float() for q in range(ranks.size))
                assert torch.equal(combined, (x.float() * copies).to(torch.bfloat16)) or ranks.size > 4, "combined rows"
            assert torch.equal(back, weights), "combined weights"
            name = ("expanded" if expand else "plain") + (", host wait" if cpu_sync else "")
            times[f"dispatch {name}"] = milliseconds(lambda: buffer.dispatch(x, idx, weights, **options))
            times[f"combine {name}"] = milliseconds(lambda: buffer.combine(rows, handle))
            if cpu_sync:
                times[f"cached {name}"] = milliseconds(lambda: buffer.dispatch(x, handle=handle, do_expand=expand))
            del rows, received, handle, combined, back
    buffer.destroy()
    return "us: " + "; ".join(f"{name} {1e3 * value:.0f}" for name, value in times.items())


@check()
def shape_128_tokens(ranks):
    return shape(ranks, 128, 7168, 8, 256)


@check()
def shape_4096_tokens(ranks):
    return shape(ranks, 4096, 7168, 8, 256)


@check()
def shape_8192_tokens(ranks):
    return shape(ranks, 8192, 7168, 6, 256)
