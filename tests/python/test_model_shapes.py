"""Experts, top-k and hidden sizes of models in use, with few tokens, on three ranks, which divide few numbers of experts."""

import low_latency_calls
import normal_mode
import pytest
from reference import make_case
from test_elastic_random import check_drawn

from deep_ep import Buffer, ElasticBuffer

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
    case = make_case(TOKENS, hidden, topk, padded(experts, len(TOKENS)) // len(TOKENS), drop=0)
    for idx in case.topk_idx:
        idx.masked_fill_(idx >= experts, -1)
    return case


def first_interface(group, experts, topk, hidden):
    buffer = Buffer(group, 1 << 24, explicitly_destroy=True)
    normal_mode.run_cases(buffer, model_case(experts, topk, hidden))
    buffer.destroy()


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
    for expand in (False, True):
        check_drawn(buffer, case, "cpu", M, 8, True, expand, False, not expand, True, padded(hidden, 128) // 128, 1)
    buffer.destroy()


@pytest.mark.parametrize("interface", [first_interface, low_latency, second_interface], ids=lambda each: each.__name__)
@pytest.mark.parametrize("model", MODELS)
def test_shapes_of_models(ranks, model, interface):
    ranks(len(TOKENS)).run(interface, *MODELS[model])
