"""The vLLM plugin in vLLM's own classes, on the CPU: the layers it accepts.

Skipped if vLLM is not installed: `make test-serving` installs it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import re
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.engine_plugin import check_entry_point, check_needs_engine
from support.serving import Held

pytest.importorskip("tomllib")  # plugins are for Python 3.11 and later

pytest_plugins = ["support.vllm_plugin"]

METHODS = {
    "bf16": "GlulamUnquantizedMoEMethod", "fp8": "GlulamFp8MoEMethod", "mxfp8": "GlulamModelOptMxFp8FusedMoE",
    "modelopt_fp4": "GlulamModelOptNvFp4FusedMoE", "modelopt_mixed": "GlulamModelOptNvFp4FusedMoE",
    "deepseek_v4": "GlulamMxfp4MoEMethod", "mxfp4": "GlulamMxfp4MoEMethod",
    "compressed_mxfp4": "GlulamCompressedTensorsMxfp4MoEMethod",
    "compressed_mxfp4_fp8": "GlulamCompressedTensorsW4A8Mxfp4MoEMethod",
    "compressed_mxfp8": "GlulamCompressedTensorsMxfp8MoEMethod",
    "compressed_fp8": "GlulamCompressedTensorsFp8MoEMethod",
    "compressed_nvfp4": "GlulamCompressedTensorsNvfp4MoEMethod",
}  # fmt: skip


# The package ----------------------------------------------------------------------------------------------------------


def test_without_vllm_the_package_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    check_needs_engine("vllm", monkeypatch)


def test_vllm_finds_the_plugin_by_its_entry_point() -> None:
    check_entry_point("vllm", "vllm.general_plugins")


@pytest.mark.parametrize(
    ("value", "formats"),
    [
        (None, ""), ("", ""), ("0", ""), ("1", "bf16 fp8 mxfp8 mxfp4 nvfp4"), ("bf16", "bf16"),
        ("MXFP4, bf16", "bf16 mxfp4"),
    ],
)  # fmt: skip
def test_the_variable_chooses_formats(
    vllm: ModuleType, monkeypatch: pytest.MonkeyPatch, value: str | None, formats: str
) -> None:
    monkeypatch.delenv("GLULAM_VLLM")
    if value is not None:
        monkeypatch.setenv("GLULAM_VLLM", value)
    assert importlib.import_module("glulam_vllm.choice").chosen() == set(formats.split())


@pytest.mark.parametrize("value", ["yes", "bf16,int4", "mxfp4,"])
def test_a_format_that_there_is_none_is_an_error(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("GLULAM_VLLM", value)
    with pytest.raises(ValueError, match=r"GLULAM_VLLM is '.*', which names '.*'; give 1, 0, or some of bf16,fp8"):
        importlib.import_module("glulam_vllm").register()


def test_registering_again_changes_nothing(vllm: ModuleType) -> None:
    custom_op = importlib.import_module("vllm.model_executor.custom_op")
    quantization = importlib.import_module("vllm.model_executor.layers.quantization")
    configs = importlib.import_module("glulam_vllm.configs").CONFIGS
    known = list(quantization.QUANTIZATION_METHODS)
    importlib.import_module("glulam_vllm").register()
    assert custom_op.op_registry_oot["UnquantizedFusedMoEMethod"].__name__ == "GlulamUnquantizedMoEMethod"
    assert {name: quantization.get_quantization_config(name) for name in configs} == configs
    assert known == quantization.QUANTIZATION_METHODS and set(configs) <= set(known)


def test_another_plugins_method_is_named(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    custom_op = importlib.import_module("vllm.model_executor.custom_op")
    monkeypatch.setitem(custom_op.op_registry_oot, "UnquantizedFusedMoEMethod", Held)
    with pytest.raises(RuntimeError, match=r"by support\.serving\.Held; leave bf16 out of GLULAM_VLLM"):
        importlib.import_module("glulam_vllm").register()


# Which layers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_each_checkpoint_gets_glulams_method(vllm: ModuleType, logged: list[str], name: str) -> None:
    method = vllm.empty(name).quant_method
    assert type(method).__name__ == METHODS[name] and method.experts_cls.__name__ == "GlulamExperts"
    assert not method.is_monolithic and not (name != "bf16" and method.supports_eplb)
    (line,) = logged
    assert re.fullmatch(r"Glulam computes (bf16|fp8|mxfp8|mxfp4|nvfp4) experts", line)


@pytest.mark.parametrize(
    ("changes", "method"),
    [
        ({"_resolved_expert_dtype": "fp8"}, "GlulamFp8MoEMethod"),
        ({"_resolved_moe_quant_algo": "NVFP4"}, "GlulamModelOptNvFp4FusedMoE"),
        ({"_is_nvfp4_expert_layer": lambda prefix: prefix.endswith("experts")}, "GlulamModelOptNvFp4FusedMoE"),
        ({"_is_nvfp4_expert_layer": lambda prefix: False}, "GlulamMxfp4MoEMethod"),
        ({"ignored_layers": ["model.layers.0.mlp.experts"]}, "GlulamUnquantizedMoEMethod"),
    ],
)
def test_experts_of_deepseek_v4_have_the_format_that_its_configuration_tells(
    vllm: ModuleType, changes: dict[str, Any], method: str
) -> None:
    config = vllm.config_of(vllm.CHECKPOINTS["deepseek_v4"])
    vars(config).update(changes)
    assert type(vllm.layer_of(config, 128).quant_method).__name__ == method


@pytest.mark.parametrize(
    ("algorithm", "method"),
    [
        ("FP8_PB_WO", "GlulamFp8MoEMethod"), ("W4A16_NVFP4", "GlulamModelOptNvFp4FusedMoE"),
        ("MXFP8", "GlulamModelOptMxFp8FusedMoE"), ("FP8", "ModelOptFp8MoEMethod"),
    ],
)  # fmt: skip
def test_experts_of_mixed_checkpoints_have_the_format_of_their_layer(
    vllm: ModuleType, logged: list[str], algorithm: str, method: str
) -> None:
    checkpoint = vllm.CHECKPOINTS["modelopt_mixed"]
    layers = {name: {"quant_algo": algorithm} for name in checkpoint.config["quantized_layers"]}
    config = vllm.config_of(checkpoint._replace(config={**checkpoint.config, "quantized_layers": layers}))
    assert type(vllm.layer_of(config, 128).quant_method).__name__ == method
    left = "Glulam leaves FP8 experts to vLLM: served are MXFP4, NVFP4, MXFP8 and FP8 in blocks"
    assert (logged == [left]) == (algorithm == "FP8")
    config.exclude_modules = ["model.layers.0*"]
    assert type(vllm.layer_of(config, 128).quant_method).__name__ == "GlulamUnquantizedMoEMethod"


@pytest.mark.parametrize("value", ["0", "nvfp4"])
def test_formats_that_are_not_chosen_are_vllms(
    vllm: ModuleType, monkeypatch: pytest.MonkeyPatch, logged: list[str], value: str
) -> None:
    monkeypatch.setenv("GLULAM_VLLM", value)
    method = vllm.empty("bf16").quant_method
    assert method.experts_cls.__name__ != "GlulamExperts"
    assert type(vllm.empty("mxfp8").quant_method).__name__ == "ModelOptMxFp8FusedMoE" and not logged


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "backend": ({"moe_backend": "marlin"}, "another backend is asked for (--moe-backend marlin)"),
    "lora": ({"is_lora_enabled": True}, "kernel does not support LoRA"),
    "gelu": ({"activation": "gelu"}, "gated activation 'gelu' is exact by erf"),
    "swiglustep": ({"activation": "swiglustep"}, "gated activation 'swiglustep'"),
    "relu2": ({"activation": "relu2"}, "gated activation 'relu2'"),
    "gelu_tanh_no_mul": ({"activation": "gelu_tanh_no_mul"}, "activation 'gelu_tanh' without a gate"),
    "situ": ({"activation": "situ"}, "activation 'situ' without beta"),
    "limit": ({"activation": "swigluoai_uninterleave"}, "activation 'swigluoai_uninterleave' without a limit"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_layers_that_glulam_does_not_compute_are_left_to_vllm(vllm: ModuleType, logged: list[str], case: str) -> None:
    options, reason = REFUSED[case]
    layers = importlib.import_module("glulam_vllm.layers")
    moe = vllm.moe_config(**options)
    for format in ("bf16", "mxfp4"):
        assert not layers.is_served(moe, format)
        assert logged.pop().startswith(f"Glulam leaves {format} experts to vLLM: {reason}")


PARALLEL: dict[str, tuple[dict[str, Any], str]] = {
    "eplb": ({"use_ep": True, "ep_size": 2, "enable_eplb": True}, "experts move between ranks (--enable-eplb)"),
    "gather": ({"use_ep": True, "dp_size": 2}, "tokens go between ranks (--all2all-backend allgather_reducescatter)"),
    "batched": (
        {"use_ep": True, "dp_size": 2, "all2all_backend": "deepep_low_latency"},
        "tokens go between ranks (--all2all-backend deepep_low_latency)",
    ),
    "passthrough": ({"all2all_backend": "passthrough"}, "tokens go between ranks (--all2all-backend passthrough)"),
}  # fmt: skip


@pytest.mark.parametrize("case", PARALLEL)
def test_tokens_or_weights_that_go_between_ranks_are_left_to_vllm(vllm: ModuleType, case: str) -> None:
    changes, reason = PARALLEL[case]
    experts = importlib.import_module("glulam_vllm.experts").GlulamExperts
    formats = importlib.import_module("vllm.model_executor.layers.fused_moe.modular_kernel").FusedMoEActivationFormat
    moe = vllm.moe_config(parallel=dataclasses.replace(vllm.ALONE, **changes))
    supported, told = experts.is_supported_config(experts, moe, None, None, formats.Standard)
    assert not supported and told.startswith(reason)


def test_what_vllm_asks_of_experts(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("glulam_vllm.experts")
    keys = importlib.import_module("vllm.model_executor.layers.quantization.utils.quant_utils")
    kernel = importlib.import_module("vllm.model_executor.layers.fused_moe.modular_kernel")
    experts, standard = module.GlulamExperts, kernel.FusedMoEActivationFormat.Standard
    moe = vllm.moe_config()
    for key in (None, *module.WEIGHT_KEYS.values()):
        assert experts.is_supported_config(experts, moe, key, None, standard) == (True, None)
    batched = kernel.FusedMoEActivationFormat.BatchedExperts
    for key, layout, reason in (
        (keys.kFp8StaticTensorSym, standard, "quantization scheme"), (None, batched, "activation format"),
    ):  # fmt: skip
        supported, told = experts.is_supported_config(experts, moe, key, None, layout)
        assert not supported and reason in told
    monkeypatch.setattr(kernel.envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    assert experts.is_supported_config(experts, moe, None, None, standard)[1] == (
        "kernel does not support batch invariance"
    )


@pytest.mark.parametrize(
    ("name", "width", "reason"),
    [
        ("fp8", 192, "fp8 experts to vLLM: a rank's intermediate size 192 ends inside a block of 128"),
        ("mxfp4", 80, "mxfp4 experts to vLLM: moe: I is 80; recipe 'mxfp4_weight_only' takes multiples of 32"),
        ("modelopt_fp4", 80, "nvfp4 experts to vLLM: moe: I is 80; recipe 'nvfp4_weight_only' takes multiples of 32"),
    ],
)
def test_widths_that_kernels_do_not_read_are_left_to_vllm(
    vllm: ModuleType, logged: list[str], name: str, width: int, reason: str
) -> None:
    with contextlib.suppress(NotImplementedError):  # vLLM itself has no 4-bit kernels on this CPU
        method = vllm.empty(name, width=width).quant_method
        assert method.experts_cls is None or method.experts_cls.__name__ != "GlulamExperts"
    (line,) = logged
    assert line.startswith(f"Glulam leaves {reason}")


def test_4_bits_in_a_model_of_float16_are_left_to_vllm(vllm: ModuleType) -> None:
    layers = importlib.import_module("glulam_vllm.layers")
    moe = vllm.moe_config(in_dtype=torch.float16)
    served = [format for format in ("bf16", "fp8", "mxfp8", "mxfp4", "nvfp4") if layers.is_served(moe, format)]
    assert served == ["bf16", "fp8", "mxfp8"]
    assert not layers.is_served(vllm.moe_config(in_dtype=torch.float32), "mxfp4")


def test_weights_that_vllm_moves_are_left_to_vllm(vllm: ModuleType) -> None:
    config = importlib.import_module("vllm.config")
    experts = importlib.import_module("glulam_vllm.experts")
    offload = config.get_current_vllm_config().offload_config
    for part, name in ((offload.uva, "cpu_offload_gb"), (offload.prefetch, "offload_group_size")):
        setattr(part, name, 1)
        try:
            assert experts.reason_against(vllm.moe_config()) == "weights are offloaded to the CPU"
        finally:
            setattr(part, name, 0)
    assert experts.reason_against(vllm.moe_config()) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weight_block_size": None}, "blocks of scales are whole tensors or rows; served are [128, 128]"),
        ({"weight_block_size": [64, 64]}, "blocks of scales are [64, 64]; served are [128, 128]"),
        ({"ignored_layers": ["model.layers.0.mlp.experts"]}, ""),
    ],
)
def test_fp8_that_is_not_in_blocks_of_128_is_left_to_vllm(
    vllm: ModuleType, logged: list[str], changes: dict[str, Any], reason: str
) -> None:
    config = vllm.config_of(vllm.CHECKPOINTS["fp8"]._replace(config={**vllm.FP8, **changes}))
    method = vllm.layer_of(config, 128).quant_method
    is_ignored = "ignored_layers" in changes
    assert type(method).__name__ == ("GlulamUnquantizedMoEMethod" if is_ignored else "Fp8MoEMethod")
    told = "Glulam computes bf16 experts" if is_ignored else f"Glulam leaves fp8 experts to vLLM: {reason}"
    assert logged == [told]


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ({"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}, "fp8 experts to vLLM: blocks of"),
        ({"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}, "compressed-tensors' experts"),
    ],
)
def test_other_formats_of_compressed_tensors_are_left_to_vllm(
    vllm: ModuleType, logged: list[str], weights: dict[str, Any], reason: str
) -> None:
    rows = {**weights, "strategy": "token", "dynamic": True}
    checkpoint = vllm.CHECKPOINTS["compressed_fp8"]._replace(config=vllm.compressed(weights, rows, "float-quantized"))
    with contextlib.suppress(NotImplementedError, ValueError):  # vLLM itself may have no such kernels on this CPU
        assert not type(vllm.layer_of(vllm.config_of(checkpoint)).quant_method).__name__.startswith("Glulam")
    (line,) = logged
    assert line.startswith(f"Glulam leaves {reason}")


def test_a_checkpoint_that_is_to_be_quantised_again_is_left_to_vllm(vllm: ModuleType, logged: list[str]) -> None:
    config = vllm.config_of(vllm.CHECKPOINTS["fp8"])
    config.online_quantization_config = object()
    assert not config._served(SimpleNamespace(moe_config=vllm.moe_config(128)), vllm.NAME)
    assert logged == ["Glulam leaves fp8 experts to vLLM: --quantization asks for another format than the checkpoint's"]
