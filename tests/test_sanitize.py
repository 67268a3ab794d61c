"""`make sanitize`: the kernels it launches, parsing of a tool's summary, and one-line errors without a GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sanitize
import torch
from emulator.emulated_gpu import installed
from emulator.launch import Emulator, stage_of
from support.fake_gpu import FakeGpu

from cute_kernels.chains import stages_of
from cute_kernels.layer.kernels import RANK_KERNELS
from cute_kernels.specs import LayerSpec, MhcSpec, QuantizeMxfp8Spec, Spec
from ffi_bridge import profiles
from glulam.host import device

pytest_plugins = ["support.fixtures"]
ARCH = "sm_80"
SHIPPED = profiles.shipped_specs(ARCH, "bf16")

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
RACES = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
BAD = (
    "========= COMPUTE-SANITIZER\n"
    "========= Invalid __global__ read of size 4 bytes\n"
    "=========     at kernel+0x1a0\n"
    "=========     by thread (31,0,0) in block (0,0,0)\n"
    "=========\n"
    "========= ERROR SUMMARY: 1 error\n"
)


def test_one_call_of_each_function_launches_every_kernel(a100: FakeGpu) -> None:
    sanitize.touch(dict.fromkeys(SHIPPED, 1), torch.device("cpu"))
    assert sanitize.missed(SHIPPED, a100.specs) == []
    out_of_reach = [spec for spec in SHIPPED if sanitize.is_out_of_reach(spec)]
    assert {spec.kernel for spec in out_of_reach if isinstance(spec, LayerSpec)} == set(RANK_KERNELS)
    assert len(out_of_reach) < len(SHIPPED) / 10


OF_SEVERAL_KERNELS = [
    spec
    for spec in profiles.shipped_specs("sm_90a", "full")
    if isinstance(spec, (MhcSpec, QuantizeMxfp8Spec)) and stages_of(spec) == (spec,) and not getattr(spec, "rounded", 0)
]
"""Functions that choose among their kernels when they are called, in the emulator's first architecture."""


def kernels_left(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the kernels in a function's PTX that its calls do not launch. None of them runs."""
    small = sanitize.SMALL._replace(streams=(((3,), 64),), matrices=((5, 64),))
    monkeypatch.setattr(sanitize, "SMALL", small)
    there = set(stage_of(spec).programs)
    ran: set[str] = set()
    monkeypatch.setattr(Emulator, "_launch", lambda self, stage, launch, memory: ran.add(launch.kernel))
    with installed("sm_90a"):
        sanitize.touch({spec: len(there)}, torch.device("cpu"))
    return there - ran


@pytest.mark.parametrize("kernel", ["boundary"])
def test_every_kernel_of_a_function_is_launched(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of a boundary with x_block launch its second finish."""
    spec = MhcSpec(kernel)
    assert any("finish_mxfp8" in name for name in stage_of(spec).programs)
    assert not kernels_left(spec, monkeypatch)


@pytest.mark.emulator
@pytest.mark.parametrize("spec", OF_SEVERAL_KERNELS, ids=lambda spec: spec.name)
def test_every_kernel_of_every_function_is_launched(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not kernels_left(spec, monkeypatch)


def test_a_kernel_that_nothing_launched_is_named() -> None:
    some = [spec for spec in SHIPPED if spec.name.startswith("grouped_mm_bf16_nt")]
    assert sanitize.missed(some, some[1:]) == [some[0].name]
    assert sanitize.missed(some, some) == [] and len(some) > 1


@pytest.mark.parametrize(
    ("log", "count", "first"),
    [
        (CLEAN, 0, None),
        (RACES, 0, None),
        (BAD, 1, "Invalid __global__ read of size 4 bytes"),
        (RACES.replace("0 hazards", "12 hazards"), 12, None),
        ("", None, None),
        ("========= Error: No CUDA-capable device\n", None, "Error: No CUDA-capable device"),
        (BAD + CLEAN, 0, "Invalid __global__ read of size 4 bytes"),
    ],
)
def test_summaries(log: str, count: int | None, first: str | None) -> None:
    found, notes = sanitize.findings(log)
    assert found == count and (notes[0] if notes else None) == first


@pytest.mark.parametrize(
    ("status", "log", "left", "words"),
    [
        (0, CLEAN, [], ""),
        (0, RACES, [], ""),
        (0, BAD, [], "memcheck: 1 errors\n    Invalid __global__ read"),
        (1, CLEAN, [], "memcheck: it found nothing, but its process ended with 1"),
        (-6, "", [], "memcheck: it gave no summary, and its process ended with -6"),
        (0, CLEAN, ["f", "g"], "memcheck: 2 functions were not launched: f, g"),
    ],
)
def test_a_verdict(status: int, log: str, left: list[str], words: str) -> None:
    assert sanitize.verdict("memcheck", status, log, left).startswith(words)
    assert bool(sanitize.verdict("memcheck", status, log, left)) == bool(words)


@pytest.mark.parametrize("is_there", [False, True])
def test_what_is_missing_is_one_line(
    is_there: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/it" if is_there else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sanitize.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert ("torch sees no GPU" if is_there else "there is no compute-sanitizer; install the CUDA toolkit") in line


@pytest.mark.parametrize("is_sound", [True, False])
def test_every_tool_runs_once(
    is_sound: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in of the program, whose memcheck finds something where it is not sound."""
    some = {spec.name: spec for spec in SHIPPED[:3]}
    ran: list[str] = []

    def run(command: list[str], env: dict[str, str]) -> Any:
        assert command[0] == sanitize.PROGRAM and env["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
        tool, log, out = (command[command.index(name) + 1] for name in ("--tool", "--log-file", "--child"))
        ran.append(tool)
        Path(log).write_text(BAD if tool == "memcheck" and not is_sound else RACES if tool == "racecheck" else CLEAN)
        Path(out).write_text(json.dumps(list(some)))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(sanitize, "refusal", lambda: "")
    monkeypatch.setattr(sanitize, "_shipped", lambda index: (ARCH, dict.fromkeys(some.values(), 1)))
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv(device.ENV_UNVALIDATED, "0")
    assert sanitize.main([]) == int(not is_sound)
    assert ran == ["memcheck", "racecheck", "synccheck", "initcheck"] == list(sanitize.TOOLS)
    lines = capsys.readouterr().out.splitlines()
    assert sum("3 functions, nothing found" in line for line in lines) == (4 if is_sound else 3)


def test_a_tool_can_be_chosen() -> None:
    line = sanitize.command("racecheck", Path("log"), 1, Path("out"))
    assert line[:3] == [sanitize.PROGRAM, "--tool", "racecheck"] and "--racecheck-report" in line
    with pytest.raises(SystemExit):
        sanitize.main(["--tool", "leakcheck"])


def test_specs_are_those_of_the_manifest(a100: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from cute_kernels.specs import to_dict

    some: list[Spec] = SHIPPED[:2]
    functions = {spec.name: SimpleNamespace(spec=to_dict(spec), kernels=(None,) * 2) for spec in some}
    monkeypatch.setattr(sanitize, "verify", lambda folder, arch: SimpleNamespace(functions=functions))
    assert sanitize._shipped(0) == (ARCH, dict.fromkeys(some, 2))
