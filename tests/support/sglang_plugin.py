"""Fixtures for tests of the SGLang plugin.

They import SGLang when first used, and skip tests if it is not installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest

from .engine_plugin import installed


@pytest.fixture(scope="session")
def sglang() -> Iterator[ModuleType]:
    """Module `sglang_layers`, with the plugin registered as SGLang registers it."""
    with installed("sglang"):
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
