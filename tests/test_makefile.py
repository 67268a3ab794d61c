"""The Makefile: what each target installs before it runs. Nothing is installed here: make says what it would do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def commands(folder: Path, target: str, *settings: str) -> str:
    """What `make target` would run where nothing is installed."""
    command = ["make", "--dry-run", "--no-print-directory", f"VENV={folder}/.venv", *settings, target]
    environment = {"PATH": os.environ["PATH"]}  # `make test` hands its own settings down
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize(
    ("target", "installed"),
    [("demo", ["run"]), ("train", ["run"]), ("test", ["run", "test"]), ("lint", ["run", "lint"]), ("wheel", ["run"])],
)
def test_a_target_installs_what_it_needs_and_no_more(tmp_path: Path, target: str, installed: list[str]) -> None:
    assert re.findall(r"--requirement requirements/(\w+)\.txt", commands(tmp_path, target, "UV=")) == installed


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
