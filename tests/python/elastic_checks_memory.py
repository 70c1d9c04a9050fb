"""Checks of memory: what many rounds leave, and results that programs keep."""

import gc

import torch
from elastic_check_parts import K, check


@check()
def memory_of_200_rounds(ranks):
    buffer = ranks.buffer()
    case = ranks.case(70)
    x, idx, weights = (ranks.there(each[ranks.rank]) for each in (case.x, case.topk_idx, case.topk_weights))

    def rounds(number):
        for at in range(number):
            flags = {"async_with_compute_stream": bool(at & 1)}
            rows, _, received, handle, event = buffer.dispatch(
                x, idx, weights, num_experts=case.num_experts, do_expand=bool(at & 2), do_cpu_sync=bool(at & 4), **flags
            )
            with event:
                pass
            _, _, event = buffer.combine(rows, handle, received, **flags)
            with event:
                pass
            buffer.dispatch(x, handle=handle)
        ranks.wait()
        gc.collect()
        free, total = torch.cuda.mem_get_info()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free

    rounds(32)
    before, after = rounds(8), rounds(192)
    growth = [(end - begin) >> 20 for begin, end in zip(before, after)]
    assert max(growth) <= 8, f"MiB more of PyTorch in use, of PyTorch reserved, of the GPU: {growth}"
    buffer.destroy()
    return f"grew by {growth} MiB (in use, reserved, GPU)"


@check()
def many_results_held(ranks):
    """Programs keep what they received: four times the buffer's memory."""
    buffer = ranks.buffer(num_bytes=64 << 20, num_max_tokens_per_rank=2048, hidden=4096)
    x = torch.arange(2048, device=ranks.device).to(torch.bfloat16).unsqueeze(1).expand(-1, 4096).contiguous()
    idx = (torch.arange(2048 * K, device=ranks.device) % (4 * ranks.size)).view(2048, K)
    kept = [buffer.dispatch(x, idx, num_experts=4 * ranks.size) for _ in range(12)]
    for rows, _, _, handle, _ in kept:
        token = handle.recv_src_metadata[:, 0] % 2048
        assert torch.equal(rows, x[token.long()])
    buffer.destroy()
