"""What test_intranode.py and test_internode.py share: inputs, and every combination of options, checked; CUDA graphs on GPUs."""

import itertools

import torch
import torch.distributed as dist
from common import GPU

import deep_ep
from deep_ep.utils.exchange import all_reduce
from deep_ep.utils.math import calc_diff, per_token_cast_back, per_token_cast_to_fp8


def print_once(rank, text, end="\n"):
    if rank == 0:
        print(text, end=end, flush=True)


def make_inputs(args, rank, num_ranks, limit=lambda scores: scores):
    """Random routing, scores with weights equal to the rank, and the layout as plain PyTorch counts it."""
    tokens, experts = args.num_tokens, args.num_experts
    scores = limit(torch.randn((tokens, experts), dtype=torch.float32).abs() + 1)
    topk_idx = torch.topk(scores, args.num_topk, dim=-1, sorted=False)[1].to(deep_ep.topk_idx_t)
    topk_weights = torch.full((tokens, args.num_topk), float(rank), dtype=torch.float32)
    per_expert = torch.bincount(topk_idx.flatten(), minlength=experts).to(torch.int32)
    in_rank = torch.zeros((tokens, num_ranks), dtype=torch.bool)
    in_rank.scatter_(1, topk_idx // (experts // num_ranks), True)
    return topk_idx, topk_weights, in_rank.sum(dim=0).to(torch.int32), per_expert, in_rank


def check_constant_rows(rows, ends, rank_of_block=lambda i: i):
    """Each row is constant, and equals the rank that it comes from."""
    assert torch.equal(rows.amin(dim=1), rows.amax(dim=1))
    begin = 0
    for i, end in enumerate(ends):
        assert (rows[begin:end] == rank_of_block(i)).all(), f"rows {begin} to {end} are not of rank {i}"
        begin = end


class InsideANode:
    """What the cases of one node and those of several do differently: here, one node."""

    def limit(self, scores):
        """Scores of which the top k are chosen."""
        return scores

    def check_layout(self, per_node, in_rank):
        assert per_node is None

    def rows(self, x, x_rank):
        """(what is sent, what it stands for, whether each row is its rank)"""
        return [(x, x, False), (x_rank, x_rank, True), (column_major(per_token_cast_to_fp8(x_rank)), x_rank, True)]

    def ends(self, handle, rank, num_ranks):
        return [handle[0][i][rank].item() for i in range(num_ranks)]

    def biases(self, x):
        return None


def column_major(fp8):
    return fp8[0], fp8[1].T.contiguous().T


def run_cases(args, rank, num_ranks, group, buffer, config, mode):
    print_once(rank, f"[config] {args}, {num_ranks} ranks on {'GPUs' if GPU else 'the CPU'}")
    torch.manual_seed(rank)
    tokens, hidden = args.num_tokens, args.hidden
    local_experts = args.num_experts // num_ranks
    topk_idx, topk_weights, per_rank, per_expert, in_rank = make_inputs(args, rank, num_ranks, mode.limit)
    global_per_rank, global_per_expert = per_rank.clone(), per_expert.clone()
    all_reduce(global_per_rank, group)
    all_reduce(global_per_expert, group)
    expected_rows = global_per_rank[rank].item()
    expected_counts = global_per_expert.view(num_ranks, -1)[rank].tolist()

    counted = buffer.get_dispatch_layout(topk_idx, args.num_experts)
    mode.check_layout(counted[1], in_rank)
    for each, wanted in zip((counted[0], *counted[2:4]), (per_rank, per_expert, in_rank)):
        assert torch.allclose(each, wanted)
    dist.barrier(group)

    x = torch.randn((tokens, hidden), dtype=torch.bfloat16)
    x_rank = torch.full((tokens, hidden), float(rank), dtype=torch.bfloat16)
    handle, bias = None, mode.biases(x)
    layout = dict(num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert)
    for previous, asynchronous, (rows, original, constant), with_topk in itertools.product(
        (False, True), (False, True), mode.rows(x, x_rank), (False, True)
    ):
        kind, topk = "FP8" if isinstance(rows, tuple) else "BF16", "with" if with_topk else "without"
        text = f"[testing] Running with {kind}, {topk} top-k (async={asynchronous}, previous={previous}) ..."
        print_once(rank, text, end="")

        def call(function, given, **options):
            """Results but for the event, which is waited for; rows as bfloat16."""
            stream = {"async_finish": asynchronous, **({"previous_event": buffer.capture()} if previous else {})}
            first, *others, event = function(given, config=config, **options, **stream)
            if asynchronous:
                event.current_stream_wait()
            return per_token_cast_back(*first) if isinstance(first, tuple) else first, *others

        arguments = {**layout, **(dict(topk_idx=topk_idx, topk_weights=topk_weights) if with_topk else {})}
        recv, recv_idx, recv_weights, counts, handle = call(buffer.dispatch, rows, **arguments)
        ends = mode.ends(handle, rank, num_ranks)
        assert recv.size(0) == expected_rows == ends[-1] and counts == expected_counts
        if constant:
            check_constant_rows(recv, ends)
        if with_topk:
            selected = recv_idx != -1
            assert ((recv_idx >= -1) & (recv_idx < local_experts)).all()
            assert [(recv_idx == e).sum().item() for e in range(local_experts)] == counts
            assert (recv_weights[~selected] == 0).all()
            if constant:
                check_constant_rows(torch.where(selected, recv_weights, recv_weights.amax(dim=1, keepdim=True)), ends)

            # The same with outputs of a fixed size, without waiting for the counts.
            worst = tokens * num_ranks
            *fixed, nothing, _ = call(buffer.dispatch, rows, num_worst_tokens=worst, **arguments)
            assert nothing == [] and all(len(each) == worst for each in fixed)
            for each, exact in zip(fixed, (recv, recv_idx, recv_weights)):
                assert torch.equal(each[:expected_rows], exact)
            assert (fixed[1][expected_rows:] == -1).all()
        else:
            cached, *none = call(buffer.dispatch, rows, handle=handle)
            assert torch.equal(cached, recv) and none == [None] * 4

        back, back_weights = call(buffer.combine, recv, handle=handle, topk_weights=recv_weights, bias=bias)
        back = back.float() - sum(term.float() for term in bias or ())
        copies = in_rank.sum(dim=1).unsqueeze(1)
        limit = 5e-4 if rows is not x and not constant else 5e-6  # 8 bits of random numbers
        assert calc_diff(back / copies, original) < limit
        if with_topk:
            assert calc_diff(back_weights, topk_weights) < 1e-9
        print_once(rank, " passed")
    print_once(rank, "")
    if GPU:
        run_graphs(args, rank, num_ranks, buffer, config, mode)


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
