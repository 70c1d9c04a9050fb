"""What test_intranode.py and test_internode.py share: inputs, and every combination of options, checked."""

import torch
import torch.distributed as dist

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
    torch.manual_seed(rank)
    tokens, hidden = args.num_tokens, args.hidden
    local_experts = args.num_experts // num_ranks
    topk_idx, topk_weights, per_rank, per_expert, in_rank = make_inputs(args, rank, num_ranks, mode.limit)
    global_per_rank, global_per_expert = per_rank.clone(), per_expert.clone()
    all_reduce(global_per_rank, group)
    all_reduce(global_per_expert, group)
    expected_rows = global_per_rank[rank].item()
    expected_counts = global_per_expert.view(num_ranks, -1)[rank].tolist()

    layout = buffer.get_dispatch_layout(topk_idx, args.num_experts)
    assert torch.allclose(layout[0], per_rank)
    mode.check_layout(layout[1], in_rank)
    assert torch.allclose(layout[2], per_expert) and torch.allclose(layout[3], in_rank)
    dist.barrier(group)

    x = torch.randn((tokens, hidden), dtype=torch.bfloat16)
    x_rank = torch.full((tokens, hidden), float(rank), dtype=torch.bfloat16)
    handle, bias = None, mode.biases(x)
    for previous in (False, True):
        for asynchronous in (False, True):
            for rows, original, constant in mode.rows(x, x_rank):
                for with_topk in (False, True):
                    kind = "FP8" if isinstance(rows, tuple) else "BF16"
                    topk = "with" if with_topk else "without"
                    print_once(
                        rank,
                        f"[testing] Running with {kind}, {topk} top-k (async={asynchronous}, previous={previous}) ...",
                        end="",
                    )
                    stream = {"async_finish": asynchronous}
                    if previous:
                        stream["previous_event"] = buffer.capture()
                    arguments = dict(
                        num_tokens_per_rank=per_rank,
                        is_token_in_rank=in_rank,
                        num_tokens_per_expert=per_expert,
                        config=config,
                    )
                    if with_topk:
                        arguments.update(topk_idx=topk_idx, topk_weights=topk_weights)
                    recv, recv_idx, recv_weights, counts, handle, event = buffer.dispatch(rows, **arguments, **stream)
                    if asynchronous:
                        event.current_stream_wait()
                    recv = per_token_cast_back(*recv) if isinstance(recv, tuple) else recv

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
                            check_constant_rows(
                                torch.where(selected, recv_weights, recv_weights.amax(dim=1, keepdim=True)), ends
                            )

                        # The same with outputs of a fixed size, without waiting for the counts.
                        worst = tokens * num_ranks
                        worst_recv, worst_idx, worst_weights, nothing, _, event = buffer.dispatch(
                            rows, num_worst_tokens=worst, **arguments, **stream
                        )
                        if asynchronous:
                            event.current_stream_wait()
                        worst_recv = per_token_cast_back(*worst_recv) if isinstance(worst_recv, tuple) else worst_recv
                        assert nothing == [] and len(worst_recv) == len(worst_idx) == len(worst_weights) == worst
                        assert torch.equal(worst_recv[:expected_rows], recv)
                        assert torch.equal(worst_idx[:expected_rows], recv_idx)
                        assert torch.equal(worst_weights[:expected_rows], recv_weights)
                        assert (worst_idx[expected_rows:] == -1).all()
                    else:
                        if previous:
                            stream["previous_event"] = buffer.capture()
                        cached, *none, event = buffer.dispatch(rows, handle=handle, config=config, **stream)
                        if asynchronous:
                            event.current_stream_wait()
                        cached = per_token_cast_back(*cached) if isinstance(cached, tuple) else cached
                        assert torch.equal(cached, recv) and none == [None] * 4

                    if previous:
                        stream["previous_event"] = buffer.capture()
                    back, back_weights, event = buffer.combine(
                        recv, handle, recv_weights, bias=bias, config=config, **stream
                    )
                    if asynchronous:
                        event.current_stream_wait()
                    back = back.float() - sum(term.float() for term in bias or ())
                    copies = in_rank.sum(dim=1).unsqueeze(1)
                    limit = 5e-4 if rows is not x and not constant else 5e-6  # 8 bits of random numbers
                    assert calc_diff(back / copies, original) < limit
                    if with_topk:
                        assert calc_diff(back_weights, topk_weights) < 1e-9
                    print_once(rank, " passed")
    print_once(rank, "")
