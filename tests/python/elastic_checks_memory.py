"""Checks of memory: what many rounds leave, and what CUDA graphs of low-latency calls take."""

import gc

import torch
from elastic_check_parts import check

from deep_ep import Buffer


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


def used_bytes():
    """As the GPU sees it, so that a pool of the library's own would show, and of PyTorch."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return torch.tensor([total - free, torch.cuda.memory_reserved()], dtype=torch.int64, device="cpu")


def record(layer, layers, graphs):
    """Memory that recording takes (see used_bytes), and the graphs."""
    recorded, pool = [], None
    before = used_bytes()
    for _ in range(graphs):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            for _ in range(layers):
                layer()
        pool = graph.pool()  # engines share a pool between batch sizes
        recorded.append(graph)
    return (used_bytes() - before).tolist(), recorded


@check()
def low_latency_layers_in_graphs(ranks):
    """Beside what the same graphs take of PyTorch alone; and results dropped before the call that uses them has ended."""
    tokens, hidden, topk, layers, graphs = 128, 7168, 8, 60, 8
    experts = 256 // ranks.size * ranks.size
    rows_shape = (experts // ranks.size, ranks.size * tokens, hidden)
    size = Buffer.get_low_latency_rdma_size_hint(tokens, hidden, ranks.size, experts)
    buffer = Buffer(
        ranks.group, num_rdma_bytes=size, low_latency_mode=True, num_qps_per_rank=experts // ranks.size, explicitly_destroy=True
    )
    with ranks.device:
        x = torch.randn(tokens, hidden).to(torch.bfloat16)
        topk_idx = torch.rand(tokens, experts).topk(topk, dim=1).indices
        weights, out = torch.rand(tokens, topk), torch.empty_like(x)

    def layer():
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, tokens, experts, use_fp8=False)
        combined, _, _ = buffer.low_latency_combine(rows, topk_idx, weights, handle)
        out.copy_(combined)

    def same_of_torch():
        rows = x.new_empty(rows_shape)
        combined = torch.empty_like(x)
        del rows
        out.copy_(combined)

    layer()
    expected = out.clone()
    of_torch, recorded = record(same_of_torch, layers, graphs)
    del recorded
    torch.cuda.empty_cache()
    ours, recorded = record(layer, layers, graphs)
    # Handles and counts are small tables; the sizes of calls do not change what CUDA keeps for the kernels of a graph.
    assert ours[1] <= 1.05 * of_torch[1], (ours, of_torch)
    assert ours[0] <= 1.05 * of_torch[0] + (1 << 17) * graphs * layers, (ours, of_torch)
    out.zero_()
    for graph in recorded:
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected), "a sum of a graph"
    del recorded, graph
    torch.cuda.empty_cache()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for round_ in range(20):
        asynchronous = round_ % 2 == 1  # the dispatch; combine always
        with torch.cuda.stream(side):
            rows, _, handle, event, _ = buffer.low_latency_dispatch(
                x, topk_idx, tokens, experts, use_fp8=False, async_finish=asynchronous
            )
            if asynchronous:
                event.current_stream_wait()
            combined, event, _ = buffer.low_latency_combine(rows, topk_idx, weights, handle, async_finish=True)
            del rows, handle
            x.new_full(rows_shape, float("nan"))
            event.current_stream_wait()
            out.copy_(combined)
            del combined
            x.new_full(rows_shape, float("nan"))
        torch.cuda.synchronize()
        assert torch.equal(out, expected), f"round {round_}: memory was used again too early"
    buffer.destroy()
    return f"{[each >> 20 for each in ours]} MiB (GPU, PyTorch), PyTorch alone {[each >> 20 for each in of_torch]}"
