"""`glulam validate`: compare all kernels of a bundle with torch in float64, on this machine's GPU."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import typer

from cute_kernels.specs import from_dict
from ffi_bridge import profiles, stamps, toolchain
from ffi_bridge.loader import bundle_root
from ffi_bridge.manifest import Manifest
from ffi_bridge.verification import verify

from ..host import device as gpus
from ..validate.report import Machine, passes, report
from ..validate.run import FAILED, LIMIT_S, PASSED, Outcome, outcomes
from .app import command, console, count, row, say_error
from .doctor import driver_version


def _arch_of(index: int) -> str:
    """Return the architecture that serves a GPU, even if its kernels were never run there. Raises UnsupportedDevice."""
    os.environ[gpus.ENV_UNVALIDATED] = "1"  # for this process and its child processes
    return gpus.gpu(index).arch


def _machine(arch: str, index: int, manifest: Manifest) -> Machine:
    """Return the description of this machine and of the bundle, with which the report begins."""
    import torch

    versions = {
        "glulam": toolchain.versions()["glulam"], "torch": torch.__version__, "python": platform.python_version(),
        "driver": ".".join(map(str, driver_version() or ())),
        **{f"{name}, compiled": version for name, version in manifest.versions.items()},
    }  # fmt: skip
    capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
    return Machine(gpus.gpu(index).name, capability, arch, manifest.sha256, versions)


def _shown(outcome: Outcome, number: int, total: int, out: Any) -> None:
    """Print one function's outcome. `out`: the console."""
    styles = {PASSED: "green", FAILED: "red"}
    out.print(f"{number:>4} of {total}  ", end="")
    out.print(f"{outcome.state:<9}", style=styles.get(outcome.state, "yellow"), end=" ")
    out.print(f"{outcome.name}  {outcome.detail}", soft_wrap=True)


@command(
    "validate",
    device=row("Index of the GPU.", int, 0),
    only=row("Functions by name, as 'grouped_mm_*'; repeatable; default: all, which leaves a stamp.", list[str] | None),
    limit=count("Seconds that a function may take before its process is killed.", int(LIMIT_S)),
    jobs=count("Processes at a time.", max(1, min(4, (os.cpu_count() or 1) // 4))),
    out=row("File for the report, in Markdown.", Path | None),
)
def validate(device: int, only: list[str] | None, limit: int, jobs: int, out: Path | None) -> None:
    """Compare every function of the bundle with torch in float64 on this GPU, each in a process of its own.

    If none fails, a stamp says so to later processes: kernels that were never run before then serve calls without
    GLULAM_ALLOW_UNVALIDATED=1.
    """
    index = gpus.cuda_index("validate", device)
    arch = _arch_of(index)
    manifest = verify(bundle_root() / arch, arch)
    described = [from_dict(function.spec) for function in manifest.functions.values()]
    specs = profiles.matching(described, only or (), f"the {arch} bundle")
    if not only:
        stamps.check_place(arch)  # now, rather than after all functions ran
    machine, found, shown = _machine(arch, index, manifest), [], console()
    shown.print(f"{machine.gpu}, {arch}: {len(specs)} functions; results are torch's in float64 on the CPU")
    for number, outcome in enumerate(outcomes(manifest, index, specs, float(limit), jobs), 1):
        found.append(outcome)
        _shown(outcome, number, len(specs), shown)
    text, passed = report(machine, found), passes(found)
    shown.print(f"\n{text}", soft_wrap=True)
    if out:
        out.write_text(text)
    if passed and not only:
        stamps.leave(arch, machine.gpu, manifest.sha256)
    elif not passed:
        say_error("please report the text above; this GPU stays as it was")
    raise typer.Exit(int(not passed))
