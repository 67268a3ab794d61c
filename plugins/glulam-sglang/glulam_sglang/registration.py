"""Registration of the backend with SGLang: its command-line name, its runner and its hooks.

It first checks that SGLang has everything that the plugin uses.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import logging
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from sglang.srt.arg_groups import choices
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig, register_moe_runner_core
from sglang.srt.layers.moe.utils import get_moe_runner_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from . import NAME

TESTED = ("0.5.23",)
"""Versions of SGLang with which this plugin was tested."""
FIELDS = (
    "activation", "apply_router_weight_on_input", "gate_up_interleaved", "gemm1_alpha", "gemm1_beta",
    "gemm1_clamp_limit", "hidden_size", "is_gated", "layer", "no_combine", "params_dtype", "routed_scaling_factor",
    "silu_mul_keep_fp32", "swiglu_limit", "top_k",
)  # fmt: skip
"""Fields of SGLang's MoeRunnerConfig that this plugin reads."""
LAYER = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.__init__"
_log = logging.getLogger(__name__)
_registered = False


def register() -> None:
    """Register the backend's name, runner and hooks with SGLang; further calls change nothing.

    If SGLang lacks something that the plugin needs, a backend is registered whose first layer raises an error.
    """
    global _registered
    if _registered:
        return
    _registered = True
    choices.add_moe_runner_backend_choices([NAME])
    choices.add_mxfp8_moe_runner_backend_choices([NAME])
    version = importlib.metadata.version("sglang")
    try:
        from .hooks import HOOKS
        from .runner import GlulamRunnerCore

        missing = list(missing_of(HOOKS))
    except (ImportError, AttributeError) as error:
        missing = [str(error)]
    if missing:
        _refuse(f"glulam: SGLang {version} lacks what this plugin needs: {'; '.join(missing)}; tested is {TESTED[-1]}")
        return
    if version not in TESTED:
        _log.warning("glulam: SGLang %s was not tested with this plugin; %s was", version, TESTED[-1])
    register_moe_runner_core(NAME, GlulamRunnerCore)
    for path, (hook, _) in HOOKS.items():
        HookRegistry.register(path, hook, HookType.AROUND)


def missing_of(hooks: dict[str, tuple[Callable[..., Any], tuple[str, ...]]]) -> Iterator[str]:
    """Yield the name of each function, parameter or field that this plugin uses and this version of SGLang lacks."""
    for path, (_, names) in hooks.items():
        try:
            found = inspect.signature(pkgutil.resolve_name(path)).parameters
        except (ImportError, AttributeError):
            yield path
            continue
        yield from (f"parameter {name} of {path}" for name in names if name not in found)
    fields = {field.name for field in dataclasses.fields(MoeRunnerConfig)}
    yield from (f"MoeRunnerConfig.{name}" for name in FIELDS if name not in fields)


def _refuse(message: str) -> None:
    """Register a backend whose first layer raises RuntimeError(message), instead of the real one."""
    _log.error(message)

    def core(config: Any) -> NoReturn:
        raise RuntimeError(message)

    def layer(original: Callable[..., Any], self: Any, *arguments: Any, **named: Any) -> None:
        if get_moe_runner_backend().value == NAME:
            raise RuntimeError(message)
        original(self, *arguments, **named)

    register_moe_runner_core(NAME, core)
    HookRegistry.register(LAYER, layer, HookType.AROUND)
