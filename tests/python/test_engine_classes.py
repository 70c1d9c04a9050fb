"""The layers of experts of Megatron Core and torchtitan themselves, unmodified, on two CPU ranks, against the engine's own
dispatcher that needs no deep_ep: outputs, and gradients of inputs, routers and experts.

Both are written for GPUs. In memory of these ranks, and nowhere else:

- Megatron Core: ``torch.cuda.current_device()`` answers ``cpu``, and tensors that its constructors make on ``cuda`` are made on
  the CPU. ``torch.compile`` is off.
- torchtitan: the functions that it registers as operators for CUDA are registered for the CPU, too. PyTorch 2.13 has the class
  that torchtitan 0.3 calls ``CustomClassBase`` under another name.
"""

import contextlib
import os
import pathlib
import sys
import warnings

import pytest
import torch
from torch.overrides import TorchFunctionMode

import deep_ep

FOLDER = os.environ.get("DEEP_EP_TEST_ENGINES", "")
HIDDEN, EXPERTS, TOPK = 128, 8, 3


def needs(engine, folder):
    there = FOLDER and pathlib.Path(FOLDER, folder).is_dir()
    return pytest.mark.skipif(
        not there, reason=f"{engine} is not installed: scripts/engines does it, and DEEP_EP_TEST_ENGINES is the folder"
    )


@pytest.fixture
def engine_ranks(ranks_of_this_file, monkeypatch):
    """Two ranks for this file alone, as engines change their process."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    return ranks_of_this_file(2)


def random_numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def set_parameters(module, rank):
    """Of experts other ones on each rank, else the same; for every dispatcher alike."""
    for at, (name, parameter) in enumerate(sorted(module.named_parameters())):
        seed = at + (100 * (rank + 1) if "experts" in name else 0)
        parameter.data = (random_numbers(seed, *parameter.shape) * 0.1).to(parameter.dtype)


def require_close(got, want):
    """To what bfloat16 sums in another order differ by. A row in a wrong place is off by everything."""
    assert got.keys() == want.keys()
    for name in want:
        assert (got[name] is None) == (want[name] is None), name
        if want[name] is not None:
            assert got[name].shape == want[name].shape, name
            largest = want[name].float().abs().max()
            assert largest > 0, name
            assert (got[name].float() - want[name].float()).abs().max() < 0.015 * largest, name


# Megatron Core


class OnTheCpu(TorchFunctionMode):
    """Tensors that are to be made on ``cuda`` are made here."""

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        keywords = dict(keywords or {})
        if str(keywords.get("device")).startswith("cuda"):
            keywords["device"] = "cpu"
        return function(*arguments, **keywords)


def megatron_layer(rank, **options):
    sys.path[:0] = [FOLDER] if FOLDER not in sys.path else []
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.cuda.current_device = lambda: torch.device("cpu")
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, num_moe_experts=EXPERTS, moe_router_topk=TOPK,
        expert_model_parallel_size=2, use_cpu_initialization=True, moe_router_dtype="fp32", add_bias_linear=False,
        moe_router_load_balancing_type="none", bf16=True, params_dtype=torch.bfloat16, **options,
    )  # fmt: skip
    spec = get_moe_module_spec(use_te=False, num_experts=EXPERTS)
    with OnTheCpu():
        layer = spec(config) if callable(spec) else spec.module(config, spec.submodules)
    set_parameters(layer, rank)
    return layer


def megatron_results(layer, rank, tokens, real):
    """Of ``tokens`` tokens of which the first ``real`` are part of the loss."""
    x = random_numbers(rank, 32, 1, HIDDEN)[:tokens].to(torch.bfloat16).requires_grad_()
    for parameter in layer.parameters():
        parameter.grad = None
    out, _ = layer(x)
    out[:real].float().square().sum().backward()
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"out": out[:real].detach(), "x": x.grad[:real], **grads}


def megatron(group, options, uneven):
    rank = group.rank()
    layer = megatron_layer(rank, moe_token_dispatcher_type="flex", **options)
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    assert type(layer.token_dispatcher) is token_dispatcher.MoEFlexTokenDispatcher
    assert fused_a2a.HAVE_DEEP_EP and fused_a2a.HAVE_HYBRIDEP
    limited = {name: value for name, value in options.items() if name == "moe_expert_capacity_factor"}
    theirs = megatron_layer(rank, moe_token_dispatcher_type="allgather", **limited)
    real = 32 - 7 * rank if uneven else 32
    for _ in range(2):  # the second time with the buffer of the first
        got = megatron_results(layer, rank, real, real)
        require_close(got, megatron_results(theirs, rank, 32, real))
    buffer = fused_a2a._buffer if options["moe_flex_dispatcher_backend"] == "deepep" else fused_a2a._hybrid_ep_buffer
    assert type(buffer) in (deep_ep.Buffer, deep_ep.HybridEPBuffer)
    return True


CAPACITY = {"moe_expert_capacity_factor": 0.75}


@needs("Megatron Core", "megatron/core")
@pytest.mark.parametrize(
    "backend, options, uneven",
    [
        ("deepep", {}, False),
        ("hybridep", {}, False),
        ("deepep", {}, True),  # other numbers of tokens
        ("hybridep", {"moe_hybridep_pad_uneven_dispatch_inputs": True}, True),
        ("deepep", CAPACITY, False),  # dropped tokens
        ("hybridep", CAPACITY, False),
        # Every expert gets its whole capacity, and the host waits for nothing.
        ("hybridep", {**CAPACITY, "moe_pad_expert_input_to_capacity": True}, False),
        ("hybridep", {"moe_permute_fusion_into_hybridep": True}, False),
    ],
    ids=str,
)
def test_megatron(engine_ranks, backend, options, uneven):
    engine_ranks.run(megatron, {"moe_flex_dispatcher_backend": backend, **options}, uneven)


def megatron_budget(group, factor):
    """The number of rows that the host knows beforehand: the dispatcher alone, as the experts for this need a GPU."""
    rank = group.rank()
    layer = megatron_layer(rank, moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep")
    dispatcher = layer.token_dispatcher
    # The constructor takes it beside Transformer Engine only.
    dispatcher._comm_manager.config.use_transformer_engine_op_fuser = True
    dispatcher._comm_manager.moe_expert_rank_capacity_factor = factor
    x = random_numbers(rank, 128, 1, HIDDEN).to(torch.bfloat16)
    with torch.no_grad():
        probs, routing_map = layer.router(x)
        rows, probs_of_rows = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, routing_map, probs))
        rows, counts, probs_of_rows = dispatcher.dispatch_postprocess(rows, probs_of_rows)
        assert rows.shape == (int(128 * TOPK * factor), HIDDEN)
        made = (rows * probs_of_rows.unsqueeze(1)).to(torch.bfloat16)
        made = dispatcher.combine_preprocess(made)
        out = dispatcher.combine_postprocess(dispatcher.token_combine(made))
    if factor >= 2:
        require_close({"out": out}, {"out": (x.float() * probs.sum(1).view(-1, 1, 1)).to(torch.bfloat16)})
        assert counts.sum() <= rows.size(0)
    return dispatcher._comm_manager.over_budget.item(), counts.sum().item()


@needs("Megatron Core", "megatron/core")
def test_megatron_with_a_budget(engine_ranks):
    (dropped, here), (dropped_too, there) = engine_ranks.run(megatron_budget, 2.0)
    assert not dropped and not dropped_too and here + there == 2 * 128 * TOPK
    assert any(dropped for dropped, _ in engine_ranks.run(megatron_budget, 2 / 3))


# torchtitan


def titan_modules():
    sys.path[:0] = [FOLDER] if FOLDER not in sys.path else []
    warnings.simplefilter("ignore")
    from torch._library import opaque_object

    if not hasattr(opaque_object, "CustomClassBase"):
        opaque_object.CustomClassBase = opaque_object.OpaqueBase
    from torchtitan.distributed.deepep import deepep, hybridep
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common import moe, token_dispatcher

    set_spmd_backend("partial_dtensor")
    with contextlib.suppress(RuntimeError):  # in these ranks already
        torch.library.impl("deepep::dispatch", "CPU")(deepep._dispatch_op_impl)
        torch.library.impl("deepep::combine", "CPU")(deepep._combine_op_impl)
    for operator in (hybridep._dispatch_impl, hybridep._dispatch_bwd_impl, hybridep._combine_impl, hybridep._combine_bwd_impl):
        operator.register_kernel("cpu")(operator._init_fn)
    return moe, token_dispatcher, deepep, hybridep


def titan(group, dispatcher, options):
    moe, token_dispatcher, deepep, hybridep = titan_modules()
    from torch.distributed.device_mesh import init_device_mesh

    rank, tokens = group.rank(), 24
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    training = not options.get("cudagraphable")
    sizes = {"num_max_tokens_per_rank": tokens, "hidden_dim": HIDDEN, **options}
    results = []
    for name, given in (("AllToAllTokenDispatcher", {}), (dispatcher, sizes)):
        config = getattr(token_dispatcher, name).Config(num_experts=EXPERTS, top_k=TOPK, **given)
        inner = moe.GroupedExperts.Config(dim=HIDDEN, hidden_dim=64, num_experts=EXPERTS // 2)
        layer = moe.RoutedExperts.Config(inner_experts=inner, token_dispatcher=config).build()
        layer.token_dispatcher.wire_meshes(ep_mesh=mesh)
        set_parameters(layer, rank)
        assert type(layer.token_dispatcher) is getattr(token_dispatcher, name)
        x = random_numbers(rank, 2, tokens // 2, HIDDEN).to(torch.bfloat16).requires_grad_()
        scores = random_numbers(rank + 2, 2, tokens // 2, EXPERTS).softmax(-1).requires_grad_()
        with torch.set_grad_enabled(training):
            weights, ids = scores.topk(TOPK, dim=-1)
            if not training:
                weights[0, :5, 1] = 0  # such a selection goes nowhere
            out = layer(x, weights, ids, torch.bincount(ids.flatten(), minlength=EXPERTS))
        if training:
            out.float().square().sum().backward()
        grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
        results.append({"out": out.detach(), "x": x.grad, "scores": scores.grad, **grads})
    buffer = deepep._buffer if dispatcher == "DeepEPTokenDispatcher" else hybridep._buffer
    assert type(buffer) in (deep_ep.ElasticBuffer, deep_ep.HybridEPBuffer)
    require_close(results[1], results[0])


@needs("torchtitan", "torchtitan")
@pytest.mark.parametrize("options", [{}, {"cudagraphable": True}], ids=["training", "inference"])
def test_torchtitan_deepep(engine_ranks, options):
    engine_ranks.run(titan, "DeepEPTokenDispatcher", options)


@needs("torchtitan", "torchtitan")
@pytest.mark.parametrize(
    "options",
    [{}, {"pad_multiple": 16}, {"non_blocking_capacity_factor": 1.0, "pad_multiple": 16}],
    ids=["blocking", "padded", "without_waiting"],
)
def test_torchtitan_hybridep(engine_ranks, options):
    engine_ranks.run(titan, "HybridEPTokenDispatcher", options)
