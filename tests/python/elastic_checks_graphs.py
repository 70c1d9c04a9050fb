"""Checks of CUDA graphs: calls recorded and replayed, and their memory."""

import elastic_reference as reference
import torch
from elastic_cases import check_rows
from elastic_check_parts import H, K, M, check, on_host, recorded_graph
from normal_mode import equal


def recorded(ranks, buffer, expand, asynchronous):
    """A graph of dispatch, copies of what came, and combine; inputs and outputs to write and read."""
    x = torch.zeros(M, H, dtype=torch.bfloat16, device=ranks.device)
    idx = torch.full((M, K), -1, dtype=torch.int64, device=ranks.device)
    weights = torch.zeros(M, K, device=ranks.device)
    experts = 4 * ranks.size
    options = {"num_experts": experts, "expert_alignment": 8, "do_cpu_sync": False, "do_expand": expand}
    y = torch.zeros_like(buffer.dispatch(x, idx, weights, **options)[0])
    flags = {"async_with_compute_stream": asynchronous}

    def step():
        rows, local, received, handle, event = buffer.dispatch(x, idx, weights, **options, **flags)
        with event:
            pass
        combined, back, event = buffer.combine(y, handle, received, **flags)
        with event:
            pass
        return rows.clone(), None if local is None else local.clone(), received.clone(), combined, back

    graph, outputs = recorded_graph(step)
    return graph, (x, idx, weights, y), outputs


def replayed(ranks, graph, inputs, outputs, seed, expand):
    case = ranks.case(seed, tokens=M)
    want = reference.expected(case, ranks.rank, M, 8)
    rows, values = reference.input_of_combine(case, want, M, expand, H, seed)
    for tensor, each in zip(inputs, (case.x, case.topk_idx, case.topk_weights)):
        tensor.copy_(each[ranks.rank])
    inputs[3].copy_(reference.padded(rows, inputs[3].size(0)))
    graph.replay()
    ranks.wait()
    check_rows(want, on_host(outputs[:3]), expand)
    equal(outputs[3].cpu(), reference.combined(case, ranks.rank, (), **values), "combined rows of the graph")
    equal(outputs[4].cpu(), reference.kept_weights(case, ranks.rank), "combined weights of the graph")


@check()
def graph_replays_with_new_data(ranks):
    buffer = ranks.buffer()
    for expand in (False, True):
        for asynchronous in (False, True):
            graph, inputs, outputs = recorded(ranks, buffer, expand, asynchronous)
            for seed in (50, 51, 52):
                replayed(ranks, graph, inputs, outputs, seed, expand)
            del graph
    buffer.destroy()


@check()
def a_graph_before_and_after_a_sleep(ranks):
    """The GPU has the heap's memory meanwhile, half of what the buffer was made with."""
    buffer = ranks.buffer(num_bytes=512 << 20)
    graph, inputs, outputs = recorded(ranks, buffer, True, False)
    replayed(ranks, graph, inputs, outputs, 1, True)
    freed = []
    for seed in (2, 3):
        ranks.wait()
        before = torch.cuda.mem_get_info()[0]
        buffer.suspend()
        freed.append((torch.cuda.mem_get_info()[0] - before) >> 20)
        buffer.resume()
        replayed(ranks, graph, inputs, outputs, seed, True)
    assert min(freed) >= 256, f"MiB that suspend gave back: {freed}"
    del graph
    buffer.destroy()
    return f"{freed} MiB given back"


@check()
def graphs_give_their_memory_back(ranks):
    """Calls of a graph that is gone, and layers of one that is not, must not fill the buffer."""
    buffer = ranks.buffer(num_bytes=64 << 20, num_max_tokens_per_rank=1024, hidden=4096)
    x = torch.ones(1024, 4096, dtype=torch.bfloat16, device=ranks.device)
    idx = (torch.arange(1024 * K, device=ranks.device) % (4 * ranks.size)).view(1024, K)

    def layer():
        rows, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=4 * ranks.size, do_cpu_sync=False)
        return buffer.combine(rows, handle)[0]

    wanted = layer().clone()
    for layers in (1, 12):
        for _ in range(8):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(layers):
                    last = layer()
            graph.replay()
            ranks.wait()
            assert torch.equal(last, wanted), "rows of a graph"
            del graph, last
    assert torch.equal(layer(), wanted)
    buffer.destroy()
