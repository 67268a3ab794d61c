"""`glulam doctor`: check everything that Glulam needs.

Each check is one finding in plain words and, if it is bad, one remedy.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import typer

from cute_kernels.arch import serving
from cute_kernels.architectures import ARCHS
from ffi_bridge import BundleError, ToolchainError, build, cache, jit, loader, profiles, toolchain
from ffi_bridge.errors import remedy

from ..choose import known, records
from ..host.device import ENV_ARCH, NEVER_RUN, TESTED, arch_of, passed_over, state_of, supported, why_passed_over
from .app import command, console, flag, say, show
from .terminal import in_one_line

_OLDEST_TORCH = (2, 11)  # the first that exchanges DLPack natively with TVM-FFI
_OLDEST_DRIVER = (13, 0)  # the DSL's run-time library is CUDA 13's
_INSTALL_TORCH = "pip install 'torch>=2.11'"
_INSTALL_DRIVER = "install driver 580 or later"
_PCI = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # a vendor, and what classes of display controllers begin with


class Check(NamedTuple):
    """One finding of `glulam doctor`.

    Attributes:
        name: what was checked.
        state: "ok", "note" (this machine can do without it) or "bad".
        finding: the result in words.
        remedy: a command or advice. Empty: none is needed.
    """

    name: str
    state: str
    finding: str
    remedy: str = ""


class Gpu(NamedTuple):
    """The current CUDA device.

    Attributes:
        name: the GPU's name.
        capability: the compute capability.
        arch: the architecture whose kernels serve the GPU. None: there is none.
    """

    name: str
    capability: tuple[int, int]
    arch: str | None

    @property
    def best(self) -> str | None:
        """The best architecture for the GPU, with or without a bundle; None: no architecture runs on it."""
        return next(iter(serving(self.capability)), None)

    @property
    def passed_over(self) -> str:
        """The best architecture for the GPU, if `arch` serves instead because the best was never run here; else ""."""
        return passed_over(self.capability, self.arch, self.name) if self.arch else ""


Finding = tuple[str, ...]
"""A `Check` without its name: state, finding and, if there is one, remedy."""


def installed_torch() -> Any | None:
    """Return the module torch; None if it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    return torch


def find_gpu(torch: Any | None) -> Gpu | None:
    """Return the current CUDA device; None if torch sees none. `torch`: see `installed_torch`."""
    if torch is None or not torch.cuda.is_available():
        return None
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    return Gpu(name, capability, arch_of(capability, name))


def driver_version() -> tuple[int, int] | None:
    """Return the newest CUDA version that the installed driver runs; None if there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def has_nvidia_card() -> bool:
    """Return True if the PCI bus shows an NVIDIA GPU; this works without a driver."""
    for card in _PCI.glob("*"):
        with contextlib.suppress(OSError):
            vendor, kind = (card / "vendor").read_text().strip(), (card / "class").read_text()
            if vendor == _NVIDIA and kind.startswith(_DISPLAY):
                return True
    return False


def _check_torch(torch: Any | None) -> Finding:
    if torch is None:
        return "bad", "not installed", _INSTALL_TORCH
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    found = f"{torch.__version__} ({f'CUDA {torch.version.cuda}' if torch.version.cuda else 'built without CUDA'})"
    if version < _OLDEST_TORCH:
        return "bad", f"{found} is too old: 2.11 or later is needed", _INSTALL_TORCH
    return "ok", found


def _check_gpu(gpu: Gpu | None) -> Finding:
    if gpu is None:
        chosen = os.environ.get(ENV_ARCH)
        if chosen and chosen not in ARCHS:
            return "note", f"none that torch can use; ${ENV_ARCH} is {chosen!r}, but must be one of {', '.join(ARCHS)}"
        return "note", "none that torch can use: tensors on the CPU are served by the CPU reference"
    named = f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}"
    if gpu.arch is None:
        return "bad", f"{named}: no kernels for it", f"use a GPU of compute capability {supported()}"
    state = state_of(gpu.arch, gpu.name)
    where = f" on {ARCHS[gpu.arch].tested_on}" if state == TESTED else ""
    finding = f"{named}: served by the {gpu.arch} kernels, {state}{where}"
    if gpu.arch != gpu.best and not gpu.passed_over and not os.environ.get(ENV_ARCH):
        finding += f"; those of {gpu.best} would fit it better, and there is no bundle of them"
        return "note", finding, f"glulam build --arch {gpu.best}"
    if state == NEVER_RUN:
        return "note", finding, "run `glulam validate`, which compares all of them with torch in float64"
    return "ok", finding


def _check_untried(gpu: Gpu) -> Finding:
    """Report better kernels for this GPU that do not serve it because they were never run on it."""
    return "note", *why_passed_over(gpu.passed_over, str(gpu.arch))


def _check_driver(driver: tuple[int, int] | None, gpu: Gpu | None) -> Finding:
    """Check the driver's version.

    A missing or too old driver is "bad" if torch sees a GPU, else a "note". The finding advises to install a driver
    only if torch or the PCI bus shows an NVIDIA GPU.
    """
    state = "bad" if gpu else "note"
    if driver and driver >= _OLDEST_DRIVER:
        return "ok", f"runs CUDA {driver[0]}.{driver[1]}"
    finding = "no NVIDIA driver"
    if driver:
        finding = f"CUDA {driver[0]}.{driver[1]} is too old: the kernels need CUDA 13.0"
    if gpu or has_nvidia_card():
        return state, finding, _INSTALL_DRIVER
    return state, f"{finding}; no NVIDIA card is seen"


def _check_tvm_ffi() -> Finding:
    toolchain.tvm_ffi_library()
    return "ok", str(toolchain.versions()[toolchain.TVM_FFI] or "of an unknown version")


def _check_runtime() -> Finding:
    library = toolchain.runtime_library()
    ctypes.CDLL(str(library))
    return "ok", f"nvidia-cutlass-dsl {toolchain.versions()[toolchain.DSL] or ''}: {library}"


def _check_bundle(arch: str) -> Finding:
    try:
        bundle = loader.load(arch)
    except (BundleError, ToolchainError):
        raise
    except Exception as error:  # a library that is sound but does not load here: say why, whatever the reason
        raise BundleError(f"{arch} does not load: {error}; {remedy(loader.bundle_root() / arch)}") from error
    return "ok", f"{len(bundle.names())} {arch} functions in {bundle.folder}"


def _check_compiler() -> Finding:
    build.check_prerequisites()
    return "ok", f"works here, with or without a GPU; links with {' '.join(toolchain.c_compiler())}"


def _check_cache() -> Finding:
    root = jit.cache_root()
    shown = records.shown(root)
    parent = next(folder for folder in (root, *root.parents) if os.path.lexists(folder))
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        remedy = f"export {jit.ENV_CACHE}=<a folder that can be written>"
        return "note", f"{shown} cannot be written: compiled kernels last one process", remedy
    try:
        states = Counter(entry.state for entry in cache.entries())
    except (OSError, ValueError, RecursionError) as error:
        return "note", f"{shown} cannot be examined ({error})", f"remove {shown}"
    counts = ", ".join(f"{states[state]} {state}" for state in states if state != "sound")
    found = f"{states['sound']} kernels in {shown}" + (f" ({counts})" if counts else "")
    return ("note", found, "run `glulam cache clear --outdated`") if states["damaged"] else ("ok", found)


def _check_preferences() -> Finding:
    stored = known.read_preferences()
    count = len(stored.layers)
    summary = f"{count} kernels of `glulam compile` serve instead of what ships" if count else "none"
    return _with_ignored(summary, stored.ignored)


def _check_tables(gpu: Gpu | None) -> Finding:
    """Check that the tables of tuned kernels can be read, and count the layers (shapes) tuned for this GPU in them."""
    if absent := known.absent():
        return "note", absent, f"correct ${known.ENV_TUNED}, or unset it"
    if not known.tables():
        return "ok", "no tables: kernels are the shipped choice"
    found = known.read_tables(gpu.name if gpu else "")
    summary = f"{len(found.layers)} layers in {len(known.tables())} tables hold for this GPU"
    return _with_ignored(summary, found.ignored)


def _with_ignored(summary: str, ignored: tuple[str, ...]) -> Finding:
    """Return a finding with the files or lines that were ignored; each of these texts says what mends it."""
    return "note" if ignored else "ok", "; ".join((summary, *ignored))


def examine() -> Iterator[Check]:
    """Yield a finding for everything that Glulam needs. This loads the bundle, but launches and changes nothing."""
    torch, gpu = installed_torch(), None
    with contextlib.suppress(RuntimeError):  # a driver that torch cannot initialise is found by its own check
        gpu = find_gpu(torch)
    needed = "bad" if gpu else "note"  # the state of a failed check that concerns only GPUs
    archs = [gpu.arch] if gpu and gpu.arch else [profiles.DEFAULT]
    checks: list[tuple[str, str, Any, tuple[Any, ...]]] = [  # name, state if the check raises, check, its arguments
        ("torch", "bad", _check_torch, (torch,)),
        ("GPU", "bad", _check_gpu, (gpu,)),
        *[("untried", "note", _check_untried, (gpu,))] * bool(gpu and gpu.passed_over),
        ("driver", needed, _check_driver, (driver_version(), gpu)),
        ("TVM-FFI", "bad", _check_tvm_ffi, ()),
        ("run time", "bad", _check_runtime, ()),
        *(("bundle", needed, _check_bundle, (arch,)) for arch in archs),
        ("compiling", "note", _check_compiler, ()),
        ("JIT cache", "note", _check_cache, ()),
        ("preferences", "note", _check_preferences, ()),
        ("tuning", "note", _check_tables, (gpu,)),
    ]
    yield Check("Glulam", "ok", f"{toolchain.versions()['glulam']} on Python {platform.python_version()}")
    for name, worst, check, given in checks:
        try:
            yield Check(name, *check(*given))
        except (BundleError, ToolchainError, OSError) as error:  # messages that end in '; <remedy>'
            finding, _, remedy = str(error).rpartition("; ")
            yield Check(name, worst, finding, remedy) if finding else Check(name, worst, remedy)


def verdict(checks: Sequence[Check]) -> str:
    """Return all findings summarised in one sentence."""
    state = {check.name: check.state for check in checks}
    if bad := [check.name for check in checks if check.state == "bad"]:
        return f"Glulam is not usable here yet: see {', '.join(bad)} above."
    if state["GPU"] == "ok":
        return "Glulam is usable: the precompiled kernels run on this GPU."
    if any(check.name == "GPU" and check.remedy for check in checks):
        return "Glulam has kernels for this GPU: see above what is to be done first."
    works = "works" if state["compiling"] == "ok" else "does not work"
    return f"Glulam is usable on the CPU only: calls run the CPU reference; compiling kernels {works}."


MARKS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "bad": ("BAD", "red")}


def as_json(checks: Sequence[Check]) -> str:
    """Return all findings as a JSON object, in ASCII."""
    usable = not any(check.state == "bad" for check in checks)
    found = {"usable": usable, "verdict": verdict(checks), "checks": [check._asdict() for check in checks]}
    return json.dumps(found, indent=2)


@command("doctor", json=flag("Print a JSON object: usable, verdict, checks."))
def doctor(json: bool) -> None:
    """Say in plain words what this machine can do, what is missing, and what mends it; exit status 1 if not usable."""
    checks = []
    for check in examine():
        checks.append(check)
        if not json:
            _show(check)
    if json:
        say(as_json(checks))
    else:
        show("", verdict(checks))
    raise typer.Exit(int(any(check.state == "bad" for check in checks)))


def _show(check: Check) -> None:
    """Print a finding, and its remedy on a line of its own."""
    out, (mark, style) = console(), MARKS[check.state]
    out.print(f"{mark:<4}", style=style, end=" ")
    out.print(f"{check.name:<12} {in_one_line(check.finding)}", soft_wrap=True)
    if check.remedy:
        out.print(f"{'':<17} -> {in_one_line(check.remedy)}", soft_wrap=True)
