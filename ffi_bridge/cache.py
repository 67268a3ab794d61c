"""The cache of compiled kernels on disk: where it is, what is in it, how an entry is found. Nothing here compiles.

A cache entry is a bundle of one function, so that the loader's checks serve it as well. Its key covers the
spec, the kernels' sources, the compile options and the toolchain's versions; anything else is the same code.

    <root>/<key>/<arch>/         an entry: library and manifest
    <root>/<key>.lock            held while the entry is made
    <root>/<key>.damaged/        an entry that was put aside
    <root>/.compile-*/           a compile in progress
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cute_kernels.specs import Spec, from_dict, to_dict
from cute_kernels.tiles import SpecError

from . import loader, manifest, toolchain
from .compiler import DEFAULT_TRACER, OPTIONS
from .errors import BundleDamaged, BundleError, BundleOutdated
from .scratch import sweep

ENV_CACHE = "GLULAM_CACHE_DIR"
DAMAGED, COMPILING, LOCK = ".damaged", ".compile-", ".lock"
STATES = ("sound", "outdated", "damaged", "aside")


def cache_root() -> Path:
    """$GLULAM_CACHE_DIR, read at each call, else the user's cache folder for glulam."""
    if chosen := os.environ.get(ENV_CACHE):
        return Path(chosen)
    import platformdirs

    return platformdirs.user_cache_path("glulam") / "kernels"


def tracer_sources(tracer: str = DEFAULT_TRACER) -> dict[str, str]:
    """Hash of the sources that a tracer's kernels are made of, by top-level package."""
    package = tracer.partition(":")[0].partition(".")[0]
    return {package: toolchain.sources_hash(package)}


def cache_key(spec: Spec, tracer: str = DEFAULT_TRACER, sources: dict[str, str] | None = None) -> str:
    """The spec's name and 16 hexadecimal digits over everything else that changes the code.

    `sources`: `tracer_sources`, where the caller took them just now.
    """
    parts = [to_dict(spec), tracer, sources or tracer_sources(tracer), OPTIONS, toolchain.versions()]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return f"{spec.name}-{digest[:16]}"


def find(spec: Spec, tracer: str = DEFAULT_TRACER) -> Callable[..., Any] | None:
    """The cached function of a spec, verified and loaded; None where there is no usable entry."""
    with contextlib.suppress(BundleError):
        sources = tracer_sources(tracer)  # once: looking at every file is most of what finding takes
        return loader.load(spec.arch, cache_root() / cache_key(spec, tracer, sources), sources).function(spec.name)
    return None


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry of the cache.

    Attributes:
        folder: where it lies.
        spec: of its kernel; None where its manifest cannot be read.
        size: bytes on disk.
        state: "sound": `find` gives it; "outdated": made by other versions or of other sources, of no more use;
            "damaged": made anew when it is next asked for; "aside": found damaged before, kept to be looked at.
        problem: what is wrong with it, empty where it is sound.
    """

    folder: Path
    spec: Spec | None
    size: int
    state: str
    problem: str = ""

    @property
    def name(self) -> str:
        return self.folder.name


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _spec_in(folder: Path) -> Spec | None:
    """The spec of the one function of an entry's bundle."""
    with contextlib.suppress(BundleError, SpecError, OSError):
        (function,) = manifest.read(folder).functions.values()
        return from_dict(function.spec)
    return None


def _examine(folder: Path) -> Entry:
    size = _size(folder)
    if folder.suffix == DAMAGED:
        return Entry(folder, None, size, "aside", "was found damaged")
    inner = next((path for path in sorted(folder.iterdir()) if path.is_dir()), folder / "nothing")
    spec = _spec_in(inner)
    try:
        manifest.verify(inner, inner.name)
        if spec is None:
            raise BundleDamaged(f"{folder} holds another number of functions than one")
    except BundleOutdated as error:
        return Entry(folder, spec, size, "outdated", str(error))
    except BundleError as error:
        return Entry(folder, spec, size, "damaged", str(error))
    if folder.name != cache_key(spec):
        return Entry(folder, spec, size, "outdated", "was compiled with other options, versions or sources")
    return Entry(folder, spec, size, "sound")


def entries(root: Path | None = None) -> Iterator[Entry]:
    """Every entry of the cache, verified, in the order of their names. Nothing is loaded."""
    root = root or cache_root()
    folders = root.iterdir() if root.is_dir() else ()
    for folder in sorted(folders):
        if folder.is_dir() and "-" in folder.name and not folder.name.startswith("."):
            yield _examine(folder)


def remove(entry: Entry) -> None:
    """Removes an entry that no process is making. Processes that loaded it keep it. Raises OSError."""
    import filelock

    lock = filelock.FileLock(entry.folder.with_name(f"{entry.name}{LOCK}"))
    with contextlib.suppress(filelock.Timeout), lock.acquire(timeout=0):
        shutil.rmtree(entry.folder)


def clear(root: Path | None = None, states: tuple[str, ...] = STATES) -> list[Entry]:
    """Removes the entries in these states, and what killed compiles left. Returns what was removed."""
    root = root or cache_root()
    sweep(root, COMPILING)
    removed = [entry for entry in entries(root) if entry.state in states]
    for entry in removed:
        remove(entry)
    return removed
