"""The Makefile: packages that each target installs before it runs. Nothing is installed here: `make --dry-run` shows
the commands.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def commands(folder: Path, target: str, *settings: str) -> str:
    """Return the commands that `make target` would run if nothing is installed."""
    command = ["make", "--dry-run", "--no-print-directory", f"VENV={folder}/.venv", *settings, target]
    environment = {"PATH": os.environ["PATH"]}  # `make test` hands its own settings down
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize(
    ("target", "installed"),
    [
        ("demo", ["run"]),
        ("train", ["run"]),
        ("lint", ["run", "lint"]),
        ("wheel", ["run"]),
        *[(target, ["run", "test"]) for target in ("test", "fuzz", "soak", "sanitize")],
    ],
)
def test_a_target_installs_what_it_needs_and_no_more(tmp_path: Path, target: str, installed: list[str]) -> None:
    assert re.findall(r"--requirement requirements/(\w+)\.txt", commands(tmp_path, target, "UV=")) == installed


def test_plugins_are_tested_in_an_environment_of_their_own_and_engines_come_without_dependencies() -> None:
    told = commands(Path("unused"), "test-serving", "UV=", "SERVING=.none")
    assert "unused" not in told and "-m venv .none" in told
    engines = re.findall(r"--no-deps --requirement requirements/serving-(\w+)\.txt", told)
    assert engines == re.findall(r"--no-deps --no-build-isolation --editable plugins/glulam-(\w+)", told) != []
    files = re.findall(r"--requirement requirements/(\S+)\.txt", told)
    assert files == ["run", "test", "serving", *[f"serving-{engine}" for engine in engines]]
    for engine in engines:
        assert f" tests/serving/test_{engine}.py" in told


def test_uv_installs_where_it_is_named_and_pip_where_not(tmp_path: Path) -> None:
    with_uv, with_pip = commands(tmp_path, "demo", "UV=/opt/uv"), commands(tmp_path, "demo", "UV=")
    assert "/opt/uv venv" in with_uv and "/opt/uv pip install --python" in with_uv and "-m pip" not in with_uv
    assert "-m venv" in with_pip and "-m pip install" in with_pip and "uv " not in with_pip


def test_an_installation_is_told_of_before_it_begins(tmp_path: Path) -> None:
    told = commands(tmp_path, "test", "UV=")
    for before, command in (("Installing torch", "requirements/run.txt"), ("Installing what", "requirements/test.txt")):
        assert told.index(before) < told.index(command)
    assert "--quiet" not in told


def test_what_is_tested_and_linted_with_one_package_uses_one_version() -> None:
    pins: dict[str, set[str]] = {}
    for file in (REPOSITORY / "requirements").glob("*.txt"):
        for name, pin in re.findall(r"^([\w\[\]-]+)(==.*)$", file.read_text(), re.MULTILINE):
            pins.setdefault(f"{name};{pin.partition(';')[2]}", set()).add(pin)
    assert pins and all(len(versions) == 1 for versions in pins.values())


@pytest.mark.parametrize(
    ("target", "profiles"),
    [("demo", ["demo"]), ("build", ["bf16"]), ("train", ["bf16"]), ("test", []), ("test-bundle", ["full"])],
)
def test_a_target_compiles_what_it_runs_and_no_more(tmp_path: Path, target: str, profiles: list[str]) -> None:
    assert re.findall(r"glulam build --keep +--profile (\w+)", commands(tmp_path, target, "UV=")) == profiles


PROGRAM = """#!/bin/sh
echo "$(basename "$0") $*" >> "$LOG"
case "$*" in
  *cuda.is_available*) exit "$NO_GPU" ;;
  *pip*) cat "$(dirname "$0")/../transformers/pin.txt" >> "$LOG"; exit 1 ;;
esac
"""


def run(folder: Path, target: str, no_gpu: int = 0) -> tuple[str, list[str]]:
    """Run `make target` with stand-ins, which log their calls, for all installed programs; return make's output and the
    programs run.
    """
    (programs := folder / ".venv/bin").mkdir(parents=True)
    for name in ("python", "glulam"):
        (programs / name).write_text(PROGRAM)
        (programs / name).chmod(0o755)
    for kind in ("run", "test"):
        (folder / ".venv" / f".installed-{kind}").touch()
    command = ["make", "--no-print-directory", f"VENV={folder}/.venv", "UV=", target.format(folder=folder)]
    environment = {"PATH": os.environ["PATH"], "LOG": str(folder / "log"), "NO_GPU": str(no_gpu)}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True)
    return done.stdout, (folder / "log").read_text().splitlines()


@pytest.mark.parametrize(("no_gpu", "builds"), [(1, 0), (0, 1)])
def test_training_compiles_kernels_where_a_gpu_can_launch_them(tmp_path: Path, no_gpu: int, builds: int) -> None:
    _, ran = run(tmp_path, "train", no_gpu)
    assert sum(line.startswith("glulam build") for line in ran) == builds
    assert ran[-1].startswith("python examples/train_moe.py")


def test_the_demo_ends_with_the_next_line_to_type(tmp_path: Path) -> None:
    said, ran = run(tmp_path, "demo")
    assert ran[-1].startswith("python -m glulam.demo")
    assert said.splitlines()[-1].startswith(f"Next: {tmp_path}/.venv/bin/glulam doctor")


def test_the_tests_of_transformers_are_of_the_version_that_is_installed(tmp_path: Path) -> None:
    """pip reads the pin with its marker."""
    _, ran = run(tmp_path, "{folder}/.venv/transformers")
    (pip, pin) = ran
    assert pip.startswith("python -m pip download") and pip.endswith(f"-r {tmp_path}/.venv/transformers/pin.txt")
    assert Requirement(pin).name == "transformers"
    assert pin in (REPOSITORY / "requirements/test.txt").read_text().splitlines()


def test_a_uv_of_the_virtual_environment_installs_nothing(tmp_path: Path) -> None:
    (uv := tmp_path / ".venv/bin/uv").parent.mkdir(parents=True)
    uv.touch()
    uv.chmod(0o755)
    command = ["make", "--dry-run", f"VENV={tmp_path}/.venv", "demo"]
    environment = {"PATH": f"{uv.parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True)
    assert "-m pip install" in done.stdout and str(uv) not in done.stdout
