"""Fixtures as a pytest plugin: a test module uses them by `pytest_plugins = ["support.fixtures"]`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ffi_bridge import cache, loader
from glulam.choose import kernels, known, loadable
from glulam.host import device
from glulam.host.plans import forget_plans

from .fake_gpu import SM_COUNT, FakeGpu, install


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """Send CPU tensors to a fake GPU during a test."""
    yield install(monkeypatch)
    forget_plans()


@pytest.fixture
def a100(fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """Fake GPU that is an A100. No preferred kernels are known."""
    monkeypatch.setattr(device, "gpu", lambda _: device.Gpu("fake", "sm_80", SM_COUNT))
    known.forget()
    yield fake_gpu
    known.forget()


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A machine with an empty cache; the fixture's value is the path of its only tuned table.

    Every kernel counts as loadable; opening a library fails the test.
    """
    table = tmp_path / "tuned.json"
    monkeypatch.setenv(cache.ENV_CACHE, str(tmp_path / "cache"))
    monkeypatch.setenv(known.ENV_TUNED, str(table))
    monkeypatch.setattr(loadable, "is_loadable", lambda spec: True)
    monkeypatch.setattr(loader, "_open_library", lambda path, needs: pytest.fail(f"opened {path}"))
    kernels.forget_choices()
    yield table
    kernels.forget_choices()


@pytest.fixture(params=["cpu", "gpu"])
def anywhere(request: pytest.FixtureRequest) -> Any:
    """Run the test on the CPU reference and on the fake GPU."""
    return request.getfixturevalue("fake_gpu") if request.param == "gpu" else None
