"""The plugin of SGLang in SGLang's own classes, on the CPU: registration, choice, and a forward of each format.

Skipped where SGLang is not installed: `make test-serving` installs it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tomllib
import torch
from support.criterion import assert_close
from support.serving import BF16, Layer, rounding, tokens

pytest_plugins = ["support.sglang_plugin"]

PLUGIN = Path(__file__).parents[2] / "plugins/glulam-sglang"
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
    """A layer of the engine with weights, and these."""
    layer = sglang.layer_of(kind, **options)
    weights = sglang.Weights(kind, gated=options.get("is_gated", True))
    weights.load(layer)
    return layer, weights


def expected(weights: Any, **options: Any) -> Layer:
    biases = [None if one is None else one.double() for one in (weights.b13, weights.b2)]
    given: dict[str, Any] = {"b1": biases[0], "b2": biases[1], "rounds": rounding(RECIPES[weights.kind])}
    if weights.kind == "gpt_oss":
        given |= {"activation": "clamped_swiglu", "layout": "interleaved"}
    return Layer(weights.w13.values, weights.w2.values, **{**given, **options})


def check(
    sglang: ModuleType, layer: Any, exact_layer: Layer, k: int = 3, factor: float = 1.0, on_rows: bool = False
) -> None:
    """The engine's forward against float64; padded tokens are NaN and give 0."""
    x, ids, weights, _ = tokens(COUNT, sglang.HIDDEN, sglang.EXPERTS, k)
    got = layer(x.clone(), sglang.standard(ids, weights))
    assert got.dtype == BF16 and got.shape == x.shape and not got[COUNT:].any()
    exact, same = (factor * exact_layer(x, ids, weights, dtype, on_rows) for dtype in (torch.float64, BF16))
    assert_close(got[:COUNT], exact[:COUNT], same[:COUNT], COUNT)


# The package ----------------------------------------------------------------------------------------------------------


def test_without_sglang_the_package_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    spec = importlib.util.spec_from_file_location("alone", PLUGIN / "glulam_sglang/__init__.py")
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match="a plugin of SGLang, which is not installed; install sglang"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_sglang_finds_the_plugin_by_its_entry_point() -> None:
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {"sglang.srt.plugins": {"glulam": "glulam_sglang:register"}}


def test_the_command_line_takes_the_backend(sglang: ModuleType) -> None:
    parser = __import__("argparse").ArgumentParser()
    importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    given = parser.parse_args(["--model-path", "any", "--moe-runner-backend", "glulam"])
    assert given.moe_runner_backend == "glulam"
    choices = importlib.import_module("sglang.srt.arg_groups.choices")
    assert "glulam" in choices.MXFP8_MOE_RUNNER_BACKEND_CHOICES


def test_registering_again_changes_nothing(sglang: ModuleType) -> None:
    choices = importlib.import_module("sglang.srt.arg_groups.choices").MOE_RUNNER_BACKEND_CHOICES
    before = list(choices)
    importlib.import_module("glulam_sglang").register()
    assert choices == before and choices.count("glulam") == 1


@contextlib.contextmanager
def unregistered(sglang: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """As in a process where the plugin was not registered: nothing that is registered here stays."""
    registration = importlib.import_module("glulam_sglang.registration")
    runner = importlib.import_module("sglang.srt.layers.moe.moe_runner.runner")
    hooks: list[tuple[Any, ...]] = []
    monkeypatch.setattr(registration, "_registered", False)
    monkeypatch.setattr(runner, "_CUSTOM_RUNNER_CORE_FACTORIES", {})
    monkeypatch.setattr(registration.HookRegistry, "register", lambda *given: hooks.append(given))
    for name in ("add_moe_runner_backend_choices", "add_mxfp8_moe_runner_backend_choices"):
        monkeypatch.setattr(registration.choices, name, lambda names: None)
    yield registration, hooks


def test_a_missing_name_is_an_error_of_the_first_layer(sglang: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang logs what a plugin raises and goes on, and so it must not raise earlier."""
    with unregistered(sglang, monkeypatch) as (registration, hooks):
        hook_module = importlib.import_module("glulam_sglang.hooks")
        name = "sglang.srt.layers.quantization.mxfp4.Mxfp4MoEMethod.gone"
        renamed = {name: (lambda original: None, ()), **hook_module.HOOKS}
        path = "sglang.srt.layers.quantization.fp8.Fp8MoEMethod.apply"
        renamed[path] = (hook_module.apply, ("layer", "tokens"))
        monkeypatch.setattr(hook_module, "HOOKS", renamed)
        registration.register()
        ((target, hook, _),) = hooks
        assert target.endswith("FusedMoE.__init__")
        with pytest.raises(RuntimeError, match=re.escape(name)) as error:
            hook(sglang.FusedMoE.__init__, None)
        assert "parameter tokens of" in str(error.value) and "tested is 0.5.23" in str(error.value)
        with sglang.running("triton"):
            hook(lambda self: None, None)


def test_what_the_plugin_needs_is_there(sglang: ModuleType) -> None:
    registration = importlib.import_module("glulam_sglang.registration")
    hooks = importlib.import_module("glulam_sglang.hooks").HOOKS
    assert len(hooks) == 16 and not list(registration.missing_of(hooks))


def test_another_version_is_a_warning(sglang: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with unregistered(sglang, monkeypatch) as (registration, hooks):
        lines: list[str] = []
        monkeypatch.setattr(registration.importlib.metadata, "version", lambda name: "0.5.99")
        monkeypatch.setattr(registration._log, "warning", lambda text, *values: lines.append(text % values))
        registration.register()
        assert len(hooks) == 16
    assert lines == ["glulam: SGLang 0.5.99 was not tested with this plugin; 0.5.23 was"]


# Layers that are taken ------------------------------------------------------------------------------------------------


@each_kind
def test_a_forward_of_each_format_is_that_of_its_dequantised_weights(sglang: ModuleType, kind: str) -> None:
    layer, weights = loaded(sglang, kind)
    assert type(layer.quant_method).__name__ == METHODS[kind] and layer.runner_backend.value == "glulam"
    assert layer.runner.runner_backend.value == "glulam"
    assert layer.quant_method.glulam_taken.experts(layer).recipe.name == RECIPES[kind]
    check(sglang, layer, expected(weights))


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


# Layers that are left -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def state(sglang: ModuleType, name: str) -> Any:
    """The engine in a state that this backend does not serve."""
    bags = {
        "eplb": (lambda: sglang.get_exec().moe, {"enable_eplb": True}),
        "offload": (lambda: sglang.get_exec().offload, {"cpu_offload_gb": 4}),
        "lora": (sglang.get_lora, {"enable_lora": True}),
        "dwdp": (sglang.get_parallel, {"dwdp_size": 2}),
    }  # fmt: skip
    if name == "a2a":
        with sglang.running("glulam", a2a="deepep"):
            yield
    elif name in bags:
        bag, values = bags[name]
        with bag().override(**values):
            yield
    else:
        yield


LEFT: dict[str, tuple[dict[str, Any], str]] = {
    "no_combine": ({"no_combine": True}, "results of single choices"),
    "eplb": ({}, "--enable-eplb"),
    "lora": ({}, "--enable-lora"),
    "offload": ({}, "offloaded to the CPU"),
    "dwdp": ({}, "DWDP"),
    "on several rows": ({"apply_router_weight_on_input": True}, "tokens of several experts"),
    "on rows with biases": ({"apply_router_weight_on_input": True, "top_k": 1, "with_bias": True}, "multiply biases"),
    "gelu": ({"activation": "gelu"}, "exact by erf"),
    "clamped after": ({"gemm1_clamp_limit": 7.0}, "clamped after its activation"),
    "two limits": ({"gemm1_alpha": 1.7, "gemm1_clamp_limit": 7.0, "swiglu_limit": 10.0}, "in one layer"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.parametrize("kind", ["bf16", "fp8_block"])
def test_layers_that_are_not_served_run_on_triton_and_the_log_says_why(
    sglang: ModuleType, logged: list[str], kind: str, name: str
) -> None:
    options, why = LEFT[name]
    with state(sglang, name):
        layers = [sglang.layer_of(kind, **options) for _ in range(2)]
    assert [layer.runner_backend.value for layer in layers] == ["triton"] * 2
    (line,) = logged
    assert why in line and METHODS[kind] in line and line.endswith("SGLang's backend triton runs them")


def test_dispatch_by_an_all_to_all_is_left(sglang: ModuleType, logged: list[str]) -> None:
    reasons = importlib.import_module("glulam_sglang.reasons")
    layer, _ = loaded(sglang, "bf16")
    with state(sglang, "a2a"), pytest.raises(sglang_not_served(), match="--moe-a2a-backend"):
        reasons.check_layer(layer.quant_method, layer, layer.moe_runner_config)
    with pytest.raises(sglang_not_served(), match="another method wraps"):
        reasons.check_layer(object(), layer, layer.moe_runner_config)


def sglang_not_served() -> type[Exception]:
    from glulam.integrations.serving import NotServed

    return NotServed


def test_a_layer_that_was_left_is_loaded_and_run_as_by_its_backend(
    sglang: ModuleType, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    layer = sglang.layer_of("fp8_block", no_combine=True)
    utils = importlib.import_module("sglang.srt.layers.moe.utils")
    method = type(layer.quant_method)

    def note(*_: Any) -> None:
        seen.append(utils.get_moe_runner_backend().value)

    for name in ("process_weights_after_loading_block_quant",):
        monkeypatch.setattr(method, name, note)
    layer.quant_method.process_weights_after_loading(layer)
    monkeypatch.setattr(layer.quant_method.runner, "run", note)
    monkeypatch.setattr(method, "get_triton_quant_info", note)
    layer.quant_method.apply(layer, SimpleNamespace(hidden_states=torch.zeros(1, sglang.HIDDEN)))
    assert seen == ["triton"] * 3 and utils.get_moe_runner_backend().value == "glulam"


def test_nvfp4_is_left_to_marlin(sglang: ModuleType, logged: list[str]) -> None:
    layer = sglang.layer_of("nvfp4", no_combine=True)
    assert layer.runner_backend.value == "marlin" and "marlin runs them" in logged[0]
    assert not layer.should_fuse_routed_scaling_factor_in_topk


def fp8_per_tensor(sglang: ModuleType) -> Any:
    return sglang.Fp8Config(is_checkpoint_fp8_serialized=True)


def test_fp8_in_other_blocks_is_left(sglang: ModuleType, logged: list[str]) -> None:
    """Scales of a whole weight, and weights that are quantised at load."""
    configs = fp8_per_tensor(sglang), sglang.Fp8Config(is_checkpoint_fp8_serialized=False)
    layers = [sglang.layer_of("fp8", quant_config=config) for config in configs]
    assert [layer.runner_backend.value for layer in layers] == ["triton"] * 2
    assert "weight_block_size None; served is [128, 128]" in logged[0] and "quantised while they load" in logged[1]


@pytest.mark.parametrize("kind", ["deepseek_v4", "gpt_oss"])
def test_mxfp4_that_is_not_served_is_refused(sglang: ModuleType, kind: str) -> None:
    with pytest.raises(ValueError, match="results of single choices .* choose another --moe-runner-backend, as auto"):
        sglang.layer_of(kind, no_combine=True)


def test_mxfp8_that_is_not_served_is_left_where_the_engine_converts_it(
    sglang: ModuleType, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sglang.layer_of("mxfp8", no_combine=True).runner_backend.value == "triton"
    hooks = importlib.import_module("glulam_sglang.hooks")
    monkeypatch.setattr(hooks, "_has_mxfp8_linear", lambda: True)
    with pytest.raises(ValueError, match="Fp8MoEMethod are not served"):
        sglang.layer_of("mxfp8", no_combine=True)


def test_subclasses_of_methods_are_refused_or_left(sglang: ModuleType, logged: list[str]) -> None:
    config = sglang.config_of("fp8_block")
    own = type("OwnMethod", (sglang.Fp8MoEMethod,), {})
    with pytest.raises(ValueError, match="OwnMethod has its own way to hold weights"):
        sglang.layer_of("fp8_block", quant_method=own(config))


@pytest.mark.parametrize(("width", "dtype"), [(48, BF16), (64, torch.float16)])
def test_widths_and_dtypes_without_kernels_are_refused(sglang: ModuleType, width: int, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="takes multiples of 32|takes bfloat16"):
        sglang.layer_of("mxfp4", intermediate_size=width, params_dtype=dtype, activation="silu")


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
