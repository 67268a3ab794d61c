"""Fixtures of a small bundle of toy kernels, built once per test process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ffi_bridge import build, verification
from toys import TOY_SPECS, TOY_TRACER


@pytest.fixture(autouse=True, scope="session")
def umask() -> Iterator[None]:
    """Set umask 022, so that files which tests write have the mode that the loader accepts: only the user can write
    them.
    """
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture(autouse=True)
def toys_are_expected(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the loader expect bundles of the package `toy_kernels` in tests that use `toy_bundle`."""
    if "toy_bundle" in request.fixturenames:
        monkeypatch.setattr(verification, "PACKAGES", ("toy_kernels",))


@pytest.fixture(scope="session")
def toy_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Root folder of a valid bundle of TOY_SPECS. Shared by tests, which must not change it: use `bundle_copy` for
    that.
    """
    root = tmp_path_factory.mktemp("toy")
    build.build(TOY_SPECS, root, jobs=1, progress=False, tracer=TOY_TRACER, allowed={})
    return root


@pytest.fixture
def bundle_copy(toy_bundle: Path, tmp_path: Path) -> Path:
    """Root folder of a test's own copy of `toy_bundle`, which the test may damage."""
    return shutil.copytree(toy_bundle, tmp_path / "bundle")
