"""Kernels that the bundle lacks: compiled in a helper process, kept on disk, shared by processes.

What the cache holds and how an entry is found is in `cache.py`; this is how an entry is made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cute_kernels.specs import Spec

from . import build, cache, loader
from .cache import COMPILING, DAMAGED, ENV_CACHE, LOCK, cache_key, cache_root, tracer_sources
from .compiler import DEFAULT_TRACER, KernelArtifact
from .errors import BundleError, BundleMissing, CompileError
from .scratch import sweep
from .worker import Worker

__all__ = ["ENV_CACHE", "cache_key", "cache_root", "get"]

_functions: dict[tuple[Spec, str], Callable[..., Any]] = {}


def get(
    spec: Spec, *, tracer: str = DEFAULT_TRACER, worker: Worker | None = None, strict: bool = False
) -> Callable[..., Any]:
    """The compiled function of `spec`, from memory, from the disk cache, or compiled now in a helper process.

    Compiling takes seconds and needs a C compiler; other processes that want the same kernel wait for it. A
    damaged entry is put aside and rebuilt. Where the cache cannot be written, a RuntimeWarning says so and
    the kernel serves this process only.

    Args:
        spec: any spec; whether the bundle has it is not asked.
        tracer: "module:function", spec -> (jitted function, fake arguments).
        worker: the compile process to use, of this tracer; by default one is started for this spec.
        strict: refuse code that spills registers or whose wgmma the compiler serialised, instead of warning.

    Raises:
        CompileError: the kernel does not compile, or is refused.
        ToolchainError: the DSL, TVM-FFI or a C compiler is missing.
    """
    wanted = (spec, tracer)
    if wanted not in _functions:  # threads that race here are told apart by the entry's file lock
        _functions[wanted] = cache.find(spec, tracer) or _compile(spec, tracer, Maker(tracer, worker, strict))
    return _functions[wanted]


@dataclasses.dataclass(frozen=True)
class Maker:
    """How a kernel is made; the fields are `get`'s arguments."""

    tracer: str
    worker: Worker | None
    strict: bool

    def compile_into(self, scratch: Path, spec: Spec) -> None:
        """Leaves `scratch`/<arch>/ a bundle of this one spec."""
        build.check_prerequisites()
        sources = tracer_sources(self.tracer)
        objects, folder = scratch / "objects", scratch / spec.arch
        objects.mkdir()
        folder.mkdir()
        try:
            with contextlib.nullcontext(self.worker) if self.worker else Worker(objects, self.tracer) as worker:
                artifact = worker.compile(spec, objects)
            self._judge(artifact)
            build.write_bundle(folder, spec.arch, [spec], [artifact], sources)
        except CompileError:
            _raise_if_full(scratch)
            raise
        shutil.rmtree(objects)

    def _judge(self, artifact: KernelArtifact) -> None:
        if lines := "; ".join(build.complaints([artifact], {})):
            if self.strict:
                raise CompileError(f"{lines}: refused")
            warnings.warn(f"slower than it need be: {lines}", RuntimeWarning, stacklevel=6)


def _compile(spec: Spec, tracer: str, maker: Maker) -> Callable[..., Any]:
    root, key = cache_root(), cache_key(spec, tracer)
    try:
        with _exclusive(root, key):
            return _fill(spec, key, root, maker)
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        warnings.warn(
            f"the kernel cache {root} cannot be used ({error}): {spec.name} is compiled for this process alone; "
            f"set {ENV_CACHE} to a folder that can be written",
            RuntimeWarning,
            stacklevel=3,
        )
    with tempfile.TemporaryDirectory(prefix="glulam-", ignore_cleanup_errors=True) as scratch:
        return _fill(spec, key, Path(scratch), maker)


@contextlib.contextmanager
def _exclusive(root: Path, key: str) -> Iterator[None]:
    """One process at a time for one key; a process that dies lets go."""
    import filelock

    root.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(root / f"{key}{LOCK}")
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _fill(spec: Spec, key: str, root: Path, maker: Maker) -> Callable[..., Any]:
    """Makes entry `root`/`key` unless it is there and sound, and loads it. The caller holds the key's lock."""
    entry = root / key
    try:
        return loader.load(spec.arch, entry).function(spec.name)
    except BundleMissing:
        shutil.rmtree(entry, ignore_errors=True)  # half an entry is none
    except BundleError as error:
        _quarantine(entry, error)
    sweep(root, COMPILING)
    scratch = Path(tempfile.mkdtemp(dir=root, prefix=COMPILING))
    try:
        maker.compile_into(scratch, spec)
        scratch.chmod(0o755)
        scratch.rename(entry)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return loader.load(spec.arch, entry).function(spec.name)


def _quarantine(entry: Path, error: BundleError) -> None:
    """Puts a damaged entry aside, where a person can look at it; one per key is kept."""
    aside = entry.with_name(f"{entry.name}{DAMAGED}")
    warnings.warn(f"kernel cache: {error}; rebuilding it, the damaged entry is {aside}", RuntimeWarning, stacklevel=5)
    shutil.rmtree(aside, ignore_errors=True)
    entry.rename(aside)


def _raise_if_full(folder: Path) -> None:
    """Compiler and linker report a full disk in their own words; as an OSError it sends the compile elsewhere."""
    probe = folder / "probe"
    probe.write_bytes(b"\0" * (1 << 20))
    probe.unlink()
