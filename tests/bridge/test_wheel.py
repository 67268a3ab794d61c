"""The wheel: contains the bundle, has the same bytes from any checkout, and works after unpacking."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.tags import sys_tags

from cute_kernels.architectures import ARCHS
from ffi_bridge import toolchain
from terminal import in_terminal
from toys import HERE, REPOSITORY

SOURCES = ("cute_kernels", "ffi_bridge", "python", "pyproject.toml", "setup.py", "LICENSE")
TOY_CONFIGS = """

def shipped_specs(arch, profile='full'):
    from ..specs import GroupedMmSpec, GroupedWgradSpec
    return [GroupedMmSpec(), GroupedWgradSpec()]
"""
TOY_STAGES = "\n\ndef tracer_of(spec):\n    return 'cute_kernels.toys:trace'\n"


def _toy_checkout(folder: Path) -> Path:
    """Copy this repository's packaging with only two toy kernels, so that building a wheel takes seconds; return its
    folder.
    """
    folder.mkdir()
    leave = shutil.ignore_patterns("_bundle", "__pycache__", "*.egg-info")
    for name in SOURCES:
        source = REPOSITORY / name
        shutil.copytree(source, folder / name, ignore=leave) if source.is_dir() else shutil.copy(source, folder)
    (folder / "README.md").write_text("toy\n")
    shutil.copy(HERE / "toy_kernels.py", folder / "cute_kernels" / "toys.py")
    for file, toys in (("sm90/configs.py", TOY_CONFIGS), ("stages.py", TOY_STAGES)):
        with (folder / "cute_kernels" / file).open("a") as source:
            source.write(toys)
    return folder


def _pip_wheel(checkout: Path, out: Path) -> str:
    """Build a wheel in `out` with pip; return pip's terminal output."""
    # In the environment of the tests: isolation would download what is installed already.
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(out), "."]
    environment = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if "site-packages" in p)}
    environment["GLULAM_CACHE_DIR"] = str(out / "cache")  # an empty one: each wheel's kernels are compiled
    return in_terminal(command, environment, checkout)


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


@pytest.mark.parametrize("archs", ["../../x", "sm_90a,sm_80", "sm_80 sm_75", "\x1b[2J"])
def test_an_architecture_without_kernels_is_named(archs: str) -> None:
    environment = {**os.environ, "GLULAM_ARCHS": archs, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "setup.py", "--version"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode and line.startswith(f"GLULAM_ARCHS names {archs.split()[-1]!r}; give any of these")
    assert all(arch in line for arch in ARCHS)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder with two wheels, out0 and out1, and pip's output for each."""
    folder = tmp_path_factory.mktemp("wheels")
    checkout = _toy_checkout(folder / "checkout")
    copies = [shutil.copytree(checkout, folder / f"a copy {i}") for i in range(2)]
    return folder, [_pip_wheel(copy, folder / f"out{i}") for i, copy in enumerate(copies)]


@pytest.fixture(scope="module")
def wheels(made: tuple[Path, list[str]]) -> list[Path]:
    return sorted(made[0].glob("out*/*.whl"))


def test_names_and_tags(wheels: list[Path]) -> None:
    """The tag is one of those that pip takes here, and names the glibc that its run-time libraries' wheels name."""
    name, version, python, abi, platform = wheels[0].stem.split("-")
    assert (name, version, python, abi) == ("glulam", "0.1.0", "py3", "none")
    assert re.fullmatch(r"manylinux_2_\d+_x86_64", platform)
    assert f"py3-none-{platform}" in {str(tag) for tag in sys_tags()}
    runtime = importlib.metadata.distribution("nvidia-cutlass-dsl-libs-cu13").read_text("WHEEL")
    assert runtime and platform in runtime


def test_the_version_says_which_architectures_are_in_it(made: tuple[Path, list[str]], tmp_path: Path) -> None:
    """But for the default one, whose wheel has the version alone."""
    checkout = shutil.copytree(made[0] / "checkout", tmp_path / "checkout")
    shutil.rmtree(checkout / "glulam.egg-info", ignore_errors=True)
    command = [sys.executable, "setup.py", "--quiet", "egg_info"]
    for archs, version in (("", "0.1.0"), ("sm_80", "0.1.0+sm80"), ("sm_90a sm_80", "0.1.0+sm90a.sm80")):
        environment = {**os.environ, "GLULAM_ARCHS": archs}
        subprocess.run(command, cwd=checkout, env=environment, check=True, capture_output=True)
        metadata = (checkout / "glulam.egg-info" / "PKG-INFO").read_text()
        assert f"\nVersion: {version}\n" in metadata


def test_a_tag_that_cannot_be_told_is_the_plain_one(made: tuple[Path, list[str]], tmp_path: Path) -> None:
    (broken := tmp_path / "objdump").write_text("#!/bin/sh\necho no such format >&2\nexit 1\n")
    (compiler := tmp_path / "cc").write_text("#!/bin/sh\necho objdump\n")
    for tool in (broken, compiler):
        tool.chmod(0o755)
    command = [sys.executable, "setup.py", "--quiet", "bdist_wheel", "--skip-build", "--dist-dir", str(tmp_path)]
    environment = {**os.environ, "CC": str(compiler), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    checkout = made[0] / "a copy 0"
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stem.endswith("-py3-none-linux_x86_64")
    assert "no package index takes: objdump reads no libglulam_" in done.stderr and "no such format" in done.stderr


def test_the_build_shows_its_progress_past_pip(made: tuple[Path, list[str]]) -> None:
    for seen in made[1]:
        assert re.search(r"sm_90a kernels: 0 of 2, \d+:\d\d elapsed", seen)
        assert re.search(r"sm_90a kernels: 2 of 2, \d+:\d\d elapsed", seen)


def test_holds_the_bundle_and_the_packages_only(wheels: list[Path]) -> None:
    names = zipfile.ZipFile(wheels[0]).namelist()
    assert {name.split("/")[0] for name in names} == {"glulam", "ffi_bridge", "cute_kernels", "glulam-0.1.0.dist-info"}
    library, described = sorted(name for name in names if "_bundle" in name)
    assert re.fullmatch(r"glulam/_bundle/sm_90a/libglulam_sm_90a-[0-9a-f]{16}\.so", library)
    assert described == "glulam/_bundle/sm_90a/manifest.json"
    assert {"cute_kernels/tracing.py", "cute_kernels/sm90/configs.py", "glulam/command/cli.py"} <= set(names)
    assert {"glulam/py.typed", "ffi_bridge/py.typed"} <= set(names)


def test_asks_for_the_ranges_that_the_loader_takes(wheels: list[Path]) -> None:
    metadata = zipfile.ZipFile(wheels[0]).read("glulam-0.1.0.dist-info/METADATA").decode()
    wanted = {re.sub(r"\s", "", line.partition(":")[2]) for line in metadata.splitlines() if "Requires-Dist" in line}

    def pins(line: str) -> set[str]:
        """Return a requirement's name and version bounds as a set, because build tools reorder the bounds."""
        name = re.split(r"[<>=]", line, maxsplit=1)[0]
        return {name, *line.removeprefix(name).split(",")}

    asked = [pins(line) for line in wanted]
    dsl, ffi = (toolchain.RUNS_WITH[package] for package in (toolchain.DSL, toolchain.TVM_FFI))
    assert pins(f"nvidia-cutlass-dsl[cu13]{dsl}") in asked
    assert pins(f"apache-tvm-ffi{ffi}") in asked


def test_is_built_with_the_versions_that_compiling_asks_for() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text()
    built_with = project[: project.index("[project]")]
    (tested,) = toolchain.COMPILES_WITH[toolchain.DSL]
    pin = f"nvidia-cutlass-dsl[cu13]=={tested}"
    assert f'"{pin}"' in built_with
    assert pin in (REPOSITORY / "requirements/run.txt").read_text().splitlines()


def test_twice_is_the_same_bytes(wheels: list[Path]) -> None:
    first, second = (wheel.read_bytes() for wheel in wheels)
    assert first == second


def test_works_where_it_is_unpacked(wheels: list[Path], tmp_path: Path) -> None:
    """The check of the sources included: the wheel's are those that its bundle was built from."""
    zipfile.ZipFile(wheels[0]).extractall(tmp_path)
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.modules['torch'] = None\n"
        "import ffi_bridge; bundle = ffi_bridge.load('sm_90a'); assert 'cutlass' not in sys.modules\n"
        "print(bundle.folder); print(*bundle.names())"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "GLULAM_BUNDLE")}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folder, names = done.stdout.splitlines()
    assert Path(folder) == tmp_path / "glulam" / "_bundle" / "sm_90a"
    assert len(names.split()) == 2
