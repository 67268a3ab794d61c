"""Fixtures, as a plugin: a test module that wants them says `pytest_plugins = ["support.fixtures"]`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from glulam.plans import forget_plans

from .fake_gpu import FakeGpu, install


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """For the length of a test, CPU tensors are on a GPU."""
    yield install(monkeypatch)
    forget_plans()
