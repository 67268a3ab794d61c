"""Fixtures, as a plugin: a test module that wants them says `pytest_plugins = ["support.fixtures"]`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from glulam.host.plans import forget_plans

from .fake_gpu import FakeGpu, install


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """For the length of a test, CPU tensors are on a GPU."""
    yield install(monkeypatch)
    forget_plans()


@pytest.fixture(params=["cpu", "gpu"])
def anywhere(request: pytest.FixtureRequest) -> Any:
    """On the CPU, and on the stand-in of a GPU."""
    return request.getfixturevalue("fake_gpu") if request.param == "gpu" else None
