"""The SGLang plugin in SGLang's own classes, on the CPU: a forward of the engine's layer in each format.

Skipped if SGLang is not installed: `make test-serving` installs it.
"""

from __future__ import annotations

import contextlib
import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.criterion import assert_close
from support.serving import BF16, Layer, rounding, tokens

pytest_plugins = ["support.sglang_plugin"]

METHODS = {
    "bf16": "UnquantizedFusedMoEMethod", "fp8_block": "Fp8MoEMethod", "mxfp8": "Fp8MoEMethod",
    "deepseek_v4": "Fp8MoEMethod", "gpt_oss": "Mxfp4MoEMethod", "mxfp4": "Mxfp4MoEMethod",
    "nvfp4": "ModelOptNvFp4FusedMoEMethod",
}  # fmt: skip
RECIPES = {
    "bf16": "bf16", "fp8_block": "fp8_block", "mxfp8": "mxfp8", "deepseek_v4": "mxfp4_weight_only",
    "gpt_oss": "mxfp4_weight_only", "mxfp4": "mxfp4_weight_only", "nvfp4": "nvfp4_weight_only",
}  # fmt: skip
COUNT = 17
each_kind = pytest.mark.parametrize("kind", METHODS)


def loaded(sglang: ModuleType, kind: str, **options: Any) -> tuple[Any, Any]:
    """Return a layer of the engine with loaded weights, and the weights."""
    layer = sglang.layer_of(kind, **options)
    weights = sglang.Weights(kind, gated=options.get("is_gated", True))
    weights.load(layer)
    return layer, weights


def expected(weights: Any, **options: Any) -> Layer:
    biases = [None if one is None else one.double() for one in (weights.b13, weights.b2)]
    given: dict[str, Any] = {"b1": biases[0], "b2": biases[1], "rounds": rounding(RECIPES[weights.kind])}
    if weights.kind == "gpt_oss":
        given |= {"activation": "clamped_swiglu", "layout": "interleaved"}
    return Layer(**{"w1": weights.w13.values, "w2": weights.w2.values, **given, **options})


def check(
    sglang: ModuleType, layer: Any, exact_layer: Layer, k: int = 3, factor: float = 1.0, on_rows: bool = False
) -> None:
    """Compare the engine's forward with float64. Padded tokens are NaN and must give 0."""
    x, ids, weights, _ = tokens(COUNT, sglang.HIDDEN, sglang.EXPERTS, k)
    with torch.inference_mode():
        got = layer(x.clone(), sglang.standard(ids, weights))
    assert got.dtype == BF16 and got.shape == x.shape and not got[COUNT:].any()
    exact, same = (factor * exact_layer(x, ids, weights, dtype, on_rows) for dtype in (torch.float64, BF16))
    assert_close(got[:COUNT], exact[:COUNT], same[:COUNT], COUNT)


@each_kind
def test_a_forward_of_each_format_is_that_of_its_dequantised_weights(sglang: ModuleType, kind: str) -> None:
    layer, weights = loaded(sglang, kind)
    assert type(layer.quant_method).__name__ == METHODS[kind] and layer.runner_backend.value == "glulam"
    assert layer.runner.runner_backend.value == "glulam"
    assert layer.quant_method.glulam_taken.experts(layer).recipe.name == RECIPES[kind]
    check(sglang, layer, expected(weights))


@pytest.mark.parametrize("kind", ["deepseek_v4", "mxfp4"])
def test_a_variable_asks_for_rows_in_fp8(sglang: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """And weights of which scales alone are loaded anew are prepared anew."""
    monkeypatch.setenv("GLULAM_MXFP4_ROWS", "fp8")
    layer, weights = sglang.layer_of(kind), sglang.Weights(kind, form="mxfp4_fp8")
    weights.load(layer)
    assert layer.quant_method.glulam_taken.experts(layer).recipe.name == "mxfp4"
    check(sglang, layer, expected(weights, rounds=rounding("mxfp4")))
    scale = weights.w2.parts[1].view(torch.uint8)
    scale += 2
    weights.load(layer)
    check(sglang, layer, expected(weights, w2=4 * weights.w2.values, rounds=rounding("mxfp4")))


@each_kind
def test_weights_may_be_loaded_again(sglang: ModuleType, kind: str) -> None:
    """And prepared twice without being loaded between."""
    layer, weights = loaded(sglang, kind)
    x, ids, factors, _ = tokens(COUNT, sglang.HIDDEN, sglang.EXPERTS, 3)
    before = layer(x, sglang.standard(ids, factors))
    addresses = [parameter.data_ptr() for parameter in layer.parameters()]
    weights.load(layer)
    assert layer(x, sglang.standard(ids, factors)).equal(before)
    layer.quant_method.process_weights_after_loading(layer)
    assert layer(x, sglang.standard(ids, factors)).equal(before) and before.any()
    assert addresses == [parameter.data_ptr() for parameter in layer.parameters()]


GATES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "silu": ({}, "swiglu", {}),
    "gelu_tanh": ({"activation": "gelu_tanh"}, "geglu", {}),
    "DeepSeek-V4": ({"swiglu_limit": 10.0}, "clamped_swiglu", {"limit": 10.0, "alpha": 1.0, "offset": 0.0}),
    "MiniMax-M3": (
        {"gemm1_alpha": 1.702, "gemm1_beta": 1.0, "gemm1_clamp_limit": 7.0, "gate_up_interleaved": False},
        "clamped_swiglu", {},
    ),
    "Kimi-K3": (
        {"activation": "situ", "gemm1_alpha": 4.0, "gemm1_clamp_limit": 25.0}, "situ",
        {"gate_cap": 4.0, "up_cap": 25.0},
    ),
    "situ without numbers": ({"activation": "situ"}, "situ", {"gate_cap": 4.0, "up_cap": None}),
    "relu2": ({"activation": "relu2", "is_gated": False}, "srelu", {}),
    "gelu without a gate": ({"activation": "gelu", "is_gated": False}, "gelu", {}),
    "silu without a gate": ({"activation": "silu", "is_gated": False}, "silu", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", GATES)
def test_gates_are_the_engines(sglang: ModuleType, name: str) -> None:
    options, activation, params = GATES[name]
    layer, weights = loaded(sglang, "bf16", **options)
    given = {"params": params} if params else {}
    check(sglang, layer, expected(weights, activation=activation, **given))


def test_gates_of_16_bits_are_interleaved_as_gpt_oss_ships_them(sglang: ModuleType) -> None:
    """gpt-oss in bfloat16, with biases in float32."""
    layer = sglang.layer_of("bf16", gemm1_alpha=1.702, gemm1_clamp_limit=7.0, with_bias=True)
    weights = sglang.Weights("gpt_oss")
    for name, held, bias in (("w13", weights.w13, weights.b13), ("w2", weights.w2, weights.b2)):
        getattr(layer, f"{name}_weight").data.copy_(held.values)
        assert getattr(layer, f"{name}_weight_bias").dtype == torch.float32
        getattr(layer, f"{name}_weight_bias").data.copy_(bias)
    layer.quant_method.process_weights_after_loading(layer)
    check(sglang, layer, expected(weights))


def test_a_rank_of_gpt_oss_holds_whole_blocks(sglang: ModuleType) -> None:
    """Of I = 160 over four ranks, 40 each, SGLang's loader gives the first two blocks, 64."""
    layer = sglang.layer_of("gpt_oss", intermediate_size=40)
    assert layer.w13_weight.shape[1] == 128
    weights = sglang.Weights("gpt_oss", width=64)
    weights.load(layer)
    check(sglang, layer, expected(weights))
    with sglang.running("triton"):
        assert sglang.layer_of("gpt_oss", intermediate_size=40).w13_weight.shape[1] == 80


def test_the_factor_of_routed_experts_multiplies_unless_choices_have_it(sglang: ModuleType) -> None:
    layer, weights = loaded(sglang, "bf16", routed_scaling_factor=2.5)
    assert not layer.should_fuse_routed_scaling_factor_in_topk
    check(sglang, layer, expected(weights), factor=2.5)
    layer, weights = loaded(sglang, "nvfp4", routed_scaling_factor=2.5)
    assert layer.should_fuse_routed_scaling_factor_in_topk
    check(sglang, layer, expected(weights))


def test_router_weights_may_multiply_tokens(sglang: ModuleType) -> None:
    """Llama 4."""
    layer, weights = loaded(sglang, "bf16", top_k=1, apply_router_weight_on_input=True)
    check(sglang, layer, expected(weights), k=1, on_rows=True)


def test_choices_may_be_made_by_the_runner(sglang: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, _ = loaded(sglang, "bf16")
    x, ids, weights, _ = tokens(COUNT, sglang.HIDDEN, sglang.EXPERTS, 3, padding=0)
    wanted = layer(x, sglang.standard(ids, weights))
    given = sglang.bypassed(x, torch.zeros(COUNT, sglang.EXPERTS), 3)
    monkeypatch.setattr(type(given), "to_standard", lambda self: sglang.standard(ids, weights))
    assert layer(x, given).equal(wanted) and wanted.any()
    layer.moe_ep_size = 2
    with pytest.raises(RuntimeError, match="with expert parallelism"):
        layer(x, given)


def test_results_lie_in_symmetric_memory_where_the_engine_asks_for_it(
    sglang: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, _ = loaded(sglang, "bf16")
    x, ids, weights, _ = tokens(COUNT, sglang.HIDDEN, sglang.EXPERTS, 3)
    wanted = layer(x, sglang.standard(ids, weights))
    runner, made = importlib.import_module("glulam_sglang.runner"), []
    result = runner._symmetric_result

    def noted(given: torch.Tensor) -> Any:
        made.append(result(given))
        return made[-1]

    monkeypatch.setattr(runner, "is_symmetric_memory_enabled", lambda: True)
    monkeypatch.setattr(runner, "use_symmetric_memory", lambda group: contextlib.nullcontext())
    monkeypatch.setattr(runner, "_symmetric_result", noted)
    got = layer(x, sglang.standard(ids, weights))
    assert got.equal(wanted) and got.data_ptr() == made[0].data_ptr() and got.any()


def test_experts_of_a_rank_get_local_ids(sglang: ModuleType) -> None:
    """Of two ranks, this has experts 3 to 5; the engine makes ids local and -1."""
    group = SimpleNamespace(world_size=2)
    sizes = {"tp_size": 2, "attn_tp_size": 2, "moe_ep_size": 2, "moe_ep_rank": 1, "tp_group": group}
    with sglang.get_parallel().override(**sizes):
        layer = sglang.layer_of("bf16", num_experts=6)
        weights = sglang.Weights("bf16")
        assert layer.num_local_experts == 3
        for name, held in (("w13", weights.w13), ("w2", weights.w2)):
            getattr(layer, f"{name}_weight").data.copy_(held.values[:3])
        layer.quant_method.process_weights_after_loading(layer)
        x, ids, factors, _ = tokens(COUNT, sglang.HIDDEN, 6, 3)
        device = importlib.import_module("sglang.srt.layers.moe.token_dispatcher.standard")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device, "get_device", lambda: "cpu")
            got = layer(x, sglang.standard(ids, factors))
    here = torch.where(ids >= 3, ids - 3, -1)
    exact_layer = Layer(weights.w13.values[:3], weights.w2.values[:3])
    exact, same = (exact_layer(x, here, factors, dtype) for dtype in (torch.float64, BF16))
    filled = (here >= 0).any(dim=1)
    assert filled.sum() > 5 and not got[~filled].any()
    assert_close(got[filled], exact[filled], same[filled], int(filled.sum()))


def test_scales_of_deepseek_v4_are_bytes_and_copies_of_nvfp4_scales_go(sglang: ModuleType) -> None:
    layer, _ = loaded(sglang, "deepseek_v4")
    assert layer.w13_weight_scale_inv.dtype == torch.float8_e8m0fnu
    layer, _ = loaded(sglang, "nvfp4")
    assert layer.w13_blockscale_swizzled is None and layer.w2_blockscale_swizzled is None


def test_another_backend_leaves_the_engine_as_it_was(sglang: ModuleType) -> None:
    with sglang.running("triton"):
        layer = sglang.layer_of("bf16")
        assert layer.runner_backend.value == "triton" and not hasattr(layer.quant_method, "glulam_taken")
        layer = sglang.layer_of("deepseek_v4")
        assert layer.w13_weight_scale_inv.dtype == torch.float32
        assert sglang.config_of("mxfp8").get_min_capability() == 100


def test_mxfp8_checkpoints_load_on_gpus_before_blackwell(sglang: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the engine makes FP8 blocks of linear layers."""
    assert sglang.config_of("mxfp8").get_min_capability() == 80
    assert sglang.config_of("mxfp8").convert_mxfp8_to_block_fp8 is True
    assert sglang.config_of("fp8_block").convert_mxfp8_to_block_fp8 is None
    hooks = importlib.import_module("glulam_sglang.hooks")
    monkeypatch.setattr(hooks, "_has_mxfp8_linear", lambda: True)
    assert sglang.config_of("mxfp8").convert_mxfp8_to_block_fp8 is None


def test_weights_that_were_replaced_are_found(sglang: ModuleType) -> None:
    """Views are made anew; of elements that were changed in place nothing is known."""
    x, ids, factors, _ = tokens(COUNT, sglang.HIDDEN, sglang.EXPERTS, 3)
    for kind in ("bf16", "fp8_block"):
        layer, _ = loaded(sglang, kind)
        before = layer(x, sglang.standard(ids, factors))
        layer.w2_weight.data = layer.w2_weight.data.clone()
        layer.w2_weight.data.view(torch.uint8).zero_()
        assert not layer(x, sglang.standard(ids, factors)).any() and before.any()
    for kind in ("mxfp8", "gpt_oss", "nvfp4"):
        layer, _ = loaded(sglang, kind)
        layer.w2_weight.data = layer.w2_weight.data.clone()
        with pytest.raises(RuntimeError, match="were replaced after they were prepared"):
            layer(x, sglang.standard(ids, factors))


def test_what_the_runner_never_gets_is_an_error(sglang: ModuleType) -> None:
    layer, _ = loaded(sglang, "bf16")
    x, ids, factors, _ = tokens(COUNT, sglang.HIDDEN, sglang.EXPERTS, 3)
    core, config = layer.runner.runner_core, layer.moe_runner_config
    info = importlib.import_module("glulam_sglang.runner").GlulamQuantInfo(
        layer.quant_method.glulam_taken.experts(layer)
    )
    given = layer.dispatcher.dispatch(x, sglang.standard(ids, factors))
    with pytest.raises(RuntimeError, match="object of a MoE method"):
        core.run_from_dispatch(given, object(), config)
    with pytest.raises(RuntimeError, match="LoRA"):
        core.run_from_dispatch(given, info, config, hooks=object())
    with pytest.raises(RuntimeError, match="quantised by the dispatcher"):
        core.run_from_dispatch(given._replace(hidden_states_scale=x), info, config)
    other = SimpleNamespace(format=SimpleNamespace(name="PACKED"))
    with pytest.raises(RuntimeError, match="format PACKED; served is STANDARD"):
        core.run_from_dispatch(given._replace(topk_output=other), info, config)
