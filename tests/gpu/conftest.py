"""Setup of every GPU test: no gradients, and memory full of NaN."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.inputs import poison_allocator

from cute_kernels.architectures import ARCHS
from cute_kernels.portable import policy
from cute_kernels.tiles import SpecError, TileConfig
from ffi_bridge.errors import BundleError
from glulam import UnsupportedDevice
from glulam.choose import estimates as times
from glulam.choose.estimates import Estimate
from glulam.choose.problem import ProblemGemm
from glulam.host import workspace
from glulam.recipes import RECIPES


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test without gradients, after filling the allocator's free memory and the workspace with NaN, which must
    not reach any result.
    """
    if request.node.get_closest_marker("gpu") and torch.cuda.is_available():
        poison_allocator("cuda")
        for buffer in workspace.stats().buffers.values():
            buffer.fill_(0xFF)  # NaN in both 16-bit types
    with torch.no_grad():
        yield


@pytest.fixture
def with_gradients(poisoned_memory: None) -> Iterator[None]:
    """Run a test with gradients after all, which `poisoned_memory` switches off."""
    with torch.enable_grad():
        yield


OF_HOPPER = re.compile(r" mxfp8\b| folded\b| rebased\b|in_mxfp8|prepare_mxfp8|in FP8 blocks")
"""Tests of FP8 rows, and of weights folded for them, by their names, where no parameter says so."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests of recipes whose operands the kernels' architecture lacks."""
    is_portable, lacks = config.getoption("--arch") == "portable", ARCHS[os.environ["GLULAM_ARCH"]].lacks
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        recipes = [RECIPES[one] for one in parameters if isinstance(one, str) and one in RECIPES]
        is_lacking = any(recipe.operands in lacks for recipe in recipes)
        if is_lacking or (is_portable and OF_HOPPER.search(item.name)):
            item.add_marker(pytest.mark.skip(reason="these kernels lack such operands"))


@contextmanager
def what_it_can(item: pytest.Item) -> Iterator[None]:
    """Skip a test on portable kernels if it fails because it needs a kernel of sm_90a or an FP8 MMA."""
    if item.config.getoption("--arch") != "portable":
        yield
        return
    try:
        yield
    except (SpecError, BundleError, UnsupportedDevice) as refused:
        if not any(words in str(refused) for words in ("FP8 MMA", "sm_90a")):
            raise
        pytest.skip(f"of Hopper's own kernels: {refused}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Any:
    with what_it_can(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    with what_it_can(item):
        return (yield)


@pytest.fixture(autouse=True)
def both_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the dispatcher use the small tile for few rows and the large tile for many, since layers this small would
    test only one.
    """

    def estimates(parts: Sequence[ProblemGemm], tiles: Sequence[TileConfig], arch: str) -> list[Estimate]:
        few = parts[0].gemm.average <= min(tile.m for tile in tiles)
        return [
            Estimate(1.0, tile, "set by the tests") for tile in sorted(tiles, key=lambda tile: tile.m, reverse=not few)
        ]

    monkeypatch.setattr(times, "estimates", estimates)
    monkeypatch.setattr(policy, "MOST_ROWS", 64)
