"""The command line: what it prints, and its exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import ffi_bridge
from ffi_bridge import ToolchainError, build, jit, loader, toolchain
from glulam import _doctor, cli
from toys import REPOSITORY, TOY_SPECS, TOY_TRACER

H200 = _doctor.Gpu("NVIDIA H200", (9, 0), "sm_90a")
A100 = _doctor.Gpu("NVIDIA A100", (8, 0), None)


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def test_version() -> None:
    assert _run("--version").output == f"glulam {ffi_bridge.__version__}\n"


def test_build_builds_the_shipped_specs_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = build.build

    def toy_build(specs: Any, out: Path, jobs: int | None) -> Any:
        assert (specs, jobs) == (TOY_SPECS, 1)
        return original(specs, out, jobs, progress=False, tracer=TOY_TRACER, allowed={})

    monkeypatch.setattr(build, "shipped_specs", lambda arch: TOY_SPECS)
    monkeypatch.setattr(build, "build", toy_build)
    result = _run("build", "--arch", "sm_90a", "--jobs", "1", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert f"{tmp_path}/sm_90a/libglulam_sm_90a.so: 3 functions" in result.output
    assert (tmp_path / "sm_90a" / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "--arch", "sm_90a", "--out", "/proc/none/here"], "/proc/none"),
        (["info", "--bundle", "/nowhere"], "/nowhere/sm_90a/manifest.json does not exist; run `glulam build`"),
    ],
)
def test_what_a_user_can_mend_is_a_message_not_a_traceback(arguments: list[str], message: str) -> None:
    result = _run(*arguments)
    assert result.exit_code == 1
    assert f"glulam: {message}" in result.output or message in result.output
    assert "Traceback" not in result.output


def test_info_shows_each_function(toy_bundle: Path) -> None:
    result = _run("info", "--bundle", str(toy_bundle))
    assert result.exit_code == 0
    rows = {spec.op: next(line for line in result.output.splitlines() if f"│ {spec.op} " in line) for spec in TOY_SPECS}
    cells = [cell.strip() for cell in rows["grouped_glu"].strip("│").split("│")]
    assert cells[:4] == ["grouped_glu", "bfloat16", "swiglu", "concat"]
    assert cells[4] == "128x256x64 c1x1 coop"
    assert cells[5:] == ["save_preact", "14", "0.5"]
    assert [cell.strip() for cell in rows["grouped_mlp"].strip("│").split("│")][-2:] == ["14 + 14", "0.5 + 0.5"]
    manifest = ffi_bridge.load("sm_90a", toy_bundle).manifest
    assert manifest.sha256 in result.output
    assert f"apache-tvm-ffi {manifest.versions['apache-tvm-ffi']}" in result.output


def test_info_of_one_operator(toy_bundle: Path) -> None:
    output = _run("info", "--bundle", str(toy_bundle), "--op", "grouped_mm").output
    assert "│ grouped_mm " in output
    assert "│ grouped_glu " not in output


def test_info_of_a_damaged_bundle(bundle_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bundle_copy / "sm_90a" / "libglulam_sm_90a.so").write_bytes(b"")
    monkeypatch.setenv(loader.ENV_BUNDLE, str(bundle_copy))
    result = _run("info")
    assert result.exit_code == 1
    assert "damaged bundle" in result.output


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, toy_bundle: Path, tmp_path: Path) -> Callable[..., Result]:
    """Runs `glulam doctor` on a machine with the given GPU and driver, a sound bundle and an empty cache."""
    monkeypatch.setenv(loader.ENV_BUNDLE, str(toy_bundle))
    monkeypatch.setenv(jit.ENV_CACHE, str(tmp_path / "cache"))

    def run(gpu: _doctor.Gpu | None, driver: tuple[int, int] | None = (13, 0)) -> Result:
        monkeypatch.setattr(_doctor, "_find_gpu", lambda torch: gpu)
        monkeypatch.setattr(_doctor, "_driver_version", lambda: driver)
        return _run("doctor")

    return run


def _finding(result: Result, name: str) -> str:
    """The lines of one check: its finding, and its remedy where it has one."""
    lines = result.output.splitlines()
    at = next(i for i, line in enumerate(lines) if line[5:].startswith(name))
    return "\n".join(lines[at : at + 2]) if lines[at + 1 :] and lines[at + 1].startswith(" ") else lines[at]


def test_doctor_without_a_gpu(machine: Callable[..., Result]) -> None:
    result = machine(None, None)
    assert result.exit_code == 0, result.output
    assert "CPU reference" in _finding(result, "GPU")
    assert "ok   compiling    works here, with or without a GPU" in result.output
    assert _finding(result, "bundle").startswith("ok   bundle       3 sm_90a functions in")
    assert "usable on the CPU only: calls run the CPU reference; compiling kernels works." in result.output


def test_doctor_on_a_gpu(machine: Callable[..., Result]) -> None:
    result = machine(H200)
    assert result.exit_code == 0, result.output
    assert "NVIDIA H200, compute capability 9.0: served by the sm_90a kernels" in result.output
    assert "the precompiled kernels run on this GPU" in result.output


def test_doctor_on_a_gpu_without_kernels(machine: Callable[..., Result]) -> None:
    result = machine(A100)
    assert result.exit_code == 1
    assert "no kernels for it" in _finding(result, "GPU")
    assert "-> use a GPU of compute capability 9.0" in _finding(result, "GPU")
    assert "not usable here yet: see GPU above" in result.output


def test_doctor_with_an_old_driver(machine: Callable[..., Result]) -> None:
    result = machine(H200, (12, 4))
    assert result.exit_code == 1
    assert "CUDA 12.4 is too old" in _finding(result, "driver")
    assert "driver 580" in _finding(result, "driver")


@pytest.mark.parametrize(("gpu", "status", "mark"), [(H200, 1, "BAD "), (None, 0, "note")])
def test_doctor_without_a_bundle(
    machine: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: Any, status: int, mark: str
) -> None:
    """A GPU needs the bundle; the CPU reference does not."""
    monkeypatch.setenv(loader.ENV_BUNDLE, str(tmp_path / "nothing"))
    result = machine(gpu)
    assert result.exit_code == status, result.output
    finding = _finding(result, "bundle")
    assert finding.startswith(mark)
    assert "does not exist" in finding
    assert "-> run `glulam build`" in finding


def test_doctor_without_torch(machine: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_doctor, "_torch", lambda: None)
    result = machine(None)
    assert result.exit_code == 1
    assert "not installed" in _finding(result, "torch")
    assert "-> pip install 'torch>=2.11'" in _finding(result, "torch")


def test_doctor_without_tools(machine: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> Any:
        raise ToolchainError("no such thing; run `pip install it`")

    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv(jit.ENV_CACHE, "/proc/cannot/be/made")
    monkeypatch.setattr(toolchain, "tvm_ffi_library", missing)
    monkeypatch.setattr(toolchain, "runtime_library", missing)
    result = machine(None)
    assert result.exit_code == 1
    for name in ("TVM-FFI", "run time"):
        assert _finding(result, name).startswith("BAD ")
        assert "-> run `pip install it`" in _finding(result, name)
    assert _finding(result, "compiling").startswith("note")


def test_the_console_script_runs() -> None:
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "python"), *filter(None, sys.path)])
    command = [sys.executable, "-m", "glulam.cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    for command in ("build", "info", "doctor"):
        assert command in done.stdout
