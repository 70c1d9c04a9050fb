"""What test_intranode.py and test_internode.py do on GPUs only: CUDA graphs."""

import torch
from normal_mode import make_inputs, print_once


def run_graphs(args, rank, num_ranks, buffer, config, mode):
    """Layout, dispatch of worst-case size and combine in a CUDA graph, replayed with other data each time."""
    print_once(rank, "[testing] Running in CUDA graphs ...", end="")
    worst = args.num_tokens * num_ranks
    x = torch.empty((args.num_tokens, args.hidden), dtype=torch.bfloat16)
    topk_idx, topk_weights, *_ = make_inputs(args, rank, num_ranks, mode.limit)

    def step(num_worst_tokens):
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, args.num_experts)
        recv, recv_idx, recv_weights, _, handle, _ = buffer.dispatch(
            x, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert, topk_idx=topk_idx, topk_weights=topk_weights,
            num_worst_tokens=num_worst_tokens, config=config,
        )  # fmt: skip
        again = buffer.dispatch(x, handle=handle, config=config)[0]
        back, back_weights, _ = buffer.combine(again, handle, recv_weights, config=config)
        return recv, recv_idx, back, back_weights

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.fill_(1)
        step(worst)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        recv, recv_idx, back, back_weights = step(worst)
    for replay in range(10):
        torch.manual_seed(1000 * replay + rank)
        x.normal_()
        topk_idx.copy_(make_inputs(args, rank, num_ranks, mode.limit)[0])
        topk_weights.uniform_()
        graph.replay()
        wanted, wanted_idx, wanted_back, wanted_weights = step(0)
        rows = wanted.size(0)
        assert torch.equal(recv[:rows], wanted) and torch.equal(recv_idx[:rows], wanted_idx)
        assert (recv_idx[rows:] == -1).all()
        assert torch.equal(back, wanted_back) and torch.equal(back_weights, wanted_weights)
    print_once(rank, " passed\n")
