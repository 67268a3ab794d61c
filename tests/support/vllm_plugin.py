"""Fixtures for tests of the vLLM plugin; they import vLLM when first used, and skip tests if it is not installed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest

from .engine_plugin import installed


@pytest.fixture(scope="session")
def vllm() -> Iterator[ModuleType]:
    """Module `vllm_layers`, with the plugin registered; environment variables are restored at the end."""
    with installed("vllm") as patch:
        patch.setenv("VLLM_TARGET_DEVICE", "cpu")  # else vLLM knows no platform
        patch.setenv("GLULAM_VLLM", "1")
        importlib.import_module("glulam_vllm").register()
        layers = importlib.import_module("support.vllm_layers")
        with layers.engine():
            yield layers


@pytest.fixture
def logged(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines that the plugin logs."""
    lines: list[str] = []
    log = importlib.import_module("glulam_vllm.layers")._log
    for level in ("info_once", "warning_once"):
        monkeypatch.setattr(log, level, lambda text, *values: lines.append(text % values))
    return lines
