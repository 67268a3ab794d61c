"""The SGLang plugin in SGLang's own classes, on the CPU: registration, and the layers it accepts.

Skipped if SGLang is not installed: `make test-serving` installs it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.engine_plugin import check_entry_point, check_needs_engine
from support.serving import BF16
from support.torchvision_ops import TORCHVISION_OPS

from glulam.integrations.serving import NotServed

pytest.importorskip("tomllib")  # plugins are for Python 3.11 and later

pytest_plugins = ["support.sglang_plugin"]

METHODS = {"bf16": "UnquantizedFusedMoEMethod", "fp8_block": "Fp8MoEMethod"}


# The package ----------------------------------------------------------------------------------------------------------


def test_without_sglang_the_package_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    check_needs_engine("sglang", monkeypatch)


def test_sglang_finds_the_plugin_by_its_entry_point() -> None:
    check_entry_point("sglang", "sglang.srt.plugins")


LOADED = """
import torch
library = torch.library.Library("torchvision", "DEF")
for operator in {operators!r}:
    library.define(operator)
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.arg_groups.choices import MOE_RUNNER_BACKEND_CHOICES
from sglang.srt.layers.quantization.mxfp4 import Mxfp4MoEMethod
print("glulam" in MOE_RUNNER_BACKEND_CHOICES, hasattr(Mxfp4MoEMethod.apply, "__wrapped__"))
"""


def test_sglang_loads_the_installed_plugin() -> None:
    try:
        importlib.metadata.version("glulam-sglang")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the plugin is not installed; `make test-serving` installs it")
    script = LOADED.format(operators=TORCHVISION_OPS)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True True"


def test_the_command_line_takes_the_backend(sglang: ModuleType) -> None:
    parser = argparse.ArgumentParser()
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
def unregistered(sglang: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list[Any]]]:
    """SGLang without the plugin registered; undoes every registration of the test afterwards."""
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
    assert len(hooks) == 17 and not list(registration.missing_of(hooks))


def test_another_version_is_a_warning(sglang: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with unregistered(sglang, monkeypatch) as (registration, hooks):
        lines: list[str] = []
        monkeypatch.setattr(registration.importlib.metadata, "version", lambda name: "0.5.99")
        monkeypatch.setattr(registration._log, "warning", lambda text, *values: lines.append(text % values))
        registration.register()
        assert len(hooks) == 17
    assert lines == ["glulam: SGLang 0.5.99 was not tested with this plugin; 0.5.23 was"]


# Layers that are left -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def state(sglang: ModuleType, name: str) -> Iterator[None]:
    """Context with the engine in a state that this backend refuses, by name."""
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


def test_dispatch_by_an_all_to_all_is_refused(sglang: ModuleType) -> None:
    """SGLang chooses runners for it where it reads its arguments."""
    with state(sglang, "a2a"), pytest.raises(ValueError, match="--moe-a2a-backend.* choose another"):
        sglang.layer_of("bf16")


def test_methods_that_wrap_another_are_not_served(sglang: ModuleType) -> None:
    reasons = importlib.import_module("glulam_sglang.reasons")
    layer = sglang.layer_of("bf16")
    with pytest.raises(NotServed, match="another method wraps"):
        reasons.check_layer(object(), layer, layer.moe_runner_config)


def test_a_layer_that_was_left_is_loaded_and_run_as_by_its_backend(
    sglang: ModuleType, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    layer = sglang.layer_of("fp8_block", no_combine=True)
    utils = importlib.import_module("sglang.srt.layers.moe.utils")
    method = type(layer.quant_method)

    def note(*_: Any) -> None:
        seen.append(utils.get_moe_runner_backend().value)

    monkeypatch.setattr(method, "process_weights_after_loading_block_quant", note)
    layer.quant_method.process_weights_after_loading(layer)
    monkeypatch.setattr(layer.quant_method.runner, "run", note)
    monkeypatch.setattr(method, "get_triton_quant_info", note)
    layer.quant_method.apply(layer, SimpleNamespace(hidden_states=torch.zeros(1, sglang.HIDDEN)))
    assert seen == ["triton"] * 3 and utils.get_moe_runner_backend().value == "glulam"


def test_nvfp4_is_left_to_marlin(sglang: ModuleType, logged: list[str]) -> None:
    layer = sglang.layer_of("nvfp4", no_combine=True)
    assert layer.runner_backend.value == "marlin" and "marlin runs them" in logged[0]
    assert not layer.should_fuse_routed_scaling_factor_in_topk


def test_fp8_in_other_blocks_is_left(sglang: ModuleType, logged: list[str]) -> None:
    """Scales of a whole weight, and weights that are quantised at load."""
    configs = [sglang.Fp8Config(is_checkpoint_fp8_serialized=serialized) for serialized in (True, False)]
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


@pytest.mark.parametrize(("kind", "hidden", "dtype"), [("deepseek_v4", 80, BF16), ("mxfp4", 64, torch.float16)])
def test_widths_and_dtypes_without_kernels_are_refused(
    sglang: ModuleType, kind: str, hidden: int, dtype: torch.dtype
) -> None:
    with pytest.raises(ValueError, match="takes multiples of 32|takes bfloat16"):
        sglang.layer_of(kind, hidden_size=hidden, params_dtype=dtype)
