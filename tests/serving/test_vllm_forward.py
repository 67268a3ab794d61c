"""Results of vLLM's layers with the plugin, on the CPU: loaded, prepared and called by vLLM's own code."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch
from support.criterion import assert_close
from support.serving import BF16, Held, Layer, held, interleaved, rounding, tokens
from torch import Tensor

pytest_plugins = ["support.vllm_plugin"]

COUNT = 19
RECIPES = {
    "bf16": "bf16", "fp8": "fp8_block", "compressed_fp8": "fp8_block", "mxfp8": "mxfp8", "compressed_mxfp8": "mxfp8",
    "mxfp8_wide": "mxfp8_weight_only", "modelopt_fp4": "nvfp4_weight_only", "modelopt_mixed": "nvfp4_weight_only",
    "compressed_nvfp4": "nvfp4_weight_only", "deepseek_v4": "mxfp4_weight_only", "mxfp4": "mxfp4_weight_only",
    "compressed_mxfp4": "mxfp4_weight_only", "compressed_mxfp4_fp8": "mxfp4",
}  # fmt: skip
"""Recipe by name in `vllm_layers.CHECKPOINTS`; expected rows are quantised as that recipe does on the CPU."""


def loaded(vllm: ModuleType, name: str, w13: Held, w2: Held, **options: Any) -> Any:
    return vllm.load(vllm.empty(name, **options), name, w13, w2)


def bias_of(experts: int, rows: int) -> Tensor:
    return torch.randn(experts, rows, generator=torch.Generator().manual_seed(rows)).to(BF16)


def check(vllm: ModuleType, layer: Any, exact: Layer, k: int = 3, here: Tensor | None = None, **options: Any) -> Tensor:
    """Compare a forward with float64, allowing for torch's own error in bfloat16. here: True for each expert of this
    rank; None: all.
    """
    given = tokens(COUNT, vllm.HIDDEN, vllm.EXPERTS, k)
    got = vllm.forward(layer, given.x, given.ids, given.weights)
    assert got.shape == given.x.shape and got.dtype == BF16 and not got[COUNT:].any()
    ids = given.ids if here is None else torch.where(here[given.ids.clamp(min=0)], given.ids, -1)
    wanted, same = (exact(given.x, ids, given.weights, dtype, **options)[:COUNT] for dtype in (torch.float64, BF16))
    has_row = (ids[:COUNT] >= 0).any(dim=1)
    assert not got[:COUNT][~has_row].any() and has_row.sum() > COUNT // 2
    assert_close(got[:COUNT][has_row], wanted[has_row], same[has_row], int(has_row.sum()))
    return got


@pytest.mark.parametrize("name", RECIPES)
def test_each_checkpoint_is_the_layer_of_its_dequantised_weights(vllm: ModuleType, name: str) -> None:
    w13, w2 = vllm.weights_of(name)
    layer = loaded(vllm, name, w13, w2)
    kept = layer.quant_method.moe_kernel.fused_experts.held
    assert kept is None if name == "bf16" else kept.recipe.name == RECIPES[name]
    check(vllm, layer, Layer(w13.values, w2.values, rounds=rounding(RECIPES[name])))


@pytest.mark.parametrize("name", ["deepseek_v4", "compressed_mxfp4"])
def test_a_variable_asks_for_rows_in_fp8(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("GLULAM_MXFP4_ROWS", "fp8")
    w13 = held("mxfp4_fp8", vllm.EXPERTS, 2 * vllm.WIDTH, vllm.HIDDEN, seed=1, halves=2)
    w2 = held("mxfp4_fp8", vllm.EXPERTS, vllm.HIDDEN, vllm.WIDTH, seed=2)
    layer = loaded(vllm, name, w13, w2)
    assert layer.quant_method.moe_kernel.fused_experts.held.recipe.name == "mxfp4"
    check(vllm, layer, Layer(w13.values, w2.values, rounds=rounding("mxfp4")))


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_a_model_may_be_of_float16(vllm: ModuleType, name: str) -> None:
    w13, w2 = vllm.weights_of(name)
    layer = loaded(vllm, name, w13, w2, in_dtype=torch.float16)
    assert layer.w2_weight.dtype == (torch.float16 if name == "bf16" else torch.float8_e4m3fn)
    given = tokens(COUNT, vllm.HIDDEN, vllm.EXPERTS, vllm.K, padding=0)
    got = vllm.forward(layer, given.x.half(), given.ids, given.weights)
    assert got.dtype == torch.float16
    exact = Layer(w13.values, w2.values, rounds=rounding(RECIPES[name]))
    wanted, same = (exact(given.x, given.ids, given.weights, dtype) for dtype in (torch.float64, BF16))
    assert_close(got, wanted, same, COUNT)


@pytest.mark.parametrize("name", ["mxfp4", "bf16"])
def test_biases_are_those_of_the_checkpoint(vllm: ModuleType, name: str) -> None:
    w13, w2 = vllm.weights_of(name)
    layer = vllm.empty(name, has_bias=True)
    bias = [bias_of(*weight.values.shape[:2]) for weight in (w13, w2)]
    for expert in range(vllm.EXPERTS):
        parts = *bias[0][expert].chunk(2), bias[1][expert]
        named = zip((*vllm.SHARDS, "down_proj"), parts, strict=True)
        assert len(list(layer.load_weights((f"{expert}.{key}.bias", part) for key, part in named))) == 3
    vllm.load(layer, name, w13, w2)
    exact = [one.double() for one in bias]
    check(vllm, layer, Layer(w13.values, w2.values, b1=exact[0], b2=exact[1]))


@pytest.mark.parametrize("name", ["bf16", "mxfp4"])
def test_vllms_runner_computes_the_whole_layer_from_a_routers_logits(vllm: ModuleType, name: str) -> None:
    w13, w2 = vllm.weights_of(name)
    generator = torch.Generator().manual_seed(3)
    x, logits = (torch.randn(COUNT, size, generator=generator).to(BF16) for size in (vllm.HIDDEN, vllm.EXPERTS))
    got = vllm.run(name, w13, w2, x, logits)
    weights, ids = logits.float().softmax(dim=1).topk(vllm.K)
    weights = weights / weights.sum(dim=1, keepdim=True)
    exact, same = (Layer(w13.values, w2.values)(x, ids, weights, dtype) for dtype in (torch.float64, BF16))
    assert_close(got, exact, same, COUNT)


@pytest.mark.parametrize("name", ["bf16", "mxfp4", "modelopt_fp4"])
def test_experts_of_a_rank_need_not_be_neighbours(vllm: ModuleType, name: str) -> None:
    w13, w2 = vllm.weights_of(name)
    layer = loaded(vllm, name, w13, w2, parallel=vllm.SECOND_OF_TWO)
    assert layer.expert_map.tolist() == [-1, 0, -1, 1, -1] and len(layer.w2_weight) == 2
    check(vllm, layer, Layer(w13.values, w2.values), here=layer.expert_map >= 0)


@pytest.mark.parametrize("name", ["bf16", "modelopt_fp4"])
def test_the_routers_weights_may_multiply_rows(vllm: ModuleType, name: str) -> None:
    w13, w2 = vllm.weights_of(name)
    check(vllm, loaded(vllm, name, w13, w2, k=1, on_input=True), Layer(w13.values, w2.values), k=1, on_rows=True)


LIMIT = {"swiglu_limit": 1.5}
GATES: dict[str, tuple[dict[str, float], str, dict[str, float]]] = {
    "silu": (LIMIT, "clamped_swiglu", {"limit": 1.5, "alpha": 1.0, "offset": 0.0}),
    "gelu_tanh": ({}, "geglu", {}),
    "swigluoai_uninterleave": (
        {"swiglu_limit": 2.0, "swiglu_alpha": 1.25, "swiglu_beta": 0.5}, "clamped_swiglu",
        {"limit": 2.0, "alpha": 1.25, "offset": 0.5},
    ),
    "situ": (
        {"activation_situ_beta": 2.0, "activation_situ_linear_beta": 3.0}, "situ", {"gate_cap": 2.0, "up_cap": 3.0},
    ),
    "silu_no_mul": ({}, "silu", {}),
    "gelu_no_mul": ({}, "gelu", {}),
    "relu2_no_mul": ({}, "srelu", {}),
}  # fmt: skip
"""vLLM's activations and numbers, and what they are in Glulam's words."""


@pytest.mark.parametrize("name", ["bf16", "modelopt_fp4"])
@pytest.mark.parametrize("activation", GATES)
def test_activations_have_the_numbers_of_the_layer(vllm: ModuleType, name: str, activation: str) -> None:
    numbers, ours, params = GATES[activation]
    w13, w2 = vllm.weights_of(name, gated=not activation.endswith("_no_mul"))
    layer = loaded(vllm, name, w13, w2, activation=activation, numbers=numbers)
    check(vllm, layer, Layer(w13.values, w2.values, ours, params=params))


def test_swigluoai_without_numbers_multiplies_by_the_sigmoid_of_the_gate_itself(vllm: ModuleType) -> None:
    """Where vLLM's numbers are not set, its kernel has alpha 1 and beta 0, and not those of gpt-oss."""
    w13, w2 = vllm.weights_of("bf16")
    layer = loaded(vllm, "bf16", w13, w2, activation="swigluoai_uninterleave", numbers=LIMIT)
    params = {"limit": 1.5, "alpha": 1.0, "offset": 0.0}
    check(vllm, layer, Layer(w13.values, w2.values, "clamped_swiglu", params=params))


PARTS = "weight", "weight_scale"


@pytest.mark.parametrize("width", [96, 80])
def test_gpt_oss_has_biases_and_rows_of_gates_and_ups_in_turn(vllm: ModuleType, width: int) -> None:
    """An I that is no multiple of 32, as a rank's may be, is padded by zeros."""
    padded = 96
    experts, hidden = vllm.EXPERTS, vllm.HIDDEN
    halves, w2 = held("mxfp4", experts, 2 * width, hidden, seed=1, halves=2), held("mxfp4", experts, hidden, padded)
    w13 = Held(tuple(map(interleaved, halves.parts)), interleaved(halves.values))
    w2.parts[0][..., width // 2 :] = 0
    b13, b2 = bias_of(experts, 2 * width), bias_of(experts, hidden)
    config = vllm.get_quantization_config("gpt_oss_mxfp4")()
    layer = vllm.layer_of(config, width, activation="swigluoai", has_bias=True)
    assert layer.w13_weight.shape == (experts, 2 * padded, hidden // 2)
    tensors = {"w13_bias": b13, "w2_bias": b2}
    for stem, weight in (("w13", w13), ("w2", w2)):
        tensors |= {f"{stem}_{part}": stored for part, stored in zip(PARTS, weight.parts, strict=True)}
    for name, tensor in tensors.items():  # vLLM loads those of gpt-oss for all experts at once
        parameter = getattr(layer, name)
        stored = tensor.view(torch.uint8) if "_weight" in name else tensor
        parameter.weight_loader(parameter, stored, name, "w1", 0)
    layer.quant_method.process_weights_after_loading(layer)
    params = {"limit": 7.0, "alpha": 1.702, "offset": 1.0}
    biases = b13.double(), b2.double()
    check(vllm, layer, Layer(w13.values, w2.values[..., :width], "clamped_swiglu", "interleaved", params, *biases))


@pytest.mark.parametrize("name", ["bf16", "fp8", "mxfp8", "mxfp4", "modelopt_fp4"])
def test_a_result_goes_into_vllms_buffer_and_nothing_else_is_asked_for(vllm: ModuleType, name: str) -> None:
    layer = loaded(vllm, name, *vllm.weights_of(name))
    experts = layer.quant_method.moe_kernel.fused_experts
    given = tokens(COUNT, vllm.HIDDEN, vllm.EXPERTS, vllm.K)
    out = torch.full_like(given.x, torch.nan)
    sizes = COUNT, 2 * vllm.WIDTH, vllm.HIDDEN, vllm.K, vllm.EXPERTS, vllm.EXPERTS
    assert experts.workspace_shapes(*sizes, None, layer.activation) == ((0,), (0,), (COUNT, vllm.HIDDEN))
    assert experts.expects_unquantized_inputs
    experts.apply(
        out, given.x, layer.w13_weight, layer.w2_weight, given.weights, given.ids, layer.activation, 5, None,
        None, None, None, None, None, False,
    )  # fmt: skip
    assert out.any() and out.equal(vllm.forward(layer, given.x, given.ids, given.weights))


@pytest.mark.parametrize("name", ["bf16", "fp8", "mxfp8", "mxfp4", "modelopt_fp4", "compressed_nvfp4"])
def test_weights_that_vllm_loads_again_go_where_graphs_read_them(vllm: ModuleType, name: str) -> None:
    reload = importlib.import_module("vllm.model_executor.model_loader.reload")
    layer = vllm.empty(name)
    reload.record_metadata_for_reloading(layer)
    vllm.load(layer, name, *vllm.weights_of(name))
    kept = layer.quant_method.moe_kernel.fused_experts.held
    addresses = _addresses(layer, kept)
    given = tokens(COUNT, vllm.HIDDEN, vllm.EXPERTS, vllm.K)[:3]
    before = vllm.forward(layer, *given)

    w13, w2 = vllm.weights_of(name, seed=9)
    reload.initialize_layerwise_reload(layer)
    assert layer.w2_weight.is_meta if "compressed" not in name else layer.w2_weight_packed.is_meta
    for _ in layer.load_weights(vllm.tensors_of(vllm.CHECKPOINTS[name], w13, w2)):
        pass
    reload.finalize_layerwise_reload(layer, None)
    assert layer.quant_method.moe_kernel.fused_experts.held is kept and _addresses(layer, kept) == addresses
    fresh = vllm.load(vllm.empty(name), name, w13, w2)
    after = vllm.forward(layer, *given)
    assert after.equal(vllm.forward(fresh, *given)) and not after.equal(before) and before.any()


def _addresses(layer: Any, experts: Any) -> list[int]:
    """Return the memory addresses of a layer's parameters and of the experts prepared from them."""
    weights = () if experts is None else (experts.w1, experts.w2)
    prepared = [part for weight in weights for part in weight.parts if part is not None]
    return [tensor.data_ptr() for tensor in (*layer.parameters(), *prepared)]


def test_weights_are_prepared_once_however_often_vllm_asks(vllm: ModuleType) -> None:
    w13, w2 = vllm.weights_of("mxfp4")
    layer = loaded(vllm, "mxfp4", w13, w2)
    layer.quant_method.process_weights_after_loading(layer)
    check(vllm, layer, Layer(w13.values, w2.values))


@pytest.mark.parametrize(("first", "second"), [("mxfp8", "mxfp8_wide"), ("modelopt_fp4", "one_scale")])
def test_weights_that_are_prepared_otherwise_when_they_are_loaded_again_are_refused(
    vllm: ModuleType, first: str, second: str
) -> None:
    layer = loaded(vllm, first, *vllm.weights_of(first))
    delattr(layer, "_already_called_process_weights_after_loading")
    w13, w2 = vllm.weights_of(first if second == "one_scale" else second)
    if second == "one_scale":  # for both halves, where the first weights had one for each
        w13 = Held((*w13.parts[:2], torch.ones_like(w13.parts[2])), w13.values)
    with pytest.raises(RuntimeError, match="and other tensors than the layer's first ones, which had"):
        vllm.load(layer, first, w13, w2)


def test_weights_in_16_bits_are_read_where_vllm_keeps_them(vllm: ModuleType) -> None:
    w13, w2 = vllm.weights_of("bf16")
    layer = loaded(vllm, "bf16", w13, w2)
    check(vllm, layer, Layer(w13.values, w2.values))
    with torch.no_grad():
        layer.w2_weight.mul_(-2)
    check(vllm, layer, Layer(w13.values, -2 * w2.values))


def test_what_glulam_learns_after_loading_names_the_layer_and_the_remedy(vllm: ModuleType) -> None:
    layer = vllm.empty("modelopt_fp4")
    serving = importlib.import_module("glulam.integrations.serving")

    def refuse(*_: Any) -> None:
        raise serving.NotServed("no kernel")

    layer.quant_method.experts_of = refuse
    with pytest.raises(RuntimeError, match=r"experts: no kernel; leave nvfp4 out of GLULAM_VLLM"):
        layer.quant_method.process_weights_after_loading(layer)
