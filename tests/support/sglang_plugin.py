"""Fixtures of tests of the plugin of SGLang, which import SGLang where the first of them is asked for.

Tests that ask for one are skipped where SGLang is not installed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

PLUGIN = Path(__file__).parents[2] / "plugins/glulam-sglang"
TORCHVISION_OPS = ("nms(Tensor a, Tensor b, float c) -> Tensor", "qnms(Tensor a, Tensor b, float c) -> Tensor")
"""Operators that torchvision's wheel for CUDA expects of torch, and a torch for the CPU lacks."""


@pytest.fixture(scope="session")
def sglang() -> Iterator[ModuleType]:
    """`sglang_layers`, with the plugin registered as SGLang does it."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed; `make test-serving` installs it")
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in TORCHVISION_OPS:
        if not hasattr(torch.ops.torchvision, operator.partition("(")[0]):
            library.define(operator)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PLUGIN))
        importlib.import_module("glulam_sglang").register()
        importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()
        layers = importlib.import_module("support.sglang_layers")
        with layers.engine():
            yield layers


@pytest.fixture
def logged(sglang: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings that the plugin logs, each once."""
    lines: list[str] = []
    layers = importlib.import_module("glulam_sglang.layers")
    monkeypatch.setattr(layers, "_told", set())
    monkeypatch.setattr(layers._log, "warning", lambda text, *values: lines.append(text % values))
    return lines
