"""The command line `glulam`: output and exit status."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch
import typer
from rich.table import Table
from typer.testing import CliRunner, Result

import ffi_bridge
from cute_kernels.architectures import ARCHS
from cute_kernels.chains import stages_of
from cute_kernels.shipped import PROFILES
from cute_kernels.specs import GroupedMlpSpec, GroupedMmSpec, Spec
from cute_kernels.tiles import TileConfig
from ffi_bridge import (
    CompileError,
    ToolchainError,
    build,
    cache,
    host,
    jit,
    link,
    loader,
    manifest,
    profiles,
    toolchain,
    verification,
)
from ffi_bridge.worker import Worker
from glulam.choose import kernels, known, loadable, records, specs
from glulam.choose import table as tables
from glulam.choose.problem import Problem
from glulam.choose.shipped import TILED, family_of
from glulam.command import app, cli, doctor, terminal
from glulam.host import device
from toys import REPOSITORY, TOY_SPECS, TOY_TRACER, rewrite

H200 = doctor.Gpu("NVIDIA H200", (9, 0), "sm_90a")
A100 = doctor.Gpu("NVIDIA A100", (8, 0), None)


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def test_version() -> None:
    assert _run("--version").output == f"glulam {ffi_bridge.__version__}\n"


def test_build_builds_the_shipped_specs_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = build.build

    def toy_build(specs: Any, out: Path, jobs: int | None, machine: Any) -> Any:
        assert (specs, jobs, machine) == (TOY_SPECS, 1, host.here())
        return original(specs, out, jobs, progress=False, tracer=TOY_TRACER, allowed={})

    monkeypatch.setattr(profiles, "shipped_specs", lambda arch, profile, only: TOY_SPECS)
    monkeypatch.setattr(build, "build", toy_build)
    result = _run("build", "--arch", "sm_90a", "--jobs", "1", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    (library,) = (tmp_path / "sm_90a").glob("*.so")
    assert f"{library}: 3 functions" in result.output
    assert (tmp_path / "sm_90a" / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "--arch", "sm_90a", "--out", "/proc/none/here"], "/proc/none"),
        (
            ["info", "--bundle", "/nowhere"],
            "/nowhere/sm_90a/manifest.json does not exist; run `glulam build --arch sm_90a --out /nowhere`",
        ),
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
    assert [cell.strip() for cell in rows["grouped_wgrad"].strip("│").split("│")][-2:] == ["14 + 14", "0.5 + 0.5"]
    manifest = ffi_bridge.load("sm_90a", toy_bundle).manifest
    assert manifest.sha256 in result.output
    assert f"apache-tvm-ffi {manifest.versions['apache-tvm-ffi']}" in result.output
    assert (
        "runs with nvidia-cutlass-dsl >=4.7.1,<4.9, apache-tvm-ffi >=0.1.9,<0.2, on any x86-64-v2 CPU" in result.output
    )


def test_info_of_one_operator(toy_bundle: Path) -> None:
    output = _run("info", "--bundle", str(toy_bundle), "--op", "grouped_mm").output
    assert "│ grouped_mm " in output
    assert "│ grouped_glu " not in output


def test_info_of_an_operator_that_is_not_there_lists_those_that_are(toy_bundle: Path) -> None:
    result = _run("info", "--bundle", str(toy_bundle), "--op", "nope")
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert "'nope'" in line and line.endswith("it has those of grouped_glu, grouped_mm, grouped_wgrad")


def _taken(spec: Spec) -> list[str]:
    """Return the registers and KB of shared memory that a table shows for a spec's toy kernels: one kernel per stage,
    two for grouped_wgrad.
    """
    number = len(stages_of(spec)) + (spec.op == "grouped_wgrad")
    return [" + ".join([each] * number) for each in ("14", "0.5")]


def test_info_shows_what_a_functions_stages_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "PACKAGES", ("toy_kernels",))
    build.build([GroupedMlpSpec()], tmp_path, jobs=1, progress=False, tracer=TOY_TRACER, allowed={})
    output = _run("info", "--bundle", str(tmp_path), "--op", "grouped_mlp").output
    (row,) = [line for line in output.splitlines() if "│ grouped_mlp " in line]
    registers, kilobytes = [cell.strip() for cell in row.strip("│").split("│")][-2:]  # their first lines
    assert registers.startswith("14 + 14") and kilobytes.startswith("0.5 + 0.5")


def test_a_bundle_is_written_for_the_hub(toy_bundle: Path, tmp_path: Path) -> None:
    result = _run("hub", "--bundle", str(toy_bundle), "--out", str(tmp_path), "--arch", "sm_90a")
    assert result.exit_code == 0, result.output
    (variant,) = (tmp_path / "build").iterdir()
    assert result.output.startswith(f"{variant}: ") and (variant / "metadata.json").is_file()
    again = _run("hub", "--bundle", str(toy_bundle), "--out", str(tmp_path), "--arch", "sm_90a")
    assert again.exit_code == 1 and again.output.startswith("glulam: ") and variant.name in again.output


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("command", ["info", "explain LAYER --rows 8"])
def test_advice_builds_the_architecture_that_was_asked_for(place: Path, command: str, arch: str) -> None:
    """Without `--arch`, a build makes this machine's own."""
    result = _run(*command.replace("LAYER", " ".join(["grouped_mm", *LAYER])).split(), "--arch", arch)
    assert f"/{arch}/manifest.json does not exist; run `glulam build --arch {arch} --out " in result.output


def test_info_of_a_damaged_bundle(bundle_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (library,) = (bundle_copy / "sm_90a").glob("*.so")
    library.write_bytes(b"")
    monkeypatch.setenv(loader.ENV_BUNDLE, str(bundle_copy))
    result = _run("info")
    assert result.exit_code == 1
    assert "damaged bundle" in result.output


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, toy_bundle: Path, tmp_path: Path) -> Callable[..., Result]:
    """Return a function that runs `glulam doctor` on a simulated machine with a given GPU, driver and PCI devices, a
    valid bundle and an empty cache.

    pci: vendor and class of each device.
    """
    monkeypatch.setenv(loader.ENV_BUNDLE, str(toy_bundle))
    monkeypatch.setenv(jit.ENV_CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "_PCI", tmp_path / "pci")

    def run(
        gpu: doctor.Gpu | None,
        driver: tuple[int, int] | None = (13, 0),
        pci: tuple[tuple[str, str], ...] = (),
        options: tuple[str, ...] = (),
    ) -> Result:
        monkeypatch.setattr(doctor, "find_gpu", lambda torch: gpu)
        monkeypatch.setattr(doctor, "driver_version", lambda: driver)
        for number, (vendor, kind) in enumerate(pci):
            folder = tmp_path / "pci" / f"0000:0{number}:00.0"
            folder.mkdir(parents=True)
            (folder / "vendor").write_text(f"{vendor}\n")
            (folder / "class").write_text(f"{kind}\n")
        return _run("doctor", *options)

    return run


def _finding(result: Result, name: str) -> str:
    """Return the output lines of one check: its finding, then its remedy if it has one."""
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


def test_doctor_names_what_variables_misname(machine: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLULAM_TUNED", "/no/such/table.json")
    monkeypatch.setenv("GLULAM_ARCH", "sm_9")
    result = machine(None, None)
    assert result.exit_code == 0
    assert "$GLULAM_ARCH is 'sm_9', but must be one of sm_90a" in _finding(result, "GPU")
    assert "note tuning       $GLULAM_TUNED names /no/such/table.json, which does not exist" in result.output


OTHERS = (("0x8086", "0x030000"), ("0x10de", "0x068000"))  # a display of another vendor, a bridge of NVIDIA's


@pytest.mark.parametrize("driver", [None, (12, 4)])
def test_doctor_asks_for_a_driver_only_where_there_is_a_card(
    machine: Callable[..., Result], driver: tuple[int, int] | None
) -> None:
    without = machine(None, driver, OTHERS)
    assert without.exit_code == 0 and "install driver" not in without.output
    assert _finding(without, "driver").startswith("note") and "no NVIDIA card" in _finding(without, "driver")


@pytest.mark.parametrize("driver", [None, (12, 4)])
def test_doctor_asks_for_a_driver_for_a_card_that_torch_does_not_see(
    machine: Callable[..., Result], driver: tuple[int, int] | None
) -> None:
    result = machine(None, driver, (*OTHERS, ("0x10de", "0x030200")))
    assert result.exit_code == 0, result.output
    assert "-> install driver 580 or later" in _finding(result, "driver")


def test_doctor_on_a_gpu(machine: Callable[..., Result]) -> None:
    result = machine(H200)
    assert result.exit_code == 0, result.output
    assert "NVIDIA H200, compute capability 9.0: served by the sm_90a kernels, tested on H100 and H200" in result.output
    assert "the precompiled kernels run on this GPU" in result.output and "untried" not in result.output


@pytest.mark.parametrize(("gpu", "status"), [(H200, 0), (None, 0), (A100, 1)], ids=["H200", "no GPU", "no kernels"])
def test_programs_read_what_doctor_finds(machine: Callable[..., Result], gpu: Any, status: int) -> None:
    result, shown = machine(gpu, options=("--json",)), machine(gpu)
    found = json.loads(result.stdout)
    assert result.exit_code == shown.exit_code == status and found["usable"] is not bool(status)
    assert found["verdict"] == shown.output.splitlines()[-1]
    assert len(found["checks"]) == sum(line[:4].strip() in ("ok", "note", "BAD") for line in shown.output.splitlines())
    for check in found["checks"]:
        assert set(check) == {"name", "state", "finding", "remedy"} and check["state"] in ("ok", "note", "bad")
        assert check["finding"] in shown.output and check["remedy"] in shown.output


def test_doctors_json_is_text_for_any_path(machine: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    place = "/" + ESCAPES.replace("\x00", "")
    monkeypatch.setenv(loader.ENV_BUNDLE, place)
    result = machine(None, options=("--json",))
    (bundle,) = [check for check in json.loads(result.stdout)["checks"] if check["name"] == "bundle"]
    assert all(letter.isprintable() for letter in result.stdout if letter != "\n") and result.stdout.isascii()
    assert place in bundle["finding"] or records.shown(Path(place)) in bundle["finding"]


def test_doctor_on_a_gpu_without_kernels(machine: Callable[..., Result]) -> None:
    result = machine(A100)
    assert result.exit_code == 1
    assert "no kernels for it" in _finding(result, "GPU")
    assert "-> use a GPU of compute capability 9.0" in _finding(result, "GPU")
    assert "not usable here yet: see GPU above" in result.output


def test_doctor_on_a_gpu_that_we_never_saw(machine: Callable[..., Result]) -> None:
    result = machine(doctor.Gpu("NVIDIA A100", (8, 0), "sm_80"))
    found = _finding(result, "GPU")
    assert found.startswith("note") and "served by the sm_80 kernels, built, never run" in found
    assert "-> run `glulam validate`" in found


def test_doctor_knows_better_kernels_than_those_that_are_there(
    machine: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    a10 = doctor.Gpu("NVIDIA A10", (8, 6), "sm_80")
    monkeypatch.delenv("GLULAM_ARCH", raising=False)
    found = _finding(machine(a10), "GPU")
    assert found.startswith("note") and "those of sm_86 would fit it better" in found
    assert "-> glulam build --arch sm_86" in found
    monkeypatch.setenv("GLULAM_ARCH", "sm_80")  # which somebody asked for
    assert "sm_86" not in _finding(machine(a10), "GPU")


B200 = doctor.Gpu("NVIDIA B200", (10, 0), "sm_100")


def test_doctor_tells_of_native_kernels_that_no_gpu_ran(
    machine: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLULAM_ARCH", raising=False)
    monkeypatch.setattr(doctor, "state_of", lambda arch, gpu: device.VALIDATED)
    result = machine(B200)
    found = _finding(result, "untried")
    assert found.startswith("note") and "sm_100a kernels" in found
    assert "never run on any GPU; the sm_100 kernels serve" in found
    assert "-> `glulam build --arch sm_100a`, then `GLULAM_ARCH=sm_100a glulam validate`" in found
    assert _finding(result, "GPU").startswith("ok") and "fit it better" not in result.output
    monkeypatch.setenv("GLULAM_ARCH", "sm_100")  # which somebody asked for
    assert "untried" not in machine(B200).output


@pytest.mark.parametrize(
    ("gpu", "best"), [(B200, "sm_100a"), (doctor.Gpu("NVIDIA A10", (8, 6), "sm_80"), "sm_86")], ids=["B200", "A10"]
)
def test_doctor_tells_of_a_bundle_that_is_not_validated(
    machine: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: doctor.Gpu, best: str
) -> None:
    monkeypatch.delenv("GLULAM_ARCH", raising=False)
    monkeypatch.setenv(loader.ENV_BUNDLE, str(tmp_path))
    (tmp_path / best).mkdir()
    (tmp_path / best / manifest.FILE).touch()
    result = machine(gpu)
    found = _finding(result, "untried")
    assert found.startswith("note")
    assert f"the {best} kernels were built, never run here; the {gpu.arch} kernels serve" in found
    assert f"-> `GLULAM_ARCH={best} glulam validate` tries them" in found
    assert "fit it better" not in result.output and f"glulam build --arch {best}" not in result.output
    assert "untried" not in machine(gpu._replace(arch=best)).output


def test_validating_needs_a_gpu() -> None:
    result = _run("validate")
    assert result.exit_code == 1 and "torch sees no CUDA GPU" in result.output and len(result.output.splitlines()) == 1


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
    assert "-> run `glulam build --arch sm_90a --out " in finding


def test_doctor_without_torch(machine: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_torch", lambda: None)
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


def test_doctor_with_other_versions(machine: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run-time library that only runs kernels, then one that does not."""
    here = toolchain.versions()
    monkeypatch.setattr(toolchain, "versions", lambda: {**here, toolchain.DSL: "4.7.1"})
    result = machine(None)
    assert result.exit_code == 0
    assert _finding(result, "run time").startswith("ok")
    assert "4.7.1 is installed, kernels are compiled with 4.8.1" in _finding(result, "compiling")
    assert '-> run `pip install "nvidia-cutlass-dsl[cu13]==4.8.1"`' in _finding(result, "compiling")

    monkeypatch.setattr(toolchain, "versions", lambda: {**here, toolchain.DSL: "4.6.3"})
    result = machine(None)
    assert result.exit_code == 1
    assert "4.6.3 is installed, Glulam runs with >=4.7.1,<4.9" in _finding(result, "run time")
    assert '-> run `pip install "nvidia-cutlass-dsl[cu13]>=4.7.1,<4.9"`' in _finding(result, "run time")


@pytest.mark.parametrize("module", ["glulam", "glulam.command.cli"])
def test_the_command_runs_as_a_module(module: str) -> None:
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "python"), *filter(None, sys.path)])
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert "Usage: glulam " in done.stdout
    for command in ("build", "info", "doctor"):
        assert command in done.stdout


@pytest.mark.parametrize("command", ["", "compile ", "cache ", "cache list "])
def test_help_has_a_short_option(command: str) -> None:
    short, long = (_run(*command.split(), option) for option in ("-h", "--help"))
    assert short.exit_code == 0 and short.output == long.output and "Usage:" in short.output


LAYER = ["--experts", "8", "--in-features", "64", "--out-features", "64"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("build --arch sm_75", "'--arch': 'sm_75' is not one of sm_90a"),
        ("info --arch sm_75", "'--arch': 'sm_75' is not one of sm_90a"),
        ("build --jobs 0", "'--jobs'"),
        ("build --machine sparc", "'--machine': 'sparc' is not one of x86_64, aarch64"),
        ("build --machine aarch64", "--machine aarch64 needs --out"),
        *(("build --profile foo", f"{profile} (") for profile in PROFILES),
        ("build --only grouped_mm_f16_*", "matches no function of profile 'bf16' of sm_90a; profile 'full' has 6"),
        ("build --arch sm_80 --only *_f16_*", "of profile 'bf16' of sm_80; profile 'full' has "),
        ("build --profile full --only nope*", "of profile 'full' of sm_90a; no other profile has one; names are as '"),
        ("cache forget nope", "nope is not preferred; no kernel is"),
        ("compile", "give an operator (grouped_mm, grouped_glu, grouped_mlp, grouped_dglu, grouped_wgrad) or --tuned"),
        ("compile grouped_mm --tuned", "one of the two"),
        ("compile conv", "'conv' is not one of grouped_mm, grouped_glu"),
        ("compile fold_mxfp8", "'fold_mxfp8' is not one of grouped_mm"),
        ("compile grouped_mm --cluster 2", "'--cluster': '2' is not one of 1x1, 2x1, 1x2, adaptive"),
        ("compile grouped_mm --cluster 4x1", "'--cluster': '4x1' is not one of"),
        ("compile grouped_mm --tile 128x128x64x1", "'--tile': '128x128x64x1' is not of the form 128x256x64"),
        ("compile grouped_mm --tile 128x128", "'--tile': '128x128' is not of the form"),
        ("compile grouped_mm --tile axbxc", "'--tile': 'axbxc' is not of the form"),
        ("compile grouped_mm --tile 128x128x128", "where the last is always 64"),
        ("compile grouped_mm --tile -128x128x64", "'--tile': '-128x128x64' is not"),
        ("compile grouped_mm --tile 96x256x64", "choice is --tile 128x256x64 --cluster 1x1 --schedule cooperative"),
        ("compile grouped_wgrad --cluster adaptive", "choice is --tile 128x128x64 --cluster 1x1 --schedule coop"),
        ("compile grouped_mm --schedule swapped", "'--schedule': 'swapped' is not one of cooperative, pingpong"),
        ("compile grouped_mm --dtype float32", "'--dtype': 'float32' is not one of bfloat16, float16"),
        (
            "compile grouped_mm --activation gelu",
            "grouped_mm has no option --activation; it has --dtype, --transpose-w",
        ),
        ("compile grouped_wgrad --save-preact", "grouped_wgrad has no option --save-preact"),
        ("compile grouped_glu --activation gelu --glu-layout interleaved", "--glu-layout 'interleaved' has no meaning"),
        ("compile grouped_wgrad --dtype float16 --out-dtype bfloat16", "--out-dtype 'bfloat16' is not supported"),
        ("tune grouped_mm --experts 0 --in-features 64", "'--experts'"),
        ("tune grouped_mm --experts x --in-features 64", "'--experts'"),
        ("tune grouped_mm --experts 8", "'--in-features'"),
        ("tune grouped_mm --experts 8 --in-features 64", "grouped_mm needs --out-features, got 0"),
        ("tune grouped_mm --experts 8 --in-features 60 --out-features 64", "--in-features is 60; kernels need"),
        ("tune grouped_mlp --experts 8 --in-features 64", "grouped_mlp needs --intermediate, got 0"),
        ("tune LAYER --rows-per-expert 1,0", "'--rows-per-expert': '1,0' is not of the form 1,16,256"),
        ("tune LAYER --rows-per-expert many", "'--rows-per-expert'"),
        ("tune LAYER --budget nan", "--budget is nan; give a positive number"),
        ("tune LAYER --budget -1", "--budget is -1"),
        ("tune LAYER --candidates 0", "'--candidates'"),
        ("tune LAYER --jobs 0", "'--jobs'"),
        ("tune LAYER --training", "--training is of a grouped_mlp, not of grouped_mm"),
        ("tune LAYER --activation gelu", "grouped_mm has no option --activation"),
        ("explain LAYER --rows 8 --rows-per-expert 1", "give --rows or --rows-per-expert, not both"),
        ("explain LAYER --rows -8", "'--rows': '-8' is not"),
        ("explain LAYER --arch sm_75", "'--arch': 'sm_75' is not one of sm_90a"),
        ("explain grouped_glu --experts 8 --in-features 64 --intermediate 12", "explain: --intermediate is 12"),
        ("tables --merge /nowhere/a.json", "--merge needs --out"),
        ("tables --merge /nowhere/a.json --out /nowhere/b.json", "/nowhere/a.json is no table of tuned kernels"),
        ("tables --merge /nowhere/out_dtype=.json --out /nowhere/b.json", "/nowhere/out_dtype=.json is no table"),
        ("nonsense", "'nonsense'"),
        ("cache nonsense", "'nonsense'"),
        ("compile --stages 4", "--stages"),
    ],
)
def test_a_mistake_is_one_line_in_the_words_that_were_typed(arguments: str, words: str) -> None:
    result = _run(*arguments.replace("LAYER", " ".join(["grouped_mm", *LAYER])).split())
    assert result.exit_code in (1, 2), result.output
    (line,) = result.output.splitlines()
    assert line.startswith("glulam: ") and words in line
    assert not any(word in line for word in ("TileConfig", "SpecError", "Spec ", "_features", "adaptive=", "tile=("))


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder with an empty cache and a folder for tables; no bundle is found."""
    monkeypatch.setenv(jit.ENV_CACHE, str(tmp_path / "cache"))
    monkeypatch.setenv(known.ENV_TUNED, str(tmp_path / "tuned"))
    monkeypatch.setenv(loader.ENV_BUNDLE, str(tmp_path / "no bundle"))
    monkeypatch.setattr(kernels, "_compiled", {})
    (tmp_path / "tuned").mkdir()
    kernels.forget_choices()
    yield tmp_path
    kernels.forget_choices()


SPEC = GroupedMmSpec(tile=TileConfig(128, 128, 64))
OPERATORS = _run("compile", "nonsense").output.rstrip().rpartition("is not one of ")[2].split(", ")
"""Operators that `glulam compile` accepts, parsed from its error message."""


def test_compile_compiles_what_its_help_lists(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(jit, "get", lambda spec: made.append(spec.op))
    monkeypatch.setattr(loadable, "is_loadable", lambda spec: True)
    listed = " ".join(_run("compile", "--help").output.replace("\u2502", " ").split())
    for op in OPERATORS:
        result = _run("compile", op)
        assert result.exit_code == 0, result.output
        assert op in listed
    assert made == OPERATORS == list(TILED) and "..." not in listed and "fold_mxfp8" not in listed


def _default(op: str) -> Spec:
    """Return the spec that `glulam compile OP` compiles by default."""
    return specs.spec_of(op, {"tile": (128, 128, 64)})


@pytest.fixture(scope="module")
def toy_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with a toy kernel for each operator of `glulam compile`. Shared by tests, which must not change it: use
    `compiler` for that.
    """
    folder = tmp_path_factory.mktemp("toy_cache")
    (folder / "work").mkdir()
    with pytest.MonkeyPatch.context() as patch, Worker(folder / "work", TOY_TRACER) as worker:
        patch.setenv(jit.ENV_CACHE, str(folder / "cache"))
        patch.setattr(jit, "_functions", {})
        for op in OPERATORS:
            jit.get(_default(op), tracer=TOY_TRACER, worker=worker)
    return folder / "cache"


@pytest.fixture
def compiler(place: Path, toy_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own copy of `toy_cache`, on a machine whose compiler makes toy kernels."""
    key_of, get, find = cache.cache_key, jit.get, cache.find
    monkeypatch.setattr(
        cache, "cache_key", lambda spec, tracer=None, *rest, **more: key_of(spec, TOY_TRACER, *rest, **more)
    )
    monkeypatch.setattr(jit, "get", lambda spec: get(spec, tracer=TOY_TRACER))
    monkeypatch.setattr(cache, "find", lambda spec, tracer=None: find(spec, TOY_TRACER))
    monkeypatch.setattr(jit, "_functions", {})
    monkeypatch.setattr(loadable, "_from_cache", {})
    return shutil.copytree(toy_cache, place / "cache")


@pytest.mark.parametrize("op", OPERATORS)
def test_a_compiled_kernel_serves_from_then_on(compiler: Path, op: str) -> None:
    spec = _default(op)
    result = _run("compile", op)
    assert result.exit_code == 0, result.output
    made, served, undo = result.output.splitlines()
    registers, kilobytes = _taken(spec)
    assert made.startswith(f"{spec.name}: in {compiler}, ")
    assert made.endswith(f" s; {registers} registers, {kilobytes} KB of shared memory")
    assert served.startswith(f"serves from now on: every {op} on sm_90a of dtype bfloat16")
    assert served.endswith(", whatever the shape") and undo == f"undo with: glulam cache forget {spec.name}"
    assert known.read_preferences().preferred == {family_of(spec): spec}


def _raise(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def _damage_manifests_once_loaded(patch: pytest.MonkeyPatch, place: Path) -> None:
    is_loadable = loadable.is_loadable

    def damaging(spec: Any) -> bool:
        found = is_loadable(spec)
        for file in (place / "cache").glob("*/*/manifest.json"):
            rewrite(file, b"")
        return found

    patch.setattr(loadable, "is_loadable", damaging)


def _close_output(patch: pytest.MonkeyPatch) -> None:
    echo = typer.echo
    patch.setattr(typer, "echo", lambda text, err=False: echo(text, err=True) if err else _raise(BrokenPipeError())())


FULL = OSError(errno.ENOSPC, "No space left on device")
FAILURES: dict[str, tuple[Callable[[pytest.MonkeyPatch, Path], Any], str]] = {
    "it does not compile": (lambda patch, _: patch.setattr(jit, "get", _raise(CompileError("spills"))), "spills"),
    "a tool is missing": (lambda patch, _: patch.setattr(jit, "get", _raise(ToolchainError("no cc"))), "no cc"),
    "the disk is full": (lambda patch, _: patch.setattr(jit, "get", _raise(FULL)), "No space left"),
    "it is not kept": (lambda patch, _: patch.setattr(loadable, "is_loadable", lambda spec: False), "not kept in"),
    "its manifest is damaged": (_damage_manifests_once_loaded, "damaged bundle"),
    "the output is closed": (lambda patch, _: _close_output(patch), ""),
    "the table cannot be locked": (
        lambda _, place: (place / "cache" / "preferred" / ".kernels.json.lock").mkdir(),
        "not preferred after all",
    ),
    "the disk has no locks": (
        lambda patch, _: patch.setattr(filelock, "FileLock", _raise(NotImplementedError("no locks here"))),
        "kernels.json cannot be written: no locks here",
    ),
    "the table cannot be written": (
        lambda patch, _: patch.setattr(records, "write", _raise(FULL)),
        "kernels.json cannot be written: No space left on device",
    ),
}


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("failure", FAILURES)
def test_a_compile_that_fails_leaves_what_is_preferred(
    compiler: Path, place: Path, monkeypatch: pytest.MonkeyPatch, op: str, failure: str
) -> None:
    for other in OPERATORS:
        known.prefer(specs.spec_of(other, {"tile": (128, 192, 64)}))
    (compiler / "preferred" / ".kernels.json.lock").unlink(missing_ok=True)
    table, before = known.folder() / known.FILE, known.read_preferences().preferred
    content = table.read_bytes()
    inject, words = FAILURES[failure]
    with monkeypatch.context() as patch:
        inject(patch, place)
        result = _run("compile", op)
    assert result.exit_code == 1
    error = result.output.splitlines()[-1]
    assert error.startswith("glulam: ") and words in error and "Traceback" not in result.output
    assert table.read_bytes() == content and list(known.folder().glob("*.json")) == [table]
    assert known.read_preferences().preferred == before


def test_a_folder_of_preferences_that_is_never_read_is_not_written(compiler: Path, place: Path) -> None:
    (place / "elsewhere").mkdir()
    (compiler / "preferred").symlink_to(place / "elsewhere")
    result = _run("compile", "grouped_mm")
    assert result.exit_code == 1 and "its folder is a link" in result.output
    assert not list((place / "elsewhere").iterdir())


@pytest.mark.parametrize(
    ("options", "form"),
    [
        ("grouped_mm", "dtype bfloat16, weights [E, N, K]"),
        ("grouped_mm --dtype float16 --transpose-w", "dtype float16, weights [E, K, N]"),
        (
            "grouped_mlp --activation geglu --glu-layout interleaved",
            "dtype bfloat16, activation geglu, glu_layout interleaved, no stored preactivation, weights [E, N, K]",
        ),
        (
            "grouped_glu --activation silu --save-preact",
            "dtype bfloat16, activation silu, stored preactivation, weights [E, N, K]",
        ),
        (
            "grouped_dglu",
            "dtype bfloat16, activation swiglu, glu_layout concat, weights [E, N, K], no gradient of x",
        ),
        ("grouped_wgrad --out-dtype float32", "dtype bfloat16, out_dtype float32"),
    ],
)
def test_compile_says_which_calls_its_kernel_serves(
    place: Path, monkeypatch: pytest.MonkeyPatch, options: str, form: str
) -> None:
    monkeypatch.setattr(jit, "get", lambda spec: None)
    monkeypatch.setattr(loadable, "is_loadable", lambda spec: True)
    op = options.split()[0]
    told = _run("compile", *options.split()).output
    assert f"serves from now on: every {op} on sm_90a of {form}, whatever the shape\n" in told


def test_what_is_not_preferred_is_not_said_to_serve(compiler: Path) -> None:
    result = _run("compile", "grouped_mm", "--no-prefer")
    assert result.exit_code == 0 and len(result.output.splitlines()) == 1
    assert not known.read_preferences().preferred


class TestForget:
    @pytest.fixture(autouse=True)
    def kernels_are_there(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(jit, "get", lambda spec: None)
        monkeypatch.setattr(loadable, "is_loadable", lambda spec: True)

    def test_the_line_that_compile_prints_drops_its_preference_alone(self) -> None:
        for op in OPERATORS:
            before = known.read_preferences().preferred
            told = _run("compile", op).output
            others = _run("compile", *("grouped_mm" if op != "grouped_mm" else "grouped_glu", "--dtype", "float16"))
            assert others.exit_code == 0
            (undo,) = [line for line in told.splitlines() if line.startswith("undo with: ")]
            result = _run(*undo.removeprefix("undo with: glulam ").split())
            assert result.exit_code == 0 and len(result.output.splitlines()) == 1, result.output
            left = known.read_preferences().preferred
            assert family_of(_default(op)) not in left and before.items() <= left.items() and len(left) > 0

    def test_one_that_takes_anothers_place_names_it(self) -> None:
        assert "in place of" not in _run("compile", "grouped_mm").output
        assert "in place of" not in _run("compile", "grouped_mm").output
        told = _run("compile", "grouped_mm", "--tile", "64x128x64").output
        assert f"in place of: {SPEC.name}\n" in told
        result = _run("cache", "forget", SPEC.name)
        assert result.exit_code == 1 and f"{SPEC.name} is not preferred; preferred are grouped_mm_" in result.output

    def test_the_kernel_is_served_no_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernels, "find", lambda spec: kernels.Kernel(print, "jit"))
        layer = ["explain", "grouped_mm", *LAYER, "--rows", "8"]
        shipped = _run(*layer).output
        _run("compile", "grouped_mm", "--tile", "64x256x64")
        kernels.forget_choices()
        assert "made it the preferred kernel" in _run(*layer).output
        name = specs.spec_of("grouped_mm", {"tile": (64, 256, 64)}).name
        assert _run("cache", "forget", name).exit_code == 0
        assert _run(*layer).output == shipped

    def test_a_table_that_cannot_be_written_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _run("compile", "grouped_mm")
        content = (known.folder() / known.FILE).read_bytes()
        monkeypatch.setattr(records, "write", _raise(FULL))
        result = _run("cache", "forget", SPEC.name)
        assert result.exit_code == 1 and "No space left" in result.output
        assert (known.folder() / known.FILE).read_bytes() == content

    def test_a_preference_without_a_kernel_is_listed(self) -> None:
        _run("compile", "grouped_mm")
        assert f"preferred but not compiled here: {SPEC.name}\n" in _run("cache", "list").output


def test_an_empty_cache_is_told_in_a_sentence(place: Path) -> None:
    result = _run("cache", "list")
    assert result.exit_code == 0
    assert result.output.startswith(f"no compiled kernels in {place / 'cache'}; `glulam compile` makes one\n")
    assert not set("┏┃│└") & set(result.output)


def test_a_cache_is_listed_under_its_whole_path(compiler: Path) -> None:
    output = _run("cache", "list").output
    assert output.startswith(f"compiled kernels in {compiler}:\n") and _default("grouped_mlp").name in output


def _write_table(path: Path, gpu: str, chosen: Spec = SPEC) -> None:
    """Write a tuned table in which one kernel serves one layer of its operator."""
    is_mlp = chosen.op == "grouped_mlp"
    width, activation = (64, "swiglu") if is_mlp else (0, "none")
    problem = Problem(chosen.op, "bfloat16", 0, 8, 64, width, 64, activation)
    us = {chosen.name: {"uniform": 1.0}, "another": {"uniform": 2.0}}
    points = (tables.Point(4.0, chosen.name, "another", 2.0, us),)
    layer = tables.Layer(tables.layer_of(problem), {chosen.name: chosen}, points)
    tables.write(path, [tables.section(tables.stamp_of(gpu), layer)])


class TestTuned:
    @pytest.fixture(autouse=True)
    def gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(device, "gpu", lambda index: device.Gpu("NVIDIA Fake", "sm_90a", index))

    def test_every_kernel_that_a_table_asks_for_is_compiled(self, compiler: Path, place: Path) -> None:
        wanted = [_default(op) for op in ("grouped_mlp", "grouped_mm")]
        for spec in wanted:
            _write_table(place / "tuned" / "a.json", "NVIDIA Fake", spec)
        result = _run("compile", "--tuned")
        assert result.exit_code == 0, result.output
        assert {line.split(":")[0] for line in result.output.splitlines()} == {spec.name for spec in wanted}
        assert result.output.count(" KB of shared memory") == 2
        assert not known.read_preferences().preferred

    def test_without_a_table_it_says_so(self, place: Path) -> None:
        result = _run("compile", "--tuned")
        assert result.exit_code == 1
        assert result.output.startswith("glulam: no table chooses a kernel for NVIDIA Fake; ")


class TestExplain:
    def test_every_choice_and_why(self, place: Path) -> None:
        result = _run("explain", "grouped_mm", *LAYER, "--rows", "8,4096")
        assert result.exit_code == 0, result.output
        assert "8 rows: grouped_mm on sm_90a: grouped_mm_bf16_nt_" in result.output
        assert "4096 rows: grouped_mm on sm_90a" in result.output
        assert "run `glulam build --arch sm_90a --out " in result.output

    @pytest.mark.parametrize("arch", ARCHS)
    @pytest.mark.parametrize("op", ["grouped_mm", "grouped_glu", "grouped_mlp"])
    def test_numbers_are_written_out(self, place: Path, monkeypatch: pytest.MonkeyPatch, op: str, arch: str) -> None:
        monkeypatch.setattr(kernels, "find", lambda spec: kernels.Kernel(print, "shipped"))
        sizes = ["--experts", "8", "--in-features", "4096", "--rows-per-expert", "1,1024,4096,1048576", "--arch"]
        width = ["--out-features", "4096"] if op == "grouped_mm" else ["--intermediate", "4096"]
        result = _run("explain", op, *sizes, arch, *width)
        assert result.exit_code == 0, result.output
        for rows in (1, 1024, 4096, 1048576):
            assert f"why      {8 * rows} rows over 8 experts are {rows} an expert" in result.output
        assert "e+" not in result.output

    def test_kernels_that_nobody_ran_are_named(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(device, "gpu", lambda index: device.Gpu("NVIDIA B200", "sm_100", 148, "sm_100a"))
        layer = ["explain", "grouped_mm", *LAYER, "--rows", "8"]
        told = _run(*layer).output
        assert "8 rows: grouped_mm on NVIDIA B200: " in told and "why not  sm_100a kernels" in told
        assert "8 rows: grouped_mm on GPU: " in _run(*layer, "--gpu", "GPU").output
        other = _run(*layer, "--arch", "sm_90a").output
        assert "8 rows: grouped_mm on NVIDIA B200: " in other and "sm_100a" not in other

    def test_a_table_of_the_gpu_that_is_named(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        _write_table(place / "tuned" / "a.json", "NVIDIA Fake")
        monkeypatch.setattr(loadable, "is_loadable", lambda spec: True)
        monkeypatch.setattr(kernels, "find", lambda spec: kernels.Kernel(print, "jit"))
        told = _run("explain", "grouped_mm", *LAYER, "--rows-per-expert", "4", "--gpu", "NVIDIA Fake").output
        assert f"32 rows: grouped_mm on NVIDIA Fake: {SPEC.name} (tuned)" in told and "a.json has it fastest" in told
        kernels.forget_choices()
        other = _run("explain", "grouped_mm", *LAYER, "--rows-per-expert", "4", "--gpu", "NVIDIA H100").output
        assert SPEC.name not in other and "a.json is ignored: measured on NVIDIA Fake, this is NVIDIA H100" in other

    def test_options_are_those_of_tune(self, place: Path) -> None:
        layer = ["--experts", "8", "--in-features", "64", "--intermediate", "64", "--rows-per-expert", "1,16"]
        forms = ["--dtype", "float16", "--activation", "geglu", "--glu-layout", "interleaved"]
        told = _run("explain", "grouped_mlp", *layer, *forms).output
        assert "grouped_mlp_f16_geglu_interleaved_t" in told
        told = _run("explain", "grouped_mlp", *layer, "--training").output
        for op in ("grouped_mlp_bf16_gated_blocked_preact", "grouped_dglu_bf16", "grouped_wgrad_bf16_bf16"):
            assert op in told
        assert _run("explain", "grouped_wgrad", *LAYER, "--out-dtype", "float32").output.count("wgrad_bf16_f32") >= 8


def _damage(place: Path) -> list[Path]:
    """Write one valid table and preference, then damaged ones; return the damaged files' paths."""
    _write_table(place / "tuned" / "sound.json", "NVIDIA Fake")
    known.prefer(SPEC)
    damaged = []
    for folder in (place / "tuned", known.folder()):
        for name, content in (("deep", b"[" * 100_000), ("bytes", b"\xff\xfe"), ("empty", b""), ("other", b"{}")):
            damaged.append(folder / f"{name}.json")
            damaged[-1].write_bytes(content)
        damaged += [folder / "folder.json", folder / "link.json"]
        damaged[-2].mkdir()
        damaged[-1].symlink_to("nowhere")
    kernels.forget_choices()
    return damaged


@pytest.mark.parametrize(
    ("command", "folder"),
    [
        (["tables"], "tuned"),
        (["doctor"], "tuned"),
        (["doctor"], "preferred"),
        (["explain", "grouped_mm", *LAYER, "--gpu", "NVIDIA Fake"], "tuned"),
        (["explain", "grouped_mm", *LAYER, "--gpu", "NVIDIA Fake"], "preferred"),
        (["cache", "list"], "preferred"),
        (["cache", "verify"], "preferred"),
        (["cache", "clear"], "preferred"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else value,
)
def test_what_is_damaged_is_named_with_its_remedy(place: Path, command: list[str], folder: str) -> None:
    damaged = [path for path in _damage(place) if path.parent.name == folder]
    result = _run(*command)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert result.exit_code == 0, result.output
    told = [part for line in result.output.splitlines() for part in line.split("; the ")]
    for path in damaged:
        (line, *_) = [part for part in told if str(path) in part]
        assert "ignored" in line and "remove it" in line
    assert all(os.path.lexists(path) for path in damaged), "what is not ours is left"


STRANGE = [b'a"b', b"a\\b", b"a\nb", b"a\xffb", b"a'b c", b"[red]a", b"a\x1b[2Jb", "a\x9b2J\u202eb".encode()]


@pytest.mark.parametrize("name", STRANGE, ids=ascii)
def test_any_path_can_be_told_of(place: Path, toy_bundle: Path, monkeypatch: pytest.MonkeyPatch, name: bytes) -> None:
    folder = place / os.fsdecode(name)
    folder.mkdir()
    _write_table(folder / "t.json", "NVIDIA Fake")
    (folder / "preferred").mkdir()
    (folder / "preferred" / f"{os.fsdecode(name)}.json").write_text("{}")
    (folder / f"{os.fsdecode(name)}.json").write_text("{}")
    (folder / f"{os.fsdecode(name)}-0").mkdir()
    monkeypatch.setenv(jit.ENV_CACHE, str(folder))
    monkeypatch.setenv(known.ENV_TUNED, str(folder))
    monkeypatch.setenv(loader.ENV_BUNDLE, str(folder))
    monkeypatch.setenv("CC", os.fsdecode(name))
    for command in (
        ["tables"], ["tables", "--merge", str(folder / "t.json"), "--out", str(folder / "u.json")],
        ["explain", "grouped_mm", *LAYER, "--gpu", "NVIDIA Fake"], ["cache", "list"], ["cache", "verify"],
        ["cache", "clear"], ["doctor"], ["info", "--bundle", str(folder)],
    ):  # fmt: skip
        result = _run(*command)
        assert result.exception is None or isinstance(result.exception, SystemExit), command
        assert all(letter.isprintable() for letter in result.output if letter != "\n"), command
        if name.startswith(b"[red]"):
            assert command[0] in ("explain", "doctor") or name.decode() in result.output


ESCAPES = "\x1b[2J\x07\x9b2J\u202e\r\x00\udcff"
ESCAPED = r"\x1b[2J\x07\x9b2J\u202e\r\x00\udcff"


@pytest.mark.parametrize(
    "shown",
    [
        lambda: app.show(f"a{ESCAPES}"),
        lambda: app.show(_grid()),
        lambda: app.console().print(f"a{ESCAPES}", style="red", end=""),
        lambda: app.say(f"a{ESCAPES}"),
        lambda: app.say_error(f"a{ESCAPES}"),
    ],
)
def test_a_terminal_acts_on_nothing_that_is_shown(capfd: pytest.CaptureFixture[str], shown: Callable[[], None]) -> None:
    shown()
    out, err = capfd.readouterr()
    assert ESCAPED in out + err and all(letter.isprintable() or letter == "\n" for letter in out + err)


def _grid() -> Table:
    grid = Table(ESCAPES, title=ESCAPES)
    grid.add_row(ESCAPES)
    return grid


def test_lines_and_tabs_of_a_message_stay() -> None:
    assert terminal.printable("a\n\tb é \N{SNOWMAN} \\x1b") == "a\n\tb é \N{SNOWMAN} \\x1b"


def test_warnings_are_escaped_and_mistakes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def warn() -> None:
        warnings.warn(ESCAPES, RuntimeWarning, stacklevel=1)
        raise ValueError(ESCAPES)

    monkeypatch.setattr(known, "tables", warn)
    result = _run("tables")
    assert result.exit_code == 1 and result.output == f"glulam: {ESCAPED}\n" * 2


def test_a_finding_of_doctor_is_one_line(machine: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(loader.ENV_BUNDLE, "/a\nok   GPU          a forged line")
    assert not [line for line in machine(None).output.splitlines() if "forged" in line and line.startswith("ok")]


def test_everything_is_shown_by_these() -> None:
    """Commands print through `app`, whose functions escape."""
    folder = REPOSITORY / "python" / "glulam" / "command"
    direct = re.compile(r"(?<![\w.])print\(|typer\.s?echo\(|std\w+\.write\(|(?<!Plain)Console\(")
    assert {file.name for file in folder.glob("*.py") if direct.search(file.read_text())} == {"app.py"}


@pytest.mark.parametrize("name", STRANGE, ids=ascii)
def test_any_path_can_be_linked_in(tmp_path: Path, name: bytes) -> None:
    folder = tmp_path / os.fsdecode(name)
    folder.mkdir()
    (tmp_path / "one.c").write_text("int one(void) { return 1; }")
    command = [*toolchain.c_compiler(), "-fPIC", "-c", str(tmp_path / "one.c"), "-o", str(folder / "one.o")]
    subprocess.run(command, check=True)
    link.link([folder / "one.o"], folder / "lib.so")
    assert (folder / "lib.so").stat().st_size > 0 and not (folder / "lib.rsp").exists()
    (folder / "one.o").unlink()
    with pytest.raises(CompileError, match="linking lib.so failed"):
        link.link([folder / "one.o"], folder / "lib.so")


def test_a_table_is_written_by_merging(place: Path) -> None:
    for name in ("a", "b"):
        _write_table(place / f"{name}.json", f"GPU {name}")
    out = place / "all.json"
    result = _run("tables", "--merge", str(place / "a.json"), "--merge", str(place / "b.json"), "--out", str(out))
    assert result.output == f"{out}: 2 sections\n" and len(json.loads(out.read_text())["sections"]) == 2
