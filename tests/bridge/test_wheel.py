"""The wheel: contains the bundle, the same bytes from any checkout, and works where it is unpacked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from toys import HERE, REPOSITORY

SOURCES = ("cute_kernels", "ffi_bridge", "python", "pyproject.toml", "setup.py", "LICENSE")
TOY_CONFIGS = "\n\ndef shipped_specs():\n    return [GroupedMmSpec(), GroupedMlpSpec()]\n"


def _toy_checkout(folder: Path) -> Path:
    """This repository's packaging around two toy kernels, so that a wheel takes seconds."""
    folder.mkdir()
    leave = shutil.ignore_patterns("_bundle", "__pycache__", "*.egg-info")
    for name in SOURCES:
        source = REPOSITORY / name
        shutil.copytree(source, folder / name, ignore=leave) if source.is_dir() else shutil.copy(source, folder)
    (folder / "README.md").write_text("toy\n")
    shutil.copy(HERE / "toy_kernels.py", folder / "cute_kernels" / "entry.py")
    with (folder / "cute_kernels" / "sm90" / "configs.py").open("a") as configs:
        configs.write(TOY_CONFIGS)
    return folder


def _pip_wheel(checkout: Path, out: Path) -> Path:
    # In the environment of the tests: isolation would download what is installed already.
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        ".",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if "site-packages" in p)}
    environment["GLULAM_CACHE_DIR"] = str(out / "cache")  # an empty one: each wheel's kernels are compiled
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


def test_building_leaves_what_lies_beside_the_packages(tmp_path: Path) -> None:
    checkout = _toy_checkout(tmp_path / "checkout")
    (theirs := tmp_path / "lib" / "thesis").mkdir(parents=True)
    (leftover := tmp_path / "lib" / "glulam" / "gone.py").parent.mkdir()
    leftover.touch()
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(tmp_path / "lib")]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert theirs.is_dir() and not leftover.exists()
    assert (tmp_path / "lib" / "glulam" / "_bundle" / "sm_90a" / "manifest.json").is_file()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("wheels")
    checkout = _toy_checkout(folder / "checkout")
    copies = [shutil.copytree(checkout, folder / f"a copy {i}") for i in range(2)]
    return [_pip_wheel(copy, folder / f"out{i}") for i, copy in enumerate(copies)]


def test_names_and_tags(wheels: list[Path]) -> None:
    name, version, *tag = wheels[0].stem.split("-")
    assert (name, version) == ("glulam", "0.1.0")
    assert tag == ["py3", "none", "linux_x86_64"]


def test_holds_the_bundle_and_the_packages_only(wheels: list[Path]) -> None:
    names = zipfile.ZipFile(wheels[0]).namelist()
    assert {name.split("/")[0] for name in names} == {"glulam", "ffi_bridge", "cute_kernels", "glulam-0.1.0.dist-info"}
    library, described = sorted(name for name in names if "_bundle" in name)
    assert re.fullmatch(r"glulam/_bundle/sm_90a/libglulam_sm_90a-[0-9a-f]{16}\.so", library)
    assert described == "glulam/_bundle/sm_90a/manifest.json"
    assert {"cute_kernels/entry.py", "cute_kernels/sm90/configs.py", "glulam/cli.py"} <= set(names)


def test_twice_is_the_same_bytes(wheels: list[Path]) -> None:
    first, second = (wheel.read_bytes() for wheel in wheels)
    assert first == second


def test_works_where_it_is_unpacked(wheels: list[Path], tmp_path: Path) -> None:
    """The check of the sources included: the wheel's are those that its bundle was built from."""
    zipfile.ZipFile(wheels[0]).extractall(tmp_path)
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import ffi_bridge; bundle = ffi_bridge.load('sm_90a'); assert 'cutlass' not in sys.modules\n"
        "print(bundle.folder); print(*bundle.names())"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "GLULAM_BUNDLE")}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folder, names = done.stdout.splitlines()
    assert Path(folder) == tmp_path / "glulam" / "_bundle" / "sm_90a"
    assert len(names.split()) == 2
