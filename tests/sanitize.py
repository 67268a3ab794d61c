"""`make sanitize`: every kernel of the bundle once, under each tool of compute-sanitizer.

Each tool watches one process, which makes the first call of `glulam validate` for each function and writes down what
was launched. A tool that finds something, gives no summary, or a kernel that nothing launched, is a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

import ffi_bridge
from cute_kernels.chains import stages_of
from cute_kernels.layer.kernels import RANK_KERNELS
from cute_kernels.specs import LayerSpec, QuantizeMxfp8Spec, Spec, from_dict
from ffi_bridge.loader import bundle_root
from ffi_bridge.verification import verify
from glulam.choose import known
from glulam.host import device as gpus
from glulam.host.plans import forget_plans
from glulam.validate import child
from glulam.validate.catalogue import trials_of
from glulam.validate.inputs import Size

PROGRAM = "compute-sanitizer"
TOOLS: dict[str, tuple[str, ...]] = {
    "memcheck": ("--check-device-heap", "no"),
    "racecheck": ("--racecheck-report", "all"),
    "synccheck": (),
    "initcheck": (),
}
"""Tools, and options of each."""
SMALL = Size(rows=70, experts=4, kinds=("Zipf", "uniform"), has_odd=False, tokens=(65,), has_every_pair=False)
"""Sizes of calls: a tool makes a kernel 10 to 100 times slower."""
_SUMMARIES = (
    re.compile(r"^=+ ERROR SUMMARY: (?P<errors>\d+) errors?\b", re.MULTILINE),
    re.compile(
        r"^=+ RACECHECK SUMMARY: (?P<errors>\d+) hazards? displayed \(\d+ errors?, \d+ warnings?\)", re.MULTILINE
    ),
)
_NOTES = re.compile(r"^=+ +(?!COMPUTE-SANITIZER)(?P<note>\S.*)$", re.MULTILINE)
MOST_NOTES = 5


def findings(log: str) -> tuple[int | None, list[str]]:
    """Parse a tool's log.

    Returns:
        The number of errors or hazards in its last summary, None if there is no summary; the first other lines of the
        tool.
    """
    counts = [int(match["errors"]) for pattern in _SUMMARIES for match in pattern.finditer(log)]
    notes = [match["note"] for match in _NOTES.finditer(log) if "SUMMARY" not in match["note"]]
    return (counts[-1] if counts else None), notes[:MOST_NOTES]


def is_out_of_reach(spec: Spec) -> bool:
    """Return True if no call on one GPU launches a spec: kernels between GPUs, and float32 rows rounded to MXFP8."""
    between_gpus = isinstance(spec, LayerSpec) and spec.kernel in RANK_KERNELS
    return between_gpus or (isinstance(spec, QuantizeMxfp8Spec) and spec.rounded and spec.dtype == "float32")


def missed(specs: Iterable[Spec], launched: Iterable[Spec]) -> list[str]:
    """Return the names of functions and stages that were not launched, except those out of reach."""
    there = {stage for spec in specs for stage in (spec, *stages_of(spec))}
    touched = {stage for spec in launched for stage in (spec, *stages_of(spec))}
    return sorted(spec.name for spec in there - touched if not is_out_of_reach(spec))


def touch(specs: Iterable[Spec], device: torch.device) -> None:
    """Make the first call of each function that has one."""
    for spec in specs:
        trial = next(trials_of(spec, SMALL), None)
        if trial is None:
            continue
        known.forget()
        forget_plans()
        child.prefer(spec)
        with torch.no_grad():
            trial.call(child._all(trial.given, lambda one: one.to(device)))


def _shipped(index: int) -> tuple[str, dict[str, Spec]]:
    arch = gpus.gpu(index).arch
    manifest = verify(bundle_root() / arch, arch)
    return arch, {name: from_dict(function.spec) for name, function in manifest.functions.items()}


def run_child(index: int, out: Path) -> None:
    """Run the watched process: launch every function, and write the names of the called ones."""
    torch.cuda.set_device(index)
    arch, specs = _shipped(index)
    touch(specs.values(), torch.device("cuda", index))
    torch.cuda.synchronize()
    out.write_text(json.dumps(sorted(ffi_bridge.load(arch).given_out)))


def refusal() -> str:
    """Return text on what is missing to run at all; "" if nothing is."""
    if shutil.which(PROGRAM) is None:
        return f"sanitize: there is no {PROGRAM}; install the CUDA toolkit, and put its bin folder on PATH"
    if not torch.cuda.is_available():
        return "sanitize: torch sees no GPU; run it where there is one"
    return ""


def command(tool: str, log: Path, index: int, out: Path) -> list[str]:
    """Return the command line of a tool."""
    options = ("--log-file", str(log), "--print-limit", "100", *TOOLS[tool])
    return [PROGRAM, "--tool", tool, *options, sys.executable, str(Path(__file__)), "--child", str(out),
            "--device", str(index)]  # fmt: skip


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a watched process, in which each tensor has its own allocation, so that tools see its
    bounds.
    """
    return {**given, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_LAUNCH_BLOCKING": "1", gpus.ENV_UNVALIDATED: "1"}


def verdict(tool: str, status: int, log: str, left: Sequence[str]) -> str:
    """Return text on what is wrong with a tool's run; "" if nothing is. left: functions that were not launched."""
    count, notes = findings(log)
    if count is None:
        return f"{tool}: it gave no summary, and its process ended with {status}" + "".join(f"\n    {n}" for n in notes)
    if count:
        return f"{tool}: {count} errors" + "".join(f"\n    {note}" for note in notes)
    if status:
        return f"{tool}: it found nothing, but its process ended with {status}"
    return f"{tool}: {len(left)} functions were not launched: {', '.join(left[:MOST_NOTES])}" if left else ""


def sanitize(index: int, tools: Sequence[str]) -> int:
    """Run tools one after the other. Return 0 if none found anything, else 1."""
    os.environ[gpus.ENV_UNVALIDATED] = "1"
    _, specs = _shipped(index)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for tool in tools:
            log, out = Path(folder, f"{tool}.log"), Path(folder, f"{tool}.json")
            done = subprocess.run(command(tool, log, index, out), env=environment(os.environ))
            called = json.loads(out.read_text()) if out.exists() else []
            left = missed(specs.values(), [specs[name] for name in called if name in specs])
            text = log.read_text(errors="replace") if log.exists() else ""
            wrong = verdict(tool, done.returncode, text, left)
            print(wrong or f"{tool}: {len(specs)} functions, nothing found", flush=True)
            failed += bool(wrong)
    return int(bool(failed))


def main(given: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if no tool found anything, 1 if one did, 2 if the program or a GPU is missing."""
    parser = argparse.ArgumentParser(prog="sanitize", description=__doc__)
    parser.add_argument("--device", type=int, default=0, help="index of the GPU")
    parser.add_argument("--tool", action="append", default=[], choices=TOOLS, help="repeatable; default: all")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    told = parser.parse_args(given)
    if told.child:
        run_child(told.device, told.child)
        return 0
    if why := refusal():
        print(why, file=sys.stderr)
        return 2
    return sanitize(told.device, told.tool or list(TOOLS))


if __name__ == "__main__":
    sys.exit(main())
