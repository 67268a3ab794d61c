"""A small bundle of toy kernels, built once a test process."""

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
    """Files that these tests write themselves are as a bundle's are: nobody else can write them."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture(autouse=True)
def toys_are_expected(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a test has a bundle of toy kernels, that is what a bundle is to be made of."""
    if "toy_bundle" in request.fixturenames:
        monkeypatch.setattr(verification, "PACKAGES", ("toy_kernels",))


@pytest.fixture(scope="session")
def toy_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a sound bundle. Not to be changed: `bundle_copy` is."""
    root = tmp_path_factory.mktemp("toy")
    build.build(TOY_SPECS, root, jobs=1, progress=False, tracer=TOY_TRACER, allowed={})
    return root


@pytest.fixture
def bundle_copy(toy_bundle: Path, tmp_path: Path) -> Path:
    """The root of a sound bundle that the test may damage."""
    return shutil.copytree(toy_bundle, tmp_path / "bundle")
