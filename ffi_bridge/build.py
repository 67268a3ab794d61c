"""Specs to a bundle: compile in parallel processes, judge, link, write the manifest."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from cute_kernels.specs import Spec, to_dict

from . import manifest as manifests
from . import toolchain
from .cache import tracer_sources
from .compiler import DEFAULT_TRACER, KernelArtifact
from .errors import CompileError
from .link import link
from .manifest import Function, Manifest
from .scratch import sweep
from .worker import Worker

# An architecture is a folder of cute_kernels; its configs say what ships and what may complain.
CONFIGS = {"sm_90a": "cute_kernels.sm90.configs"}
SCRATCH, ATTIC = ".build-", ".old-"  # folders of a build in progress: what it makes, and what that replaces
_MAX_JOBS = 32  # a compile process needs about 0.5 GB
_MAX_COMPLAINTS = 20  # lines of an error message

Allowed = Mapping[str, tuple[str, ...]]


def shipped_specs(arch: str) -> list[Spec]:
    """Every spec that the bundle of `arch` ships. Raises ValueError, naming the choices, for an unknown one."""
    if arch not in CONFIGS:
        raise ValueError(f"arch={arch!r} has no kernels; choose one of: {', '.join(CONFIGS)}")
    specs: list[Spec] = importlib.import_module(CONFIGS[arch]).shipped_specs()
    return specs


def allowed_diagnostics(arch: str) -> Allowed:
    """Complaints ('spills', 'C7510', ...) that the build of `arch` lets pass, by spec name."""
    allowed: Allowed = getattr(importlib.import_module(CONFIGS[arch]), "ALLOWED_DIAGNOSTICS", {})
    return allowed


def complaints(artifacts: Sequence[KernelArtifact], allowed: Allowed) -> list[str]:
    """One line for each thing that a kernel does and its spec's name does not allow."""
    return [
        f"{artifact.name}: {kernel.describe(complaint)} in {kernel.name}"
        for artifact in artifacts
        for kernel in artifact.kernels
        for complaint in kernel.complaints
        if complaint not in allowed.get(artifact.name, ())
    ]


def _refuse(lines: list[str]) -> None:
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
    """Compile processes that this machine serves well: one a usable CPU."""
    return min(len(os.sched_getaffinity(0)), _MAX_JOBS)


def compile_all(
    specs: Sequence[Spec], directory: Path, jobs: int, tracer: str, done: Callable[[], None]
) -> list[KernelArtifact]:
    """Compiles `specs` into `directory` in `jobs` processes, calling `done` after each; order is not kept.

    Raises:
        CompileError: of the first spec that does not compile; the others are abandoned.
    """
    queue, lock, failed = iter(specs), threading.Lock(), threading.Event()

    def upcoming() -> Iterator[Spec]:
        while not failed.is_set():
            with lock:
                spec = next(queue, None)
            if spec is None:
                return
            yield spec

    def drain() -> list[KernelArtifact]:
        artifacts = []
        try:
            with Worker(directory, tracer) as worker:
                for spec in upcoming():
                    artifacts.append(worker.compile(spec))
                    done()
        except BaseException:
            failed.set()
            raise
        return artifacts

    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(drain) for _ in range(jobs)]
        try:
            return [artifact for future in as_completed(futures) for artifact in future.result()]
        finally:
            failed.set()  # an interrupt ends the other threads as well


@contextlib.contextmanager
def _progress(title: str, total: int, shown: bool) -> Iterator[Callable[[], None]]:
    """A callable that advances one progress bar on standard error."""
    if not shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


def write_bundle(
    folder: Path, arch: str, specs: Sequence[Spec], artifacts: Sequence[KernelArtifact], sources: dict[str, str]
) -> Manifest:
    """Links `artifacts` into `folder` (which exists) and writes the manifest beside the library."""
    library = folder / manifests.library_name(arch)
    link((artifact.object_file for artifact in artifacts), library)
    by_name = {artifact.name: artifact for artifact in artifacts}
    manifest = Manifest(
        arch=arch,
        library=library.name,
        sha256=manifests.file_hash(library),
        size=library.stat().st_size,
        versions=toolchain.versions(),
        sources=sources,
        functions={
            spec.name: Function(to_dict(spec), by_name[spec.name].kernels)
            for spec in sorted(specs, key=lambda spec: spec.name)
        },
    )
    manifest.write(folder)
    return manifest


def replace_folder(new: Path, target: Path) -> None:
    """Moves folder `new` to `target`, in place of what is there. Both are on one file system."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=ATTIC, ignore_cleanup_errors=True) as attic:
        with contextlib.suppress(FileNotFoundError):
            target.rename(Path(attic) / "bundle")
        new.rename(target)


def check_prerequisites() -> None:
    """Raises ToolchainError now, rather than after minutes of compiling, for what compiling and linking need."""
    toolchain.dsl_packages()
    toolchain.c_compiler()
    toolchain.runtime_library()
    toolchain.tvm_ffi_library()


def _one_arch(specs: Sequence[Spec]) -> str:
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
    tracer: str = DEFAULT_TRACER,
    allowed: Allowed | None = None,
) -> Manifest:
    """Builds `out`/<arch>/libglulam_<arch>.so and its manifest.json; the same sources give the same bytes.

    Args:
        specs: what to compile, all for one architecture.
        out: the bundle's root; created where it does not exist. A bundle already there is replaced at the end.
        jobs: compile processes; default, one a usable CPU.
        progress: show a progress bar on standard error.
        tracer: "module:function", spec -> (jitted function, fake arguments).
        allowed: complaints let pass by spec name; default, the architecture's ALLOWED_DIAGNOSTICS.

    Raises:
        ValueError: no specs, or specs of several architectures.
        CompileError: a kernel does not compile, spills, or has its wgmma serialised; nothing is replaced.
        ToolchainError: the DSL, TVM-FFI or a C compiler is missing.
    """
    arch = _one_arch(specs)
    check_prerequisites()
    sources = tracer_sources(tracer)  # before compiling: an edit meanwhile makes the bundle outdated, not wrong
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    sweep(out, SCRATCH, ATTIC)
    jobs = min(jobs or default_jobs(), len(specs))
    with tempfile.TemporaryDirectory(dir=out, prefix=SCRATCH) as scratch:
        objects, folder = Path(scratch) / "objects", Path(scratch) / arch
        objects.mkdir()
        folder.mkdir()
        with _progress(f"{arch} kernels", len(specs), progress) as done:
            artifacts = compile_all(specs, objects, jobs, tracer, done)
        _refuse(complaints(artifacts, allowed_diagnostics(arch) if allowed is None else allowed))
        manifest = write_bundle(folder, arch, specs, artifacts, sources)
        shutil.rmtree(objects)
        replace_folder(folder, out / arch)
    return manifest
