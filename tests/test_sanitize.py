"""`make sanitize`: the kernels it launches, how processes share them, parsing of logs, and errors without a GPU."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from emulator import validated
from emulator.emulated_gpu import installed
from emulator.launch import Emulator, stage_of
from sanitize import __main__ as program
from sanitize import launches, reports
from sanitize.reports import Ran, Report
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
UNINITIALISED = "Uninitialized __global__ memory read of size 16 bytes"
TWO_KERNELS = (
    "========= COMPUTE-SANITIZER\n"
    + "".join(
        f"========= {UNINITIALISED}\n"
        f"=========     at quantize_0+0x4d0\n"
        f"=========     by thread ({thread},0,0) in block (8,0,0)\n"
        f"=========     Address 0x7f{thread:010x}\n"
        "=========     Saved host backtrace up to driver entry point at kernel launch time\n"
        "=========         Host Frame: Engine::evaluate(Node*)+0x2f in libtorch_cpu.so\n"
        "=========\n"
        for thread in range(98)
    )
    + f"========= {UNINITIALISED}\n=========     at void at::sum<(int)4, Add>(int, T2)+0x10 in Sum.cu:7\n=========\n"
    "========= Error: Potential RAW hazard detected at __shared__ 0x40 in block (3,0,0) :\n"
    "=========     Write Thread (1,0,0) at quantize_0+0x80\n"
    "=========     Read Thread (2,0,0) at other_0+0x90\n"
    "========= Warning: Race reported between Write access at quantize_0+0x80 and Read access at quantize_0+0x90\n"
    "========= Program hit cudaErrorInvalidValue (error 1) on CUDA API call to cudaMemcpy.\n"
    "=========\n"
    "========= ERROR SUMMARY: 142 errors\n"
    "========= ERROR SUMMARY: 42 errors were not printed. Use --print-limit option to adjust the number\n"
)


def test_one_call_of_each_function_launches_every_kernel(a100: FakeGpu) -> None:
    launches.touch(dict.fromkeys(SHIPPED, 1), torch.device("cpu"))
    assert launches.missed(SHIPPED, a100.specs) == []
    out_of_reach = [spec for spec in SHIPPED if launches.is_out_of_reach(spec)]
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
    small = launches.SMALL._replace(streams=(((3,), 64),), matrices=((5, 64),))
    there = set(stage_of(spec).programs)
    ran: set[str] = set()
    monkeypatch.setattr(Emulator, "_launch", lambda self, stage, launch, memory: ran.add(launch.kernel))
    with installed("sm_90a"):
        launches.touch({spec: len(there)}, torch.device("cpu"), small)
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
    assert launches.missed(some, some[1:]) == [some[0].name]
    assert launches.missed(some, some) == [] and len(some) > 1


@pytest.mark.parametrize("jobs", [1, 2, 15])
def test_processes_share_the_functions(jobs: int) -> None:
    """Each function is in one share, the same in each process, and shares launch about as many kernels."""
    specs = dict.fromkeys(SHIPPED, 0) | {MhcSpec("boundary", arch=ARCH): 5}
    shares = launches.shares(specs, jobs)
    assert shares == launches.shares(specs, jobs) and len(shares) == jobs
    assert Counter(spec for share in shares for spec in share) == Counter(list(specs))
    assert {spec: count for share in shares for spec, count in share.items()} == specs
    kernels = [
        sum(specs.get(one) or 1 for one in {one for spec in share for one in stages_of(spec)}) for share in shares
    ]
    assert max(kernels) - min(kernels) <= 5


def test_a_stage_may_be_launched_by_a_chain_of_another_part() -> None:
    chain = next(spec for spec in SHIPPED if stages_of(spec) != (spec,))
    specs = {stages_of(chain)[0]: 0, chain: 0}
    for part in (1, 2):
        run = launches.Share(part=part, parts=2)
        (here,) = run.part_of(specs)
        wanted = [] if here != chain else sorted(one.name for one in (chain, *stages_of(chain)))
        assert launches.missed([here], [], run.elsewhere(specs)) == wanted
    assert not launches.Share().elsewhere(specs)


def test_parts_share_the_functions() -> None:
    """Each function is in one process of one part."""
    specs = dict.fromkeys(SHIPPED, 0)
    runs = [launches.Share(job, 2, part, 3) for part in (1, 2, 3) for job in range(2)]
    assert Counter(spec for run in runs for spec in run.of(specs)) == Counter(list(specs))
    assert set(runs[0].part_of(specs)) == {*runs[0].of(specs), *runs[1].of(specs)}


def test_chains_of_the_same_stages_are_launched_by_one_process() -> None:
    """Their kernels are loaded once. Each share of every second function would load almost all of them."""
    of_stages = {spec: set(stages_of(spec)) for spec in SHIPPED}
    shared = [
        set().union(*(of_stages[spec] for spec in share)) for share in launches.shares(dict.fromkeys(SHIPPED, 0), 8)
    ]
    every_eighth = [set().union(*(of_stages[spec] for spec in SHIPPED[job::8])) for job in range(8)]
    assert sum(map(len, shared)) < sum(map(len, every_eighth)) and max(map(len, shared)) < max(map(len, every_eighth))


@pytest.mark.parametrize(
    ("log", "count"),
    [
        (CLEAN, 0),
        (RACES, 0),
        (BAD, 1),
        (TWO_KERNELS, 142),
        (RACES.replace("0 hazards", "12 hazards"), 12),
        ("", None),
        ("========= Error: No CUDA-capable device\n", None),
        (BAD + CLEAN, 1),
    ],
)
def test_summaries(log: str, count: int | None) -> None:
    assert reports.errors(log) == count


def test_reports_are_counted_by_kernel() -> None:
    assert reports.by_kernel(TWO_KERNELS) == {
        Report("quantize_0", UNINITIALISED): 98,
        Report("void at::sum<(int)4, Add>(int, T2)", UNINITIALISED): 1,
        Report("quantize_0", "Error: Potential RAW hazard detected at __shared__ .. in block .."): 1,
        Report("quantize_0", "Warning: Race reported between Write access and Read access"): 1,
        Report("", "Program hit cudaErrorInvalidValue (error 1) on CUDA API call to cudaMemcpy."): 1,
    }
    lines = reports.listed([BAD, TWO_KERNELS, BAD]).splitlines()[1:]
    assert lines[:2] == [
        f"    quantize_0: 98 x {UNINITIALISED}", "    kernel: 2 x Invalid __global__ read of size 4 bytes",
    ]  # fmt: skip
    assert len(lines) == 6 and reports.listed([CLEAN, RACES, ""]) == ""


@pytest.mark.parametrize(
    ("ran", "left", "words"),
    [
        ([(0, CLEAN)], [], ""),
        ([(0, RACES), (0, RACES)], [], ""),
        ([(0, BAD)], [], "t: 1 errors\n    kernel: 1 x Invalid __global__ read of size 4 bytes"),
        ([(0, BAD), (0, CLEAN), (0, BAD)], [], "t: 2 errors\n    kernel: 2 x Invalid __global__ read of size 4 bytes"),
        ([(0, CLEAN), (1, CLEAN)], [], "t: process 2 of 2 ended with 1, though it found nothing"),
        ([(-6, ""), (0, CLEAN)], [], "t: process 1 of 2 ended with -6, without a summary"),
        ([(1, BAD), (-6, "")], ["f"], "t: 1 errors; process 2 of 2 ended with -6, without a summary; 1 functions were "
         "not launched: f\n    kernel: 1 x Invalid __global__ read of size 4 bytes"),
        ([(255, "========= Error: No GPU\n")], [],
         "t: process 1 of 1 ended with 255, without a summary\n    1 x Error: No GPU"),
        ([(0, CLEAN)], ["f", "g"], "t: 2 functions were not launched: f, g"),
    ],
)  # fmt: skip
def test_a_verdict_is_of_all_processes(ran: list[tuple[int, str]], left: list[str], words: str) -> None:
    assert reports.verdict("t", [Ran(status, log, []) for status, log in ran], left) == words


@pytest.mark.parametrize("is_there", [False, True])
def test_what_is_missing_is_one_line(
    is_there: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/it" if is_there else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert program.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert ("torch sees no GPU" if is_there else "there is no compute-sanitizer; install the CUDA toolkit") in line


def _after(line: Sequence[str], option: str) -> str:
    return line[line.index(option) + 1]


@pytest.mark.parametrize("is_sound", [True, False])
def test_every_tool_runs_once(
    is_sound: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in of the program, whose second process of memcheck finds something where it is not sound."""
    some = dict.fromkeys(SHIPPED[:3], 1)
    logs = tmp_path / "logs"
    ran: list[str] = []

    def run_together(commands: Sequence[list[str]], env: dict[str, str]) -> list[int]:
        assert env["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1" and len(commands) == 2
        for job, (line, share) in enumerate(zip(commands, launches.shares(some, 2), strict=True)):
            tool, log, out = (_after(line, name) for name in ("--tool", "--log-file", "--child"))
            assert line[0] == program.PROGRAM and _after(line, "--jobs") == "2" and _after(line, "--job") == str(job)
            assert not Path(out).exists(), "names of an earlier run's functions"
            ran.append(f"{tool} {job}")
            is_bad = not is_sound and ran[-1] == "memcheck 1"
            Path(log).write_text(BAD if is_bad else RACES if tool == "racecheck" else CLEAN)
            Path(out).write_text(json.dumps([spec.name for spec in share]))
        return [0, 0]

    monkeypatch.setattr(program, "refusal", lambda: "")
    monkeypatch.setattr(launches, "shipped", lambda index: (ARCH, some))
    monkeypatch.setattr(program, "run_together", run_together)
    monkeypatch.setenv(device.ENV_UNVALIDATED, "0")
    for _ in range(2):
        ran.clear()
        assert program.main(["--jobs", "2", "--logs", str(logs)]) == int(not is_sound)
        tools = ["memcheck", "racecheck", "synccheck", "initcheck"]
        assert ran == [f"{tool} {job}" for tool in tools for job in range(2)] and tools == list(program.TOOLS)
        lines = capsys.readouterr().out.splitlines()
        assert sum("3 functions, nothing found" in line for line in lines) == (4 if is_sound else 3)
    assert (logs / "memcheck.1.log").read_text() == (CLEAN if is_sound else BAD)


def test_a_process_gets_its_share_and_its_tools_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watched process makes calls without a tail if its tool is initcheck."""
    got = []
    monkeypatch.setattr(launches, "run_child", lambda *given: got.append(given))
    for tool in ("memcheck", "initcheck"):
        line = program.command(tool, 1, launches.Share(2, 15, 3, 4), program.Files(Path("log"), tmp_path))
        at = line.index("sanitize")
        assert line[at - 2 : at] == [sys.executable, "-m"] and program.main(line[at + 1 :]) == 0
    assert [given[:2] for given in got] == [(1, launches.Share(2, 15, 3, 4))] * 2 and got[0][3] == tmp_path
    assert [given[2] for given in got] == [launches.SMALL, launches.SMALL._replace(has_tail=False)]


STARTS_OTHERS = """
import os, sys
from sanitize.__main__ import run_together
run_together([["sh", "-c", "echo started; sleep 100 & wait"]] * 2, os.environ)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_ends_what_it_started(number: int) -> None:
    """The pipe is at its end once no process holds it, those that watched processes started included."""
    with subprocess.Popen(
        [sys.executable, "-c", STARTS_OTHERS], env=program.environment(os.environ), stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert [running.stdout.readline() for _ in range(2)] == ["started\n"] * 2
        running.send_signal(number)
        assert running.communicate(timeout=60)[0] == "" and running.returncode == 128 + number


def test_an_interrupted_run_says_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_together(commands: Sequence[list[str]], env: dict[str, str]) -> list[int]:
        Path(_after(commands[1], "--log-file")).write_text(BAD)
        sys.exit(143)

    monkeypatch.setattr(launches, "shipped", lambda index: (ARCH, dict.fromkeys(SHIPPED[:3], 1)))
    monkeypatch.setattr(program, "run_together", run_together)
    monkeypatch.setenv(device.ENV_UNVALIDATED, "0")
    with pytest.raises(SystemExit):
        program.sanitize(0, ["racecheck", "memcheck"], launches.Share(jobs=2), tmp_path)
    lines = ["racecheck: interrupted", "    kernel: 1 x Invalid __global__ read of size 4 bytes"]
    assert capsys.readouterr().out.splitlines() == lines


def test_statuses_are_those_of_the_commands() -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert program.run_together([["sh", "-c", f"exit {status}"] for status in (0, 3)], os.environ) == [0, 3]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_tool_can_be_chosen() -> None:
    line = program.command("racecheck", 1, launches.Share(), program.Files(Path("log"), Path("out")))
    assert line[:3] == [program.PROGRAM, "--tool", "racecheck"] and "--racecheck-report" in line
    for wrong in (["--tool", "leakcheck"], ["--jobs", "0"], ["--part", "3/2"], ["--part", "0/2"], ["--part", "1"]):
        with pytest.raises(SystemExit):
            program.main(wrong)


ROW_QUANTISER = "quantize_mxfp8_bf16_row_sm_90a_0"
TINY = launches.SMALL._replace(rows=20, experts=3, inter=64, in_blocks=128)


@pytest.mark.parametrize("has_tail", [True, False])
def test_only_tails_are_read_unwritten(has_tail: bool) -> None:
    """The row quantiser and TMA's boxes read rows after the groups of intermediate tensors, if there are any."""
    (fold,) = (spec for spec in profiles.shipped_specs("sm_90a", "full") if spec.name == "fold_mxfp8_bf16_row_sm_90a")
    with installed("sm_90a") as gpu:
        found = validated.unwritten_by(gpu, fold, TINY._replace(has_tail=has_tail), most=1)
    by_threads = {kernel for kernel, agent in found if agent == "Unit"}
    assert by_threads == ({ROW_QUANTISER} if has_tail else set())
    assert any(agent == "Operation" for _, agent in found) == has_tail and bool(found) == has_tail


def test_specs_are_those_of_the_manifest(a100: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from cute_kernels.specs import to_dict

    some: list[Spec] = SHIPPED[:2]
    functions = {spec.name: SimpleNamespace(spec=to_dict(spec), kernels=(None,) * 2) for spec in some}
    monkeypatch.setattr(launches, "verify", lambda folder, arch: SimpleNamespace(functions=functions))
    assert launches.shipped(0) == (ARCH, dict.fromkeys(some, 2))
