"""Specs of the toy bundle, the folder of its kernels' sources, and what tests of bundles share."""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cute_kernels.specs import GroupedGluSpec, GroupedMmSpec, GroupedWgradSpec, Spec
from ffi_bridge import cache, toolchain

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
TOY_TRACER = "toy_kernels:trace"
TOY_SPECS: list[Spec] = [GroupedMmSpec(), GroupedGluSpec(save_preact=True), GroupedWgradSpec()]
ELF = b"\x7fELF"
MANY_SPECS: list[Spec] = [*TOY_SPECS, *(GroupedMmSpec("float16", transpose_w=flipped) for flipped in (False, True))]

if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))  # where the loader's check of the sources finds toy_kernels


def object_key(spec: Spec, tracer: str | None = TOY_TRACER, has_ptx: bool = False) -> str:
    """Return the name of an object's folder in the store."""
    return cache.cache_key(spec, tracer, cache.sources_of(spec, tracer, of_object=True), has_ptx)


def library_in(folder: Path) -> Path:
    """Return the path of the library in a bundle's <root>/<arch> folder."""
    (library,) = folder.glob("libglulam_*.so")
    return library


def files_of(bundle: Path) -> dict[str, bytes]:
    """Return the content of every file of a bundle, by name."""
    return {file.name: file.read_bytes() for file in (bundle / "sm_90a").iterdir()}


def cubin(file: bytes) -> bytes:
    """Return the device code embedded in an object file: an inner ELF file, up to the end of its section table."""
    start = file.index(ELF, 4)
    (table,), (size, count) = struct.unpack_from("<Q", file, start + 40), struct.unpack_from("<HH", file, start + 58)
    return file[start : start + table + size * count]


def wait_until(reached: Callable[[], bool]) -> None:
    for _ in range(1200):
        if reached():
            return
        time.sleep(0.05)
    raise AssertionError("waited 60 s for nothing")


def rewrite(file: Path, content: bytes) -> None:
    """Replace a file by a new one with this content. The old one may be mapped into this process, which writing to it
    would crash.
    """
    file.unlink()
    file.write_bytes(content)


def linked_as(content: bytes) -> Callable[..., Any]:
    """Return a stand-in for the linker: the library is `content`, and needs what a library without code needs."""

    def link(objects: object, library: Path, machine: object = None) -> dict[str, list[str]]:
        library.write_bytes(content)
        return {package: [] for package in toolchain.RUNS_WITH}

    return link
