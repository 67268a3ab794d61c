"""Build a bundle from specs: compile in parallel processes, judge the compiler's reports, link, write the manifest.

A bundle is a folder <out>/<arch>/ with a shared library of compiled functions and a manifest.json that describes it. A
stage is a function that is compiled on its own; a chain is an exported function that calls several stages (`chains`).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import secrets
import shutil
import threading
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from cute_kernels.chains import stages_of
from cute_kernels.plain import plain_in
from cute_kernels.specs import Spec, to_dict

from . import folders, host, target, toolchain, verification
from . import manifest as manifests
from .chains import compile_chains
from .compiler import KernelArtifact
from .errors import BundleBusy, BundleError, CompileError
from .link import link
from .manifest import Function, Manifest
from .objects import Busy, Store
from .profiles import Allowed, all_stages, allowed_diagnostics
from .progress import Progress, shown
from .scratch import MARKER, full_disk_told, install, private_scratch, scratch, sweep
from .sources import package_of
from .worker import Worker

SCRATCH = ".glulam-build-"  # the folder of a build in progress
_PATIENCE_S = 0.2  # seconds of waiting for another process that compiles an object, before looking at the next
_MAX_JOBS = 32  # a compile process needs about 0.5 GB
_MAX_COMPLAINTS = 20  # lines of an error message


def complaints(artifacts: Sequence[KernelArtifact], allowed: Allowed) -> list[str]:
    """Return one line of text for each compiler complaint (register spills, serialised wgmma) that is not in `allowed`.

    Args:
        artifacts: compiled functions with the reports of their kernels.
        allowed: for each spec name, the complaints to let pass.
    """
    return [
        f"{artifact.name}: {kernel.describe(complaint)} in {kernel.name}"
        for artifact in artifacts
        for kernel in artifact.kernels
        for complaint in kernel.complaints
        if complaint not in allowed.get(artifact.name, ())
    ]


def _refuse(lines: list[str]) -> None:
    """Raise CompileError that quotes the first of `lines`, texts of compiler complaints; [] does nothing."""
    if lines:
        rest = [f"... and {len(lines) - _MAX_COMPLAINTS} more"] if len(lines) > _MAX_COMPLAINTS else []
        raise CompileError(
            "\n".join(
                [
                    "kernels that spill registers or whose wgmma the compiler serialised (C75xx); "
                    "give them a smaller tile or allow them by name in ALLOWED_DIAGNOSTICS:",
                    *lines[:_MAX_COMPLAINTS],
                    *rest,
                ]
            )
        )


def default_jobs() -> int:
    """Return the number of compile processes for this machine: one for each usable CPU, at most 32."""
    return min(len(os.sched_getaffinity(0)), _MAX_JOBS)


def compile_all(
    specs: Sequence[Spec], store: Store, directory: Path, jobs: int, progress: Progress
) -> list[KernelArtifact]:
    """Put the object files of all specs into a folder: copied from the store, or compiled if the store lacks them.

    If another process is compiling an object, the object is taken from the store after all other objects are done.

    Args:
        specs: specs of stages, without duplicates.
        store: the objects that builds and the JIT share.
        directory: the folder, which exists; the objects are named <spec.name>.o.
        jobs: the largest number of compile processes.
        progress: receives the names of specs that are started and finished.

    Returns:
        The compiled functions, in any order.

    Raises:
        CompileError: a spec does not compile; specs that are not compiled yet are abandoned.
    """
    artifacts, lacking = [], []
    for spec in specs:
        if artifact := store.take(spec, directory):
            artifacts.append(artifact)
            progress.finished(spec.name)
        else:
            lacking.append(spec)
    queue, failed = deque((spec, 0.0) for spec in store.longest_first(lacking)), threading.Event()

    def drain() -> list[KernelArtifact]:
        made: list[KernelArtifact] = []
        with contextlib.ExitStack() as stack:
            stack.push(lambda error, *_: failed.set() if error else None)
            begin = functools.partial(Worker, directory, store.tracer, machine=store.machine)
            worker = functools.cache(lambda: stack.enter_context(begin()))
            while not failed.is_set():
                try:
                    spec, patience = queue.popleft()
                except IndexError:
                    break
                try:
                    with store.alone(spec, patience):
                        progress.started(spec.name)
                        made.append(store.obtain(spec, directory, worker))
                except Busy:
                    queue.append((spec, _PATIENCE_S))
                else:
                    progress.finished(spec.name)
        return made

    with ThreadPoolExecutor(max(jobs, 1)) as pool:
        futures = [pool.submit(drain) for _ in range(min(jobs, len(lacking)))]
        try:
            for future in as_completed(futures):
                artifacts += future.result()
        finally:
            failed.set()  # an interrupt ends the other threads as well
    return artifacts


def _function(spec: Spec, artifacts: Mapping[str, KernelArtifact]) -> Function:
    """Return the manifest's record of an exported function: its kernels, or for a chain the names of its stages."""
    stages = tuple(stage.name for stage in stages_of(spec))
    if stages == (spec.name,):
        return Function(to_dict(spec), artifacts[spec.name].kernels)
    return Function(to_dict(spec), (), stages)


def write_bundle(
    folder: Path, arch: str, specs: Sequence[Spec], artifacts: Sequence[KernelArtifact], sources: dict[str, str],
    machine: host.Host | None = None,
) -> Manifest:  # fmt: skip
    """Link object files into a library in `folder`, and write the manifest beside the library.

    Args:
        folder: an existing folder.
        arch: the architecture of all specs.
        specs: the functions to export.
        artifacts: the compiled stages of all specs.
        sources: hashes of the kernels' sources by name, recorded as `Manifest.sources`.
        machine: the CPUs for which host code is made. None: this machine's.

    Returns:
        The manifest.
    """
    machine = machine or host.here()
    linked = folder / "linked.so"
    with scratch(folder, SCRATCH) as work:
        objects = [artifact.object_file for artifact in artifacts]
        needs = link([*objects, *compile_chains(specs, work, machine)], linked, machine)
    with linked.open("rb") as file:
        os.fchmod(file.fileno(), 0o644)
        os.fsync(file.fileno())
        sha256, size = manifests.hash_of(file.fileno()), os.fstat(file.fileno()).st_size
    by_name = {artifact.name: artifact for artifact in artifacts}
    manifest = Manifest(
        arch=arch,
        library=manifests.library_name(arch, sha256),
        sha256=sha256,
        size=size,
        host=machine.baseline,
        needs=needs,
        versions=toolchain.versions(),
        sources=sources,
        functions={
            spec.name: _function(spec, by_name) for spec in sorted({*specs, *all_stages(specs)}, key=lambda s: s.name)
        },
        plain=list(plain_in(arch)),
    )
    linked.rename(folder / manifest.library)
    manifest.write(folder)
    return manifest


@contextlib.contextmanager
def only_builder(out: Path) -> Iterator[None]:
    """Hold a lock that keeps other builds out of folder `out`; a process that dies releases it.

    The folder itself is locked, since a lock file would stay in the folder and get into wheels. If the file system
    cannot lock a folder, a RuntimeWarning says so and nothing is locked.

    Raises:
        BundleBusy: another process is building in `out`. This does not wait, since the other build is most likely the
            same.
    """
    handle = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise BundleBusy(
            f"another process is building a bundle in {out}; wait until it ends, or build into another folder"
        ) from None
    except OSError as error:  # some network file systems lock files only
        warnings.warn(
            f"{out} cannot be locked ({error.strerror}): build it once at a time", RuntimeWarning, stacklevel=4
        )
    try:
        yield
    finally:
        os.close(handle)


def check_prerequisites(machine: host.Host | None = None) -> None:
    """Raise ToolchainError, before minutes of compiling, if a tool or library for compiling or linking is missing."""
    toolchain.dsl_packages()
    toolchain.binary_tool("objdump", machine)
    toolchain.binary_tool("nm", machine)
    toolchain.runtime_library()
    toolchain.tvm_ffi_library()


def _one_arch(specs: Sequence[Spec]) -> str:
    """Return the architecture of all specs.

    Raises:
        ValueError: specs of several architectures, no specs, or two specs with one name.
    """
    archs = sorted({spec.arch for spec in specs})
    if len(archs) != 1:
        raise ValueError(f"a bundle holds one architecture, got specs for: {', '.join(archs) or 'none at all'}")
    if len({spec.name for spec in specs}) != len(specs):
        raise ValueError("two specs of a bundle have the same name")
    return archs[0]


def build(
    specs: Sequence[Spec],
    out: Path | str,
    jobs: int | None = None,
    progress: bool = True,
    *,
    tracer: str | None = None,
    allowed: Allowed | None = None,
    machine: host.Host | None = None,
) -> Manifest:
    """Build `out`/<arch>/libglulam_<arch>-<hash>.so and its manifest.json; the same sources give the same bytes.

    Args:
        specs: the functions to export, all for one architecture.
        out: the folder that holds bundles, made if missing. At the end the new bundle replaces one that is there.
        jobs: the largest number of compile processes. None: one for each usable CPU, at most 32.
        progress: True: show progress on standard error: a bar in a terminal, otherwise a line every few seconds.
        tracer: "module:function" of a function spec -> (jitted function, fake arguments). None: the kernels' own
            tracers.
        allowed: for each spec name, the compiler complaints to let pass. None: the architecture's ALLOWED_DIAGNOSTICS.
        machine: the CPUs for which host code is made. None: this machine's. Device code does not depend on it.

    Returns:
        The manifest of the new bundle.

    Raises:
        ValueError: no specs, specs of several architectures, or two specs with one name.
        CompileError: a kernel does not compile, spills registers, or has its wgmma serialised. Nothing is replaced.
        ToolchainError: the DSL, TVM-FFI or a C compiler is missing.
        BundleBusy: another process is building in `out`.
        BundleForeign: other users can write in `out`, so that its bundles would not be loaded; or a file that would be
            replaced was not written by a build.
        OSError: `out` cannot be written, or its disk is full. Nothing is replaced.
    """
    arch = _one_arch(specs)
    check_prerequisites(machine)
    package, store, out = package_of(tracer), Store(tracer, machine=machine), Path(out)
    # Before compiling: an edit meanwhile makes the bundle outdated, not wrong.
    sources = {package: toolchain.sources_hash(package)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(full_disk_told(out, "free some space, or build into a folder on another disk"))
        folders.make(out)
        stack.enter_context(only_builder(out))
        target.check(out / arch)
        sweep(out, SCRATCH)
        work = stack.enter_context(private_scratch(out, SCRATCH))
        objects, folder = work / "objects", work / arch
        objects.mkdir()
        folder.mkdir()
        stages = all_stages(specs)
        with shown(f"{arch} kernels", len(stages), progress) as seen:
            artifacts = compile_all(stages, store, objects, jobs or default_jobs(), seen)
        _refuse(complaints(artifacts, allowed_diagnostics(arch) if allowed is None else allowed))
        manifest = write_bundle(folder, arch, specs, artifacts, sources, machine)
        target.publish(stack.enter_context(_moved(folder, out)), out / arch, manifest)
    store.trim()
    return manifest


@contextlib.contextmanager
def _moved(folder: Path, out: Path) -> Iterator[Path]:
    """Move (or, from another disk, copy) a finished bundle into `out` under a temporary name, and yield the new folder.

    The new folder, or what is left of it, is removed at the end.
    """
    copy = out / f"{SCRATCH}{secrets.token_hex(8)}"
    (folder / MARKER).touch()  # so that `sweep` removes the folder if this build is killed
    install(folder, copy, SCRATCH)
    try:
        yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def find(specs: Sequence[Spec], out: Path | str) -> Manifest | None:
    """Return the manifest of the bundle in `out` if it is valid and up to date and has the functions of all specs.

    None: the bundle is missing, invalid or out of date, or lacks a function.
    """
    arch = _one_arch(specs)
    with contextlib.suppress(BundleError):
        manifest = verification.verify(Path(out) / arch, arch)
        if all(spec.name in manifest.functions for spec in specs):
            return manifest
    return None
