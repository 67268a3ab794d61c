"""The store of objects (compiled, not linked): builds and the JIT compile each object once and share it.

An object lies in <cache root>/objects in the same way as a kernel lies in the cache (`cache.py`): in a folder named by
its key, beside a manifest that describes it. It is checked as strictly as a kernel before it is linked. It is stored as
soon as it is compiled, so that an interrupted build continues where it stopped. If the store cannot be used, a warning
says so and builds go on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cute_kernels.plain import plain_in
from cute_kernels.specs import Spec, to_dict

from . import cache, folders, host, kept_ptx, sources, toolchain, verification
from . import manifest as manifests
from .compiler import KernelArtifact
from .errors import BundleError, CompileError
from .manifest import Function, Manifest
from .scratch import install, private_scratch, sweep
from .worker import Worker

UNUSED_S = 30 * 86400.0
"""Seconds after which the next build removes an object that no build and no JIT has used."""
MAX_BYTES = 2 << 30
"""Bytes of objects, some 20 bundles, above which the next build also removes the least recently used objects."""


def folder() -> Path:
    """Return the folder in which objects are stored, <cache root>/objects."""
    return cache.cache_root() / cache.OBJECTS


def entries() -> Iterator[cache.Entry]:
    """Yield a verified entry for each stored object, in the order of their names; see `cache.entries`."""
    return cache.entries(folder(), manifests.OBJECT)


def clear(states: tuple[str, ...] = cache.STATES) -> list[cache.Entry]:
    """Remove the stored objects in one of `states` (`cache.Entry.state`) and return the removed entries."""
    return cache.clear(folder(), states, manifests.OBJECT)


class Busy(Exception):
    """Raised by `Store.alone` if another process or thread is compiling the same object."""


class _Stored(NamedTuple):
    """An object in the store, described without reading its manifest.

    Attributes:
        folder: the object's folder.
        name: name of its spec.
        used: time of its last use, in seconds.
        size: bytes of the object file.
    """

    folder: Path
    name: str
    used: float
    size: int


class Store:
    """The store of objects, for specs that one tracer traces.

    The objects' keys contain hashes of the sources as they were when this Store was constructed.

    Args:
        tracer: "module:function" for every spec. None: the kernels' own tracer for each spec.
        quiet: True: do not warn if the store cannot be used.
        keep_ptx: True: with each object, keep the texts of `kept_ptx` as <spec.name>.ptx and .mlir beside the object.
            Such objects have separate keys.
        machine: the CPUs for which host code is made. None: this machine's.
    """

    def __init__(
        self, tracer: str | None = None, quiet: bool = False, keep_ptx: bool = False, machine: host.Host | None = None
    ) -> None:
        self.machine = machine or host.here()
        self.tracer = tracer
        self.keep_ptx = keep_ptx
        self.folder = folder()
        self._sources = sources.of(sources.package_of(tracer))
        self._quiet = quiet

    def take(self, spec: Spec, into: Path) -> KernelArtifact | None:
        """Copy a spec's object from the store to `into`/<spec.name>.o and return the artifact. Needs no lock.

        None: the store has no valid object of the spec.
        """
        hashes = self.code_hashes(spec)
        entry = self.folder / self._key(spec, hashes)
        inner = entry / spec.arch
        try:
            found = verification.check(inner, spec.arch, hashes, spec, manifests.OBJECT, self.machine)
            with verification.opened_library(inner, found) as handle:
                content = os.pread(handle, found.size, 0)  # the hashed file, even if it was replaced
            texts = {suffix: verification.read_text(inner, found, suffix) for suffix in self._suffixes}
        except BundleError:
            return None
        file = into / f"{spec.name}.o"
        file.write_bytes(content)
        for suffix, text in texts.items():
            file.with_suffix(suffix).write_bytes(text)
        with contextlib.suppress(OSError):
            os.utime(entry, follow_symlinks=False)
        return KernelArtifact(spec.name, file, found.functions[spec.name].kernels)

    @contextlib.contextmanager
    def alone(self, spec: Spec, timeout: float = -1) -> Iterator[None]:
        """Hold a lock that keeps others from compiling a spec's object. `timeout`: seconds to wait; negative: no limit.

        If the store cannot be used, a warning says so and nothing is locked.

        Raises:
            Busy: another process or thread held the lock for `timeout` seconds.
        """
        import filelock

        with contextlib.ExitStack() as stack:
            try:
                self._make_folder()
                stack.enter_context(cache.exclusive(self.folder, self._key(spec), timeout))
            except filelock.Timeout:
                raise Busy from None
            except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
                self._tell(error)
            yield

    def obtain(self, spec: Spec, into: Path, worker: Callable[[], Worker]) -> KernelArtifact:
        """Return the object of a spec as `into`/<spec.name>.o: copied from the store, or else compiled now and stored.

        Args:
            spec: the spec.
            into: an existing folder.
            worker: returns a compile process of this tracer and `keep_ptx`; called only if the object must be compiled.

        Raises:
            CompileError: the spec does not compile, or its sources were edited meanwhile.
        """
        if found := self.take(spec, into):
            return found
        process = worker()
        artifact = process.compile(spec, into)
        self._check_unchanged(spec, process)
        try:
            self._keep(spec, artifact)
        except (OSError, BundleError) as error:
            self._tell(error)
        return artifact

    def longest_first(self, specs: Sequence[Spec]) -> list[Spec]:
        """Sort specs by the compile time to expect, longest first.

        The size of the object that a spec of the same name last had in the store stands for its compile time. Specs
        without such an object come first.
        """
        sizes: dict[str, int] = {}
        for stored in sorted(self._stored(), key=lambda stored: stored.used):
            sizes[stored.name] = stored.size
        return sorted(specs, key=lambda spec: sizes.get(spec.name, MAX_BYTES), reverse=True)

    def trim(self) -> None:
        """Remove objects not used for UNUSED_S, the least recently used ones above MAX_BYTES in all, and the folders of
        killed compiles.

        Other users' objects stay.
        """
        sweep(self.folder, cache.COMPILING)
        total, oldest = 0, time.time() - UNUSED_S
        for stored in sorted(self._stored(), key=lambda stored: stored.used, reverse=True):
            total += stored.size
            if total > MAX_BYTES or stored.used < oldest:
                with contextlib.suppress(OSError, NotImplementedError):
                    self._remove_unused(stored)

    def code_hashes(self, spec: Spec) -> dict[str, str]:
        """Return, by name, the hashes of the code that a spec's object depends on; its manifest records them."""
        return cache.sources_of(spec, self.tracer, self._sources, of_object=True)

    def _key(self, spec: Spec, hashes: dict[str, str] | None = None) -> str:
        """Return the key of a spec's object. `hashes`: the result of `Store.code_hashes`, if the caller has it."""
        hashes = hashes or self.code_hashes(spec)
        return cache.cache_key(spec, hashes=hashes, has_ptx=self.keep_ptx, machine=self.machine)

    def _make_folder(self) -> None:
        """Make the store's folder with the mode of the cache's folder, and put Glulam's marker file into it."""
        root = self.folder.parent
        cache.make_root(root)
        with contextlib.suppress(FileExistsError), folders.opened(root) as at:
            mode = stat.S_IMODE(os.fstat(at).st_mode)  # shared if the cache is: each entry is checked
            with folders.made(self.folder.name, at, mode):
                pass
        cache.make_root(self.folder)

    def _check_unchanged(self, spec: Spec, process: Worker) -> None:
        """Raise CompileError if a source changed since the store's keys were made or since the compile process began.

        The process imports each module once, so an edit after its start may or may not be in the object.
        """
        tracer = sources.tracer_of(spec, self.tracer)
        module = tracer.partition(":")[0]
        others = process.sources, sources.of(sources.package_of(tracer))
        if any(other.closure(module) != self._sources.closure(module) for other in others):
            raise CompileError(f"{spec.name}: its sources were edited while it was compiled; run this again")

    def _keep(self, spec: Spec, artifact: KernelArtifact) -> None:
        """Put a compiled object into the store."""
        hashes = self.code_hashes(spec)
        entry = self.folder / self._key(spec, hashes)
        with private_scratch(self.folder, cache.COMPILING) as work:
            inner = cache.make_entry(work, spec.arch)
            content = artifact.object_file.read_bytes()
            file = inner / manifests.object_name(spec.arch)
            file.write_bytes(content)
            file.chmod(0o644)
            sha256 = hashlib.sha256(content).hexdigest()
            texts = {suffix: self._keep_text(artifact, inner, suffix) for suffix in self._suffixes}
            functions = {spec.name: Function(to_dict(spec), artifact.kernels)}
            Manifest(
                arch=spec.arch,
                library=file.name,
                sha256=sha256,
                size=len(content),
                host=self.machine.baseline,
                needs={package: [] for package in toolchain.RUNS_WITH},  # symbols are known only after linking
                versions=toolchain.versions(),
                sources=hashes,
                functions=functions,
                texts=texts,
                plain=list(plain_in(spec.arch)),
            ).write(inner)
            if os.path.lexists(entry):
                cache.discard(entry)  # `take` found it damaged
            install(inner.parent, entry, cache.COMPILING)

    @property
    def _suffixes(self) -> tuple[str, ...]:
        """The suffixes of the texts that are kept with each object; usually none."""
        return kept_ptx.SUFFIXES if self.keep_ptx else ()

    def _keep_text(self, artifact: KernelArtifact, inner: Path, suffix: str) -> str:
        """Copy a text of an artifact into an entry's folder `inner`; return its sha256, hexadecimal."""
        content = artifact.object_file.with_suffix(suffix).read_bytes()
        file = inner / manifests.text_name(inner.name, suffix)
        file.write_bytes(content)
        file.chmod(0o644)
        return hashlib.sha256(content).hexdigest()

    def _tell(self, error: Exception) -> None:
        """Warn, once, that the store cannot be used."""
        if not self._quiet:
            self._quiet = True  # one disk, one warning
            warnings.warn(
                f"objects are not kept in {self.folder} ({error}): a later build compiles them again; "
                f"set {cache.ENV_CACHE} to a folder that can be written",
                RuntimeWarning,
                stacklevel=4,
            )

    def _stored(self) -> Iterator[_Stored]:
        """Yield all objects in the store."""
        with contextlib.suppress(OSError):
            for entry in self.folder.iterdir():
                if key := cache.key_of(entry):
                    with contextlib.suppress(OSError):
                        size = (entry / key["arch"] / manifests.object_name(key["arch"])).lstat().st_size
                        yield _Stored(entry, key["name"], entry.lstat().st_mtime, size)

    def _remove_unused(self, stored: _Stored) -> None:
        """Remove an object unless it was used since `stored` was made."""
        with cache.exclusive(self.folder, stored.folder.name, timeout=0):
            if stored.folder.lstat().st_mtime == stored.used:
                cache.discard(stored.folder)
