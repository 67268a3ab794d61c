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

from . import torchvision_ops

PLUGIN = Path(__file__).parents[2] / "plugins/glulam-sglang"


@pytest.fixture(scope="session")
def sglang() -> Iterator[ModuleType]:
    """`sglang_layers`, with the plugin registered as SGLang does it."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed; `make test-serving` installs it")
    torchvision_ops.define()
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
