"""What `glulam doctor` looks at. Each check is one finding in plain words and, where it is bad, one remedy."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import platform
from collections import Counter
from collections.abc import Iterator
from typing import Any

from cute_kernels.arch import by_capability
from ffi_bridge import BundleError, ToolchainError, build, cache, jit, loader, profiles, toolchain

from .choose import known, records

_OLDEST_TORCH = (2, 11)  # the first that exchanges DLPack natively with TVM-FFI
_OLDEST_DRIVER = (13, 0)  # the DSL's run-time library is CUDA 13's
_INSTALL_TORCH = "pip install 'torch>=2.11'"


@dataclasses.dataclass(frozen=True)
class Check:
    """One finding. `state` is "ok", "note" (something that this machine can do without) or "bad"."""

    name: str
    state: str
    finding: str
    remedy: str = ""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """All findings, whether Glulam is usable here, and a verdict in one sentence."""

    checks: tuple[Check, ...]
    usable: bool
    verdict: str


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The current CUDA device: its name, compute capability and the kernels' architecture, None if it has none."""

    name: str
    capability: tuple[int, int]
    arch: str | None


def _torch() -> Any | None:
    try:
        import torch
    except ImportError:
        return None
    return torch


def _check_torch(torch: Any | None) -> Check:
    if torch is None:
        return Check("torch", "bad", "not installed", _INSTALL_TORCH)
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    found = f"{torch.__version__} ({cuda})"
    if version < _OLDEST_TORCH:
        return Check("torch", "bad", f"{found} is too old: 2.11 or later is needed", _INSTALL_TORCH)
    return Check("torch", "ok", found)


def _find_gpu(torch: Any | None) -> Gpu | None:
    if torch is None or not torch.cuda.is_available():
        return None
    capability = torch.cuda.get_device_capability()
    return Gpu(torch.cuda.get_device_name(), capability, by_capability().get(capability))


def _check_gpu(gpu: Gpu | None) -> Check:
    if gpu is None:
        return Check("GPU", "note", "none that torch can use: tensors on the CPU are served by the CPU reference")
    named = f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}"
    if gpu.arch is None:
        served = ", ".join(f"{major}.{minor}" for major, minor in by_capability())
        return Check("GPU", "bad", f"{named}: no kernels for it", f"use a GPU of compute capability {served}")
    return Check("GPU", "ok", f"{named}: served by the {gpu.arch} kernels")


def _driver_version() -> tuple[int, int] | None:
    """The newest CUDA that the installed driver runs, or None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def _check_driver(driver: tuple[int, int] | None, gpu: Gpu | None) -> Check:
    state = "bad" if gpu else "note"
    if driver is None:
        return Check("driver", state, "no NVIDIA driver", "install driver 580 or later to use a GPU")
    found = f"CUDA {driver[0]}.{driver[1]}"
    if driver < _OLDEST_DRIVER:
        return Check("driver", state, f"{found} is too old: the kernels need CUDA 13.0", "install driver 580 or later")
    return Check("driver", "ok", f"runs {found}")


def _check_tvm_ffi() -> Check:
    try:
        toolchain.tvm_ffi_library()
    except ToolchainError as error:
        return _from_error("TVM-FFI", error)
    return Check("TVM-FFI", "ok", str(toolchain.versions()[toolchain.TVM_FFI] or "of an unknown version"))


def _check_runtime() -> Check:
    try:
        library = toolchain.runtime_library()
        ctypes.CDLL(str(library))
    except (ToolchainError, OSError) as error:
        return _from_error("run time", error)
    return Check("run time", "ok", f"nvidia-cutlass-dsl {toolchain.versions()[toolchain.DSL] or ''}: {library}")


def _check_bundle(arch: str, needed: bool) -> Check:
    name = "bundle"
    try:
        bundle = loader.load(arch)
    except (BundleError, ToolchainError) as error:
        return _from_error(name, error, "bad" if needed else "note")
    except Exception as error:  # a library that is sound but does not load here: say why, whatever the reason
        return Check(name, "bad" if needed else "note", f"{arch} does not load: {error}", "glulam build")
    return Check(name, "ok", f"{len(bundle.names())} {arch} functions in {bundle.folder}")


def _check_compiler() -> Check:
    try:
        build.check_prerequisites()
    except ToolchainError as error:
        return _from_error("compiling", error, "note")
    compiler = " ".join(toolchain.c_compiler())
    return Check("compiling", "ok", f"works here, with or without a GPU; links with {compiler}")


def _check_cache() -> Check:
    name, root = "JIT cache", jit.cache_root()
    shown = records.shown(root)
    parent = next(folder for folder in (root, *root.parents) if os.path.lexists(folder))
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        remedy = f"export {jit.ENV_CACHE}=<a folder that can be written>"
        return Check(name, "note", f"{shown} cannot be written: compiled kernels last one process", remedy)
    try:
        states = Counter(entry.state for entry in cache.entries())
    except (OSError, ValueError, RecursionError) as error:
        return Check(name, "note", f"{shown} cannot be examined ({error})", f"remove {shown}")
    counts = ", ".join(f"{states[state]} {state}" for state in states if state != "sound")
    found = f"{states['sound']} kernels in {shown}" + (f" ({counts})" if counts else "")
    if states["damaged"]:
        return Check(name, "note", found, "run `glulam cache clear --outdated`")
    return Check(name, "ok", found)


def _check_preferences() -> Check:
    stored = known.read_preferences()
    summary = f"{len(stored.layers)} kernels of `glulam compile` serve their forms"
    return _with_ignored("preferences", summary, stored.ignored)


def _check_tables(gpu: Gpu | None) -> Check:
    """Tables of tuned kernels, and whether they hold for this GPU."""
    if not known.tables():
        return Check("tuning", "ok", "no tables: kernels are the shipped choice")
    found = known.read_tables(gpu.name if gpu else "")
    summary = f"{len(found.layers)} layers in {len(known.tables())} tables hold for this GPU"
    return _with_ignored("tuning", summary, found.ignored)


def _with_ignored(name: str, summary: str, ignored: tuple[str, ...]) -> Check:
    """Each line says what mends it."""
    return Check(name, "note" if ignored else "ok", "; ".join((summary, *ignored)))


def _from_error(name: str, error: Exception, state: str = "bad") -> Check:
    """The bridge's messages end in '; <remedy>': the two halves are shown apart."""
    finding, _, remedy = str(error).rpartition("; ")
    return Check(name, state, finding, remedy) if finding else Check(name, state, str(error))


def _checks() -> Iterator[Check]:
    torch = _torch()
    gpu = None
    with contextlib.suppress(RuntimeError):  # a driver that torch cannot initialise is found by its own check
        gpu = _find_gpu(torch)
    yield Check("Glulam", "ok", f"{toolchain.versions()['glulam']} on Python {platform.python_version()}")
    yield _check_torch(torch)
    yield _check_gpu(gpu)
    yield _check_driver(_driver_version(), gpu)
    yield _check_tvm_ffi()
    yield _check_runtime()
    for arch in [gpu.arch] if gpu and gpu.arch else profiles.CONFIGS:
        yield _check_bundle(arch, needed=gpu is not None)
    yield _check_compiler()
    yield _check_cache()
    yield _check_preferences()
    yield _check_tables(gpu)


def _verdict(checks: tuple[Check, ...]) -> str:
    state = {check.name: check.state for check in checks}
    if bad := [check.name for check in checks if check.state == "bad"]:
        return f"Glulam is not usable here yet: see {', '.join(bad)} above."
    if state["GPU"] == "ok":
        return "Glulam is usable: the precompiled kernels run on this GPU."
    works = "works" if state["compiling"] == "ok" else "does not work"
    return f"Glulam is usable on the CPU only: calls run the CPU reference; compiling kernels {works}."


def examine() -> Diagnosis:
    """Looks at everything that Glulam needs. Loads the bundle, launches nothing, changes nothing."""
    checks = tuple(_checks())
    return Diagnosis(checks, all(check.state != "bad" for check in checks), _verdict(checks))
