"""Kernels that the bundle lacks: compiled in a helper process, kept on disk, shared by processes.

A cache entry is a bundle of one function, so that the loader's checks serve it as well. Its key covers the
spec, the kernels' sources, the compile options and the toolchain's versions; anything else is the same code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cute_kernels.specs import Spec, to_dict

from . import build, loader, toolchain
from .compiler import DEFAULT_TRACER, OPTIONS
from .errors import BundleError, BundleMissing, CompileError
from .worker import Worker

ENV_CACHE = "GLULAM_CACHE_DIR"
_ABANDONED_S = 3600.0  # a scratch folder untouched for this long belongs to a compile that was killed

_functions: dict[tuple[Spec, str], Callable[..., Any]] = {}


def cache_root() -> Path:
    """$GLULAM_CACHE_DIR, read at each call, else the user's cache folder for glulam."""
    if chosen := os.environ.get(ENV_CACHE):
        return Path(chosen)
    import platformdirs

    return platformdirs.user_cache_path("glulam") / "kernels"


def cache_key(spec: Spec, tracer: str = DEFAULT_TRACER) -> str:
    """The spec's name and 16 hexadecimal digits over everything else that changes the code."""
    parts = [to_dict(spec), tracer, build.tracer_sources(tracer), OPTIONS, toolchain.versions()]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return f"{spec.name}-{digest[:16]}"


def get(spec: Spec, *, tracer: str = DEFAULT_TRACER) -> Callable[..., Any]:
    """The compiled function of `spec`, from memory, from the disk cache, or compiled now in a helper process.

    Compiling takes seconds and needs a C compiler; other processes that want the same kernel wait for it. A
    damaged entry is put aside and rebuilt. Where the cache cannot be written, a RuntimeWarning says so and
    the kernel serves this process only.

    Args:
        spec: any spec; whether the bundle has it is not asked.
        tracer: "module:function", spec -> (jitted function, fake arguments).

    Raises:
        CompileError: the kernel does not compile.
        ToolchainError: the DSL, TVM-FFI or a C compiler is missing.
    """
    wanted = (spec, tracer)
    if wanted not in _functions:  # threads that race here are told apart by the entry's file lock
        key = cache_key(spec, tracer)
        _functions[wanted] = _find(spec, key) or _compile(spec, key, tracer)
    return _functions[wanted]


def _find(spec: Spec, key: str) -> Callable[..., Any] | None:
    """The cached function, or None where there is no usable entry."""
    with contextlib.suppress(BundleError):
        return loader.load(spec.arch, cache_root() / key).function(spec.name)
    return None


def _compile(spec: Spec, key: str, tracer: str) -> Callable[..., Any]:
    root = cache_root()
    try:
        with _exclusive(root, key):
            return _fill(spec, key, tracer, root)
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        warnings.warn(
            f"the kernel cache {root} cannot be used ({error}): {spec.name} is compiled for this process alone; "
            f"set {ENV_CACHE} to a folder that can be written",
            RuntimeWarning,
            stacklevel=3,
        )
    with tempfile.TemporaryDirectory(prefix="glulam-", ignore_cleanup_errors=True) as scratch:
        return _fill(spec, key, tracer, Path(scratch))


@contextlib.contextmanager
def _exclusive(root: Path, key: str) -> Iterator[None]:
    """One process at a time for one key; a process that dies lets go."""
    import filelock

    root.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(root / f"{key}.lock")
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _fill(spec: Spec, key: str, tracer: str, root: Path) -> Callable[..., Any]:
    """Makes entry `root`/`key` unless it is there and sound, and loads it. The caller holds the key's lock."""
    entry = root / key
    try:
        return loader.load(spec.arch, entry).function(spec.name)
    except BundleMissing:
        shutil.rmtree(entry, ignore_errors=True)  # half an entry is none
    except BundleError as error:
        _quarantine(entry, error)
    _sweep(root)
    scratch = Path(tempfile.mkdtemp(dir=root, prefix=".compile-"))
    try:
        _compile_into(scratch, spec, tracer)
        scratch.chmod(0o755)
        scratch.rename(entry)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return loader.load(spec.arch, entry).function(spec.name)


def _quarantine(entry: Path, error: BundleError) -> None:
    """Puts a damaged entry aside, where a person can look at it; one per key is kept."""
    aside = entry.with_name(f"{entry.name}.damaged")
    warnings.warn(f"kernel cache: {error}; rebuilding it, the damaged entry is {aside}", RuntimeWarning, stacklevel=5)
    shutil.rmtree(aside, ignore_errors=True)
    entry.rename(aside)


def _sweep(root: Path) -> None:
    """Removes what killed compiles left. Another key's compile may be running: only old folders go."""
    for folder in root.glob(".compile-*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(folder)


def _compile_into(scratch: Path, spec: Spec, tracer: str) -> None:
    """Leaves `scratch`/<arch>/ a bundle of this one spec."""
    build.check_prerequisites()
    sources = build.tracer_sources(tracer)
    objects, folder = scratch / "objects", scratch / spec.arch
    objects.mkdir()
    folder.mkdir()
    try:
        with Worker(objects, tracer) as worker:
            artifact = worker.compile(spec)
        build.write_bundle(folder, spec.arch, [spec], [artifact], sources)
    except CompileError:
        _raise_if_full(scratch)
        raise
    if lines := build.complaints([artifact], {}):
        warnings.warn("slower than it need be: " + "; ".join(lines), RuntimeWarning, stacklevel=5)
    shutil.rmtree(objects)


def _raise_if_full(folder: Path) -> None:
    """Compiler and linker report a full disk in their own words; as an OSError it sends the compile elsewhere."""
    probe = folder / "probe"
    probe.write_bytes(b"\0" * (1 << 20))
    probe.unlink()
