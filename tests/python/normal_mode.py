"""Calls of the normal mode, against reference.py; and what test_intranode.py and test_internode.py share: every combination of
options, and CUDA graphs on GPUs."""

import dataclasses
import itertools

import reference
import torch
from common import GPU
from elastic_check_parts import recorded_graph
from reference import make_case

import deep_ep
from deep_ep.utils.math import align, per_token_cast_to_fp8


CONFIG = deep_ep.Config(4)


def equal(actual, expected, what):
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape}, expected {expected.shape}"
    assert torch.equal(actual, expected), f"{what}: {actual}, expected {expected}"


def send(buffer, case, x=None, topk=True, config=CONFIG, **options):
    """Layout, which is compared with the reference, and dispatch."""
    rank = buffer.rank
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(case.topk_idx[rank], case.num_experts)
    assert event.event is None
    expected = reference.layout(case, rank)
    for actual, wanted, what in zip((per_rank, per_expert, in_rank), expected, ("per rank", "per expert", "in rank")):
        equal(actual, wanted, f"layout, {what}")
    nodes = buffer._num_nodes
    of_nodes = expected[2].view(len(in_rank), nodes, case.num_ranks // nodes).any(dim=2).sum(dim=0).to(torch.int32)
    assert per_node is None if nodes == 1 else torch.equal(per_node, of_nodes)
    if topk:
        options.update(topk_idx=case.topk_idx[rank], topk_weights=case.topk_weights[rank])
    return buffer.dispatch(
        case.x[rank] if x is None else x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        config=config,
        **options,
    )


def send_rows(buffer, x, idx, weights, num_experts, **options):
    """Layout and dispatch of this rank's tensors."""
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, num_experts)
    return buffer.dispatch(
        x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=idx,
        topk_weights=weights, **options,
    )  # fmt: skip


def check_received(result, expected, rank, topk=True, nodes=1):
    recv_x, recv_idx, recv_weights, counts, handle, event = result
    equal(recv_x, expected.x, "recv_x")
    assert recv_x.is_contiguous()
    if topk:
        equal(recv_idx, expected.topk_idx, "recv_topk_idx")
        equal(recv_weights, expected.topk_weights, "recv_topk_weights")
    else:
        assert recv_idx is None and recv_weights is None
    assert counts == expected.counts and all(type(count) is int for count in counts)
    assert type(handle) is tuple and len(handle) == 7
    assert (handle[0][:, rank] if nodes == 1 else handle[-4]).tolist() == expected.ends
    assert isinstance(event, deep_ep.EventOverlap)


def print_once(rank, text, end="\n"):
    if rank == 0:
        print(text, end=end, flush=True)


def case_of(args, num_ranks, nodes, groups, seed):
    """Data of all ranks; a token selects experts of ``groups`` nodes only."""
    case = make_case([args.num_tokens] * num_ranks, args.hidden, args.num_topk, args.num_experts // num_ranks, seed)
    for idx in case.topk_idx:
        token = torch.arange(args.num_tokens).unsqueeze(1)
        node = idx // (args.num_experts // nodes)
        idx.masked_fill_((node + token) % nodes >= groups, -1)
    return case


def run_script(args, buffer, config, nodes=1, groups=1, seed=0):
    rank, ranks = buffer.rank, buffer.group_size
    print_once(rank, f"[config] {args}, {ranks} ranks on {'GPUs' if GPU else 'the CPU'}")
    run_cases(buffer, case_of(args, ranks, nodes, groups, seed), config, nodes)
    if GPU:
        run_graphs(args, buffer, config, nodes, groups)


def run_cases(buffer, case, config=CONFIG, nodes=1):
    rank, ranks, hidden = buffer.rank, buffer.group_size, case.x[0].size(1)
    got = [reference.dispatched(case, each) for each in range(ranks)]
    eight = [per_token_cast_to_fp8(x) for x in case.x]
    bits = reference.dispatched(case, rank, [rows.view(torch.uint8) for rows, _ in eight]).x
    scales = reference.dispatched(case, rank, [each for _, each in eight]).x
    biases = (torch.ones_like(case.x[rank]), case.x[rank] * 3) if nodes > 1 else ()
    rows, row_major = eight[rank]
    wider = torch.nn.functional.pad(row_major.view(torch.int32), (0, 5))
    forms = {
        "BF16": case.x[rank],
        "FP8": (rows, row_major),
        "FP8 with column-major scales": (rows, row_major.T.contiguous().T),
        "FP8 with int32 scales in wider rows": (rows, wider[:, : row_major.size(1)]),
    }
    received, worst = got[rank].x.size(0), max(1, *map(len, case.x)) * ranks
    for previous, asynchronous, (kind, x), topk in itertools.product((False, True), (False, True), forms.items(), (True, False)):
        with_topk = "with" if topk else "without"
        text = f"[testing] Running with {kind}, {with_topk} top-k (async={asynchronous}, previous={previous}) ..."
        print_once(rank, text, end="")

        def call(function, *arguments, **options):
            """Results, whose event the current stream has waited for. 8-bit rows are compared with the reference here, and then are
            the bfloat16 ones that they were made of."""
            stream = {"async_finish": asynchronous, **({"previous_event": buffer.capture()} if previous else {})}
            first, *others = function(*arguments, config=config, **options, **stream)
            if asynchronous:
                others[-1].current_stream_wait()
            if isinstance(first, tuple):
                assert first[1].is_contiguous()
                equal(first[0][:received].view(torch.uint8), bits, "8-bit rows")
                equal(first[1][:received], scales.view(x[1].dtype), "scales")
                first = torch.cat([got[rank].x, got[rank].x.new_zeros(first[0].size(0) - received, hidden)])
            return first, *others

        step = 128 if isinstance(x, tuple) else 1
        result = call(send, buffer, case, x, topk, expert_alignment=step)
        aligned = dataclasses.replace(got[rank], counts=[align(count, step) for count in got[rank].counts])
        check_received(result, aligned, rank, topk, nodes)
        if topk:  # with outputs of a fixed size, without waiting for the counts
            *fixed, counts, _, _ = call(send, buffer, case, x, num_worst_tokens=worst)
            assert counts == [] and all(len(each) == worst for each in fixed) and (fixed[1][received:] == -1).all()
            for each, exact in zip(fixed, result):
                equal(each[:received], exact, "rows of a fixed size")
        else:
            cached, *none, _, _ = call(buffer.dispatch, x, handle=result[4])
            equal(cached, got[rank].x, "rows of a cached dispatch")
            assert none == [None] * 3
        back, weights, event = call(buffer.combine, result[0], result[4], topk_weights=result[2], bias=biases or None)
        wanted, wanted_weights = reference.combined(
            case, rank, [each.x for each in got], [each.topk_weights for each in got], biases, nodes
        )
        equal(back, wanted, "combined_x")
        assert (weights is None) != topk and (event.event is None) != asynchronous
        if topk:
            equal(weights, wanted_weights, "combined_topk_weights")
        print_once(rank, " passed")


def run_graphs(args, buffer, config, nodes, groups):
    """Layout, dispatch of worst-case size, a cached one and combine in a CUDA graph, replayed with other data each time."""
    rank, ranks = buffer.rank, buffer.group_size
    print_once(rank, "[testing] Running in CUDA graphs ...", end="")
    given = case_of(args, ranks, nodes, groups, 1)

    def step(worst=args.num_tokens * ranks):
        recv, idx, weights, _, handle, _ = send_rows(
            buffer, given.x[rank], given.topk_idx[rank], given.topk_weights[rank], given.num_experts, num_worst_tokens=worst, config=config
        )
        again = buffer.dispatch(given.x[rank], handle=handle, config=config)[0]
        return recv, idx, *buffer.combine(again, handle, weights, config=config)[:2]

    graph, (recv, idx, *back) = recorded_graph(step, capture_error_mode="thread_local")
    for seed in range(2, 12):
        new = case_of(args, ranks, nodes, groups, seed)
        for name in ("x", "topk_idx", "topk_weights"):
            getattr(given, name)[rank].copy_(getattr(new, name)[rank])
        graph.replay()
        wanted, wanted_idx, *wanted_back = step(0)
        rows = wanted.size(0)
        assert torch.equal(recv[:rows], wanted) and torch.equal(idx[:rows], wanted_idx) and (idx[rows:] == -1).all()
        assert all(map(torch.equal, back, wanted_back))
    print_once(rank, " passed\n")
