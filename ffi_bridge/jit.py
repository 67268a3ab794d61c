"""Compile kernels that the bundle lacks, in a helper process, and keep them on disk, where all processes share them.

This module makes entries of the cache; `cache.py` finds and loads them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cute_kernels.chains import stages_of
from cute_kernels.plain import plain_in
from cute_kernels.specs import Spec

from . import build, cache
from .cache import COMPILING, DAMAGED, ENV_CACHE, cache_key, cache_root
from .compiler import KernelArtifact
from .errors import BundleError, BundleForeign, BundleMissing, CompileError
from .objects import Store
from .scratch import full_disk_told, install, private_scratch, sweep
from .worker import Worker

__all__ = ["ENV_CACHE", "cache_key", "cache_root", "get"]

_functions: dict[tuple[Spec, str | None, tuple[str, ...]], Callable[..., Any]] = {}


def get(
    spec: Spec, *, tracer: str | None = None, worker: Worker | None = None, strict: bool = False
) -> Callable[..., Any]:
    """Return the compiled function of `spec`: from memory, from the disk cache, or compiled now in a helper process.

    Compiling takes seconds and needs a C compiler; other processes that want the same kernel wait. A damaged cache
    entry is put aside and rebuilt. If the cache cannot be written, a RuntimeWarning says so and only this process can
    use the kernel.

    Args:
        spec: any spec; the bundle is not searched.
        tracer: "module:function", a function spec -> (jitted function, fake arguments). None: the kernels' own.
        worker: a compile process for this tracer. None: one is started for this spec.
        strict: True: refuse code that spills registers or whose wgmma the compiler serialised. False: warn.

    Returns:
        The exported function.

    Raises:
        CompileError: the kernel does not compile, or is refused.
        ToolchainError: the DSL, TVM-FFI or a C compiler is missing.
        OSError: the kernel fits neither into the cache nor into the folder for temporary files, for example because
            both disks are full.
    """
    wanted = (spec, tracer, plain_in(spec.arch))
    if wanted not in _functions:  # threads that race here wait at the entry's file lock
        _functions[wanted] = cache.find(spec, tracer) or _compile(spec, tracer, Maker(tracer, worker, strict))
    return _functions[wanted]


@dataclasses.dataclass(frozen=True)
class Maker:
    """Compiles kernels for the cache.

    Attributes:
        tracer: "module:function" that traces the specs. None: the kernels' own tracer for each spec.
        worker: the compile process to use. None: one is started for each spec.
        strict: True: refuse code that spills registers or whose wgmma the compiler serialised. False: warn.
    """

    tracer: str | None
    worker: Worker | None
    strict: bool

    def compile_into(self, work: Path, spec: Spec) -> Path:
        """Compile `spec` and return a folder in `work` that holds <arch>/, a bundle of this spec alone."""
        build.check_prerequisites()
        store = Store(self.tracer, quiet=True)
        folder, objects = cache.make_entry(work, spec.arch), work / "objects"
        objects.mkdir()
        with contextlib.ExitStack() as stack:
            worker = functools.cache(lambda: self.worker or stack.enter_context(Worker(objects, self.tracer)))
            artifacts = []
            for stage in stages_of(spec):
                with store.alone(stage):
                    artifacts.append(store.obtain(stage, objects, worker))
        self._judge(artifacts)
        build.write_bundle(folder, spec.arch, [spec], artifacts, cache.sources_of(spec, self.tracer))
        return folder.parent

    def _judge(self, artifacts: list[KernelArtifact]) -> None:
        """Refuse (if `strict`) or warn about kernels that spill registers or whose wgmma the compiler serialised."""
        if lines := "; ".join(build.complaints(artifacts, {})):
            if self.strict:
                raise CompileError(f"{lines}: refused")
            warnings.warn(f"slower than it need be: {lines}", RuntimeWarning, stacklevel=6)


def _compile(spec: Spec, tracer: str | None, maker: Maker) -> Callable[..., Any]:
    """Make the function of a spec, which the cache does not have, and return it.

    If the cache's folder cannot be used, a RuntimeWarning says so and the kernel lives in a temporary folder.

    Args:
        spec: the spec.
        tracer: "module:function" that traces the spec. None: the kernels' own tracer.
        maker: compiles the kernel.
    """
    root, key = cache_root(), cache_key(spec, tracer)
    try:
        cache.make_root(root)
        with cache.exclusive(root, key):
            return _fill(spec, key, root, maker)
    except (OSError, NotImplementedError) as error:  # NotImplementedError: a file system without locks
        warnings.warn(
            f"the kernel cache {root} cannot be used ({error}): {spec.name} is compiled for this process alone; "
            f"set {ENV_CACHE} to a folder that can be written",
            RuntimeWarning,
            stacklevel=3,
        )
    with tempfile.TemporaryDirectory(prefix="glulam-", ignore_cleanup_errors=True) as folder:
        return _fill(spec, key, Path(folder), maker)


def _fill(spec: Spec, key: str, root: Path, maker: Maker) -> Callable[..., Any]:
    """Load the cache entry `root`/`key`; make it first if it is missing or damaged. The caller holds the key's lock."""
    entry = root / key
    try:
        return cache.load(entry, spec, maker.tracer)
    except BundleMissing:
        with contextlib.suppress(FileNotFoundError):
            cache.discard(entry)  # it may be half written
    except BundleError as error:
        _quarantine(entry, error)
    sweep(root, COMPILING)
    remedy = f"free some, or set {ENV_CACHE} to another disk"
    with full_disk_told(root, remedy), private_scratch(root, COMPILING) as work:
        install(maker.compile_into(work, spec), entry, COMPILING)
    try:
        return cache.load(entry, spec, maker.tracer)
    except BundleForeign as error:  # a file system without owners, or on which others can write everything
        raise PermissionError(str(error)) from error


def _quarantine(entry: Path, error: BundleError) -> None:
    """Rename a damaged entry to <key>.damaged, for inspection, and remove an earlier one of that name.

    Raises:
        PermissionError: the entry belongs to another user; it stays.
    """
    if entry.lstat().st_uid != os.geteuid():
        raise PermissionError(str(error)) from error
    aside = entry.with_name(f"{entry.name}{DAMAGED}")
    warnings.warn(f"kernel cache: {error}; rebuilding it, the damaged entry is {aside}", RuntimeWarning, stacklevel=5)
    with contextlib.suppress(FileNotFoundError):
        cache.discard(aside)
    entry.rename(aside)
