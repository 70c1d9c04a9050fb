"""tests/python/engines.md is true: symbols and keywords exist, tests exist; and the calls of engines, in their order and style."""

import ast
import importlib
import inspect
import pathlib
import re

import low_latency_reference
import reference
import torch
import torch.distributed as dist
from reference import make_case
from test_calls import equal
from test_errors import Alone

import deep_ep
from deep_ep import Buffer, Config, EventOverlap
from deep_ep.buffers.elastic import ElasticBuffer

HERE = pathlib.Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "tests/python/engines.md"


def rows_of_page():
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 4 and cells[0] not in ("symbol", "---"):
            yield cells


def resolve(name):
    """The object behind a dotted name of deep_ep; attributes of instances count."""
    parts, value = name.split("."), deep_ep
    for length in range(len(parts) - 1, 0, -1):
        try:
            value = importlib.import_module(".".join(["deep_ep", *parts[:length]]))
        except ModuleNotFoundError:
            continue
        parts = parts[length:]
        break
    for part in parts:
        if not hasattr(value, part) and inspect.isclass(value):
            value = {
                Buffer: lambda: Buffer(None, comm=Alone),
                ElasticBuffer: lambda: ElasticBuffer(Alone, 2 << 20),
                EventOverlap: EventOverlap,
            }[value]()
        assert hasattr(value, part), f"deep_ep.{name} does not exist"
        value = getattr(value, part)
    return value


def functions_of(file):
    return {node.name for node in ast.parse((HERE / file).read_text()).body if isinstance(node, ast.FunctionDef)}


def test_page():
    rows = list(rows_of_page())
    assert len(rows) > 60
    for what, who, here, test in rows:
        file, function = re.fullmatch(r"`(test_\w+\.py)::(test_\w+)`", test).groups()
        assert function in functions_of(file), f"{test} does not exist"
        assert here.startswith(("works", "differs")) and who, what
        head, _, keywords = what.partition(" with ")
        head = head.split(" returns ")[0]
        symbols = re.findall(r"`([^`]+)`", head)
        if what.startswith("a"):  # in words
            continue
        assert symbols, what
        for symbol in symbols:
            value = resolve(symbol)
            for keyword in re.findall(r"`([^`]+)`", keywords):
                # Several symbols share keywords where all have them.
                known = inspect.signature(value).parameters
                assert keyword in known or keyword == "None", f"{symbol} has no parameter {keyword}"


def wait(event, asynchronous=True):
    if asynchronous:
        assert event.event is not None
        event.current_stream_wait()


def vllm_high_throughput(group):
    """Everything by keyword; empty results of experts; combine without weights."""
    buffer = Buffer(group=group, num_nvl_bytes=1 << 22, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=1,
                    explicitly_destroy=True)  # fmt: skip
    rank = buffer.rank
    case = make_case([9, 14], hidden=128, num_topk=3)
    idx, weights = case.topk_idx[rank], case.topk_weights[rank]
    x = (case.x[rank].to(torch.float8_e4m3fn), torch.rand(idx.size(0), 1))  # a scale for each token
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
        topk_idx=idx, num_experts=case.num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    )
    assert event.event is None
    rows, recv_idx, recv_weights, counts, handle, event = buffer.dispatch(
        x=x, handle=None, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert, topk_idx=idx, topk_weights=weights, expert_alignment=1,
        config=buffer.get_dispatch_config(2), previous_event=None, async_finish=True, allocate_on_comm_stream=False,
    )  # fmt: skip
    wait(event)
    want = reference.dispatched(case, rank, [each.to(torch.float8_e4m3fn).view(torch.uint8) for each in case.x])
    equal(rows[0].view(torch.uint8), want.x, "rows")
    assert rows[1].shape == (want.x.size(0), 1) and counts == want.counts
    equal(recv_idx, want.topk_idx, "indices")
    equal(recv_weights, want.topk_weights, "weights")
    own = [reference.dispatched(case, each).x for each in range(2)]
    back, none, event = buffer.combine(x=own[rank], handle=handle, topk_weights=None, config=None, previous_event=None,
                                       async_finish=True, allocate_on_comm_stream=False)  # fmt: skip
    wait(event)
    assert none is None
    equal(back, reference.combined(case, rank, own)[0], "combined")
    # Nobody sends anything: experts have [0, H] to give back.
    nothing = torch.full_like(idx, -1)
    layout = buffer.get_dispatch_layout(topk_idx=nothing, num_experts=case.num_experts)
    rows, _, _, _, handle, _ = buffer.dispatch(
        x=case.x[rank], num_tokens_per_rank=layout[0], is_token_in_rank=layout[3], num_tokens_per_expert=layout[2],
        topk_idx=nothing, topk_weights=weights,
    )  # fmt: skip
    assert rows.shape == (0, 128) and (buffer.combine(x=rows, handle=handle)[0] == 0).all()
    buffer.destroy()


def test_vllm_high_throughput(ranks):
    ranks(2).run(vllm_high_throughput)


def sglang_normal(group):
    """Packed int32 scales, column by column; an alignment of 128; configurations from a file."""
    tuned = {"num_sms": 24, "num_max_nvl_chunked_send_tokens": 16, "num_max_nvl_chunked_recv_tokens": 512,
             "num_max_rdma_chunked_send_tokens": 16, "num_max_rdma_chunked_recv_tokens": 512}  # fmt: skip
    config = Config(**tuned)
    assert Buffer.num_sms == 20
    buffer = Buffer(group, 1 << 22, 0, low_latency_mode=False, num_qps_per_rank=12, allow_mnnvl=True)
    rank = buffer.rank
    case = make_case([9, 14], hidden=512)
    idx = case.topk_idx[rank]
    values = [torch.arange(len(each) * 4, dtype=torch.int32).view(-1, 4) * (7 + s) for s, each in enumerate(case.x)]
    packed = values[rank].t().contiguous().t()
    previous = Buffer.capture()
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
        idx, case.num_experts, previous_event=previous, async_finish=True, allocate_on_comm_stream=True
    )
    rows, _, _, counts, handle, event = buffer.dispatch(
        (case.x[rank].to(torch.float8_e4m3fn), packed), topk_idx=idx, topk_weights=case.topk_weights[rank],
        num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert, previous_event=event, async_finish=True, allocate_on_comm_stream=True,
        expert_alignment=128, config=config,
    )  # fmt: skip
    wait(event)
    equal(rows[1], reference.dispatched(case, rank, values).x, "scales")
    assert counts == [-(-count // 128) * 128 for count in reference.dispatched(case, rank).counts]


def test_sglang_normal(ranks):
    ranks(2).run(sglang_normal)


def sglang_modes(group):
    """Prefill and decoding in turn on one buffer, with a clean in between; two batches whose hooks overlap."""
    most = 6
    normal, decode = make_case([9, 14], hidden=512), [make_case([most, 4], hidden=512, seed=seed) for seed in range(2)]
    size = Buffer.get_low_latency_rdma_size_hint(most, 512, 2, normal.num_experts)
    buffer = Buffer(group, 1 << 22, size, low_latency_mode=True, num_qps_per_rank=4)
    rank = buffer.rank
    for _ in range(2):
        layout = buffer.get_dispatch_layout(normal.topk_idx[rank], normal.num_experts)
        rows = buffer.dispatch(
            normal.x[rank], num_tokens_per_rank=layout[0], is_token_in_rank=layout[3], num_tokens_per_expert=layout[2],
            topk_idx=normal.topk_idx[rank], topk_weights=normal.topk_weights[rank],
        )[0]  # fmt: skip
        equal(rows, reference.dispatched(normal, rank).x, "rows of the prefill")
        buffer.clean_low_latency_buffer(most, 512, normal.num_experts)
        sent = [
            buffer.low_latency_dispatch(case.x[rank], case.topk_idx[rank], most, case.num_experts, use_fp8=False,
                                        async_finish=False, return_recv_hook=True)
            for case in decode
        ]  # fmt: skip
        for case, result in zip(decode, sent):
            result[4]()
            low_latency_reference.check_dispatched(case, rank, most, result)
            outputs = [low_latency_reference.expert_output(case, each, most, 512, 0) for each in range(2)]
            back, event, _ = buffer.low_latency_combine(
                outputs[rank], case.topk_idx[rank], case.topk_weights[rank], result[2], async_finish=True
            )
            wait(event)
            low_latency_reference.close(back, low_latency_reference.combined(case, rank, outputs))
    dist.barrier(group)


def test_sglang_modes_on_one_buffer(ranks):
    ranks(2).run(sglang_modes)
