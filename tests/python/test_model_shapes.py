"""Experts, top-k and hidden sizes of models in use, with few tokens, on three ranks, which divide few numbers of experts."""

import elastic_cases
import elastic_reference
import low_latency_calls
import normal_mode
import pytest
import torch
from reference import Case

from deep_ep import Buffer, ElasticBuffer
from deep_ep.utils.math import per_token_cast_to_fp8

TOKENS = [2, 1, 0]
M = 2

# Model: experts, top-k, hidden size.
MODELS = {
    "DeepSeek-V3, R1, V3.2": (256, 8, 7168),
    "DeepSeek-V2": (160, 6, 5120),
    "DeepSeek-V2-Lite, Moonlight": (64, 6, 2048),
    "DeepSeek-V4-Flash": (256, 6, 4096),
    "DeepSeek-V4-Pro": (384, 6, 7168),
    "Kimi K2": (384, 8, 7168),
    "Kimi K3": (896, 16, 3584),
    "Qwen3 30B": (128, 8, 2048),
    "Qwen3 235B": (128, 8, 4096),
    "Qwen3.5 122B, MiniMax-M2": (256, 8, 3072),
    "Qwen3.5 397B": (512, 10, 4096),
    "Qwen3-Coder 480B": (160, 8, 6144),
    "GPT-OSS 20B": (32, 4, 2880),
    "GPT-OSS 120B": (128, 4, 2880),
    "GLM-5": (256, 8, 6144),
    "Step-3.7": (288, 8, 4096),
    "HY-V3": (192, 8, 4096),
    "Inkling": (256, 6, 6144),
    "Laguna": (256, 16, 2048),
    "Nemotron-3 Nano": (128, 6, 2688),
    "Nemotron-3 Super": (512, 22, 1024),
    "Llama-4 Scout": (16, 1, 5120),
}


def padded(number, step):
    """The recipe of docs/reference/python.md: experts that no token selects, and channels that are 0."""
    return -(-number // step) * step


def model_case(experts, topk, hidden):
    """Of so many experts that the ranks divide them; those behind the model's are not selected."""
    generator = torch.Generator().manual_seed(experts + topk + hidden)
    case = Case(padded(experts, len(TOKENS)), [], [], [])
    for count in TOKENS:
        case.x.append(torch.randn(count, hidden, generator=generator, dtype=torch.float32).to(torch.bfloat16))
        case.topk_idx.append(torch.rand(count, experts, generator=generator, dtype=torch.float32).topk(topk, dim=1).indices)
        case.topk_weights.append(torch.rand(count, topk, generator=generator, dtype=torch.float32))
    return case


def first_interface(group, experts, topk, hidden):
    normal_mode.check_round_trip(Buffer(group, 1 << 24, explicitly_destroy=True), model_case(experts, topk, hidden)).destroy()


def low_latency(group, experts, topk, hidden):
    hidden = padded(hidden, 128)
    case = model_case(experts, topk, hidden)
    buffer = low_latency_calls.make_buffer(group, hidden, M, case.num_experts, explicitly_destroy=True)
    for use_fp8 in (False, True):
        low_latency_calls.check_round_trip(buffer, case, {"use_fp8": use_fp8}, M)
    buffer.destroy()


def second_interface(group, experts, topk, hidden):
    case = model_case(experts, topk, hidden)
    buffer = ElasticBuffer(
        group, num_max_tokens_per_rank=M, hidden=hidden, num_topk=topk, use_fp8_dispatch=True, explicitly_destroy=True
    )
    rank = buffer.rank_idx
    want = elastic_reference.expected(case, rank, M, 8)
    for expand in (False, True):
        result = elastic_cases.send(buffer, case, do_expand=expand, do_zero_padding=expand, expert_alignment=8)
        elastic_cases.check_handle(case, want, result, 8, M, True, expand)
        elastic_cases.check_rows(want, result, expand, zeroed=expand)
        rows, values = elastic_reference.input_of_combine(case, want, rank, M, expand, hidden)
        normal_mode.equal(buffer.combine(rows, result[3])[0], elastic_reference.combined(case, rank, (), **values), "combined")
    if hidden % 128 == 0:
        rows, scales = per_token_cast_to_fp8(case.x[rank])
        (received, received_scales), *_ = elastic_cases.send(buffer, case, (rows, scales))
        assert received.dtype == rows.dtype and received_scales.size(1) == hidden // 128
    buffer.destroy()


@pytest.mark.parametrize("interface", [first_interface, low_latency, second_interface], ids=lambda each: each.__name__)
@pytest.mark.parametrize("model", MODELS)
def test_shapes_of_models(ranks, model, interface):
    ranks(len(TOKENS)).run(interface, *MODELS[model])
