"""A bundle as a kernel of the Hugging Face hub: its files, and loading it offline with the package `kernels`.

Tests that import `kernels` are skipped if it is not installed. It is no requirement, because transformers behaves
differently when it is installed. One test imports a variant from its file, as `kernels` does.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cute_kernels.chains import signature_of
from cute_kernels.specs import GroupedMmSpec
from ffi_bridge import BundleMissing, hub, toolchain, verification
from toys import REPOSITORY, TOY_SPECS, library_in

VARIANT = "tvm-ffi01-cu130-x86_64-linux"
NAME = GroupedMmSpec().name
USE = f"""
import sys, warnings
assert not [name for name in sys.modules if name.startswith(("glulam", "ffi_bridge", "cute_kernels"))]
assert kernel.names() == {sorted(spec.name for spec in TOY_SPECS)!r}, kernel.names()
assert kernel.names("grouped_mm_*") == [{NAME!r}]
assert kernel.arguments({NAME!r}) == {list(signature_of(GroupedMmSpec()).names)!r}
try:
    kernel.function({NAME!r})(1, 2)
except TypeError as error:
    print("refused:", error)
try:
    kernel.function("nope")
except KeyError as error:
    print("unknown:", error)
"""


@pytest.fixture(scope="module")
def repository(toy_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hub")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "PACKAGES", ("toy_kernels",))
        assert hub.write(toy_bundle, "sm_90a", out) == out / "build" / VARIANT
    return out


def _run(script: str, **environment: str) -> list[str]:
    """Return what a script prints in a process that can import installed packages, and not this repository."""
    found = [importlib.util.find_spec(name) for name in ("torch", "kernels")]
    paths = dict.fromkeys(str(Path(one.origin).parents[1]) for one in found if one and one.origin)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GLULAM_", "PYTHON"))}
    told = {
        **kept,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        **environment,
    }
    done = subprocess.run([sys.executable, "-c", script], cwd="/", env=told, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def _check(told: list[str]) -> None:
    refused, unknown = told
    assert refused.startswith("refused: ") and "parameters" in refused and unknown == "unknown: 'nope'"


def test_a_variant_has_these_files(repository: Path, toy_bundle: Path) -> None:
    folder = repository / "build" / VARIANT
    library = library_in(toy_bundle / "sm_90a")
    assert {file.name for file in folder.iterdir()} == {
        "__init__.py", "functions.json", "metadata.json", library.name
    }  # fmt: skip
    assert (folder / library.name).read_bytes() == library.read_bytes()
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["id"].isidentifier() and metadata["backend"] == {"type": "cuda", "archs": ["9.0a"]}
    assert set(metadata["digest"]["files"]) == {file.name for file in folder.iterdir()} - {"metadata.json"}


@pytest.mark.parametrize(
    ("arch", "named"), [("sm_90a", "9.0a"), ("sm_80", "8.0"), ("sm_100", "10.0"), ("sm_120", "12.0")]
)
def test_architectures_are_named_as_the_hub_names_them(arch: str, named: str) -> None:
    assert hub.gpus(arch) == named


def test_the_license_is_the_packages(repository: Path) -> None:
    assert f'license = "{hub.LICENSE}"' in (REPOSITORY / "pyproject.toml").read_text()


def test_what_is_there_is_not_written_over(repository: Path, toy_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "PACKAGES", ("toy_kernels",))
    with pytest.raises(FileExistsError, match=VARIANT):
        hub.write(toy_bundle, "sm_90a", repository)
    with pytest.raises(BundleMissing):
        hub.write(repository, "sm_90a", repository)


def test_the_package_needs_nothing_of_this_repository(repository: Path) -> None:
    """Import a variant as `kernels` does: from its file, under a name of its own."""
    script = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_variant", {str(repository / "build" / VARIANT / "__init__.py")!r})
kernel = importlib.util.module_from_spec(spec); sys.modules["_variant"] = kernel; spec.loader.exec_module(kernel)
"""
    _check(_run(script + USE))


LOADERS = {
    "by path": "get_local_kernel(Path({repository!r}))",
    "by name": "get_kernel('owner/glulam', version=1)",
}
"""Calls of `kernels`; the second finds the name in LOCAL_KERNELS."""


@pytest.mark.parametrize("how", LOADERS)
def test_kernels_loads_it_offline(repository: Path, how: str) -> None:
    pytest.importorskip("kernels")
    call = LOADERS[how].format(repository=str(repository))
    script = f"""
from pathlib import Path
import torch
torch.version.cuda = "13.0"  # a torch for the CPU would want another backend
from kernels import get_kernel, get_local_kernel
kernel = {call}
"""
    _check(_run(script + USE, LOCAL_KERNELS=f"owner/glulam={repository}"))


def test_kernels_takes_the_digest_and_sees_a_file_that_was_changed(repository: Path, tmp_path: Path) -> None:
    data = pytest.importorskip("kernels_data")
    folder = repository / "build" / VARIANT
    metadata = data.Metadata.read_from_file(folder / "metadata.json")
    assert str(metadata.name) == "glulam" and metadata.python_depends == hub.DEPENDS
    found = data.Digest.hash_variant(metadata.digest.algorithm, folder)
    metadata.digest.validate(found)
    other = tmp_path / "other"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes() + b"\n" * (file.suffix == ".py"))
    with pytest.raises(data.DigestValidationError):
        metadata.digest.validate(data.Digest.hash_variant(metadata.digest.algorithm, other))


def test_it_runs_with_the_tvm_ffi_that_its_variant_names() -> None:
    versions = toolchain.RUNS_WITH[toolchain.TVM_FFI]
    assert versions.oldest.split(".")[:2] == ["0", "1"] and versions.below == "0.2"
