"""From a bundle on disk to callables: verified first, loaded second, never a compiler."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import toolchain
from .errors import BundleMissing
from .manifest import REMEDY, Manifest, verify

ENV_BUNDLE = "GLULAM_BUNDLE"

_loaded: dict[tuple[str, str], Bundle] = {}
_lock = threading.Lock()


@functools.cache
def _load_runtime(path: Path) -> ctypes.CDLL:
    """The DSL's run-time library, global: a bundle finds it by its soname. Kept for the life of the process."""
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _open_library(path: Path) -> Any:
    """The TVM-FFI module of a shared library. The only place that executes anything of a bundle."""
    runtime = toolchain.runtime_library()
    toolchain.tvm_ffi_library()
    import tvm_ffi  # imports torch where it is installed

    _load_runtime(runtime)
    return tvm_ffi.load_module(str(path))


class Bundle:
    """A loaded bundle of one architecture.

    Attributes:
        folder: where the library and its manifest lie.
        manifest: what they contain.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._module = _open_library(folder / manifest.library)

    def names(self) -> list[str]:
        """Every function's name, sorted."""
        return list(self.manifest.functions)

    def has(self, name: str) -> bool:
        return name in self.manifest.functions

    def function(self, name: str) -> Callable[..., Any]:
        """The function exported under a spec's name: positional arguments only, asynchronous on the current stream.

        Raises:
            BundleMissing: the bundle has no such function.
        """
        if not self.has(name):
            raise BundleMissing(
                f"no function {name!r} in the bundle {self.folder}; compile it with `glulam.compile`, "
                f"or add its spec to the shipped table and {REMEDY}"
            )
        function: Callable[..., Any] = self._module.get_function(name)
        return function


def bundle_root(directory: Path | str | None = None) -> Path:
    """Where bundles are looked for: `directory`, else $GLULAM_BUNDLE, else inside the installed package.

    Raises:
        BundleMissing: neither of the first two is given and the package is not installed.
    """
    if directory is not None:
        return Path(directory)
    if chosen := os.environ.get(ENV_BUNDLE):
        return Path(chosen)
    return packaged_root()


def packaged_root() -> Path:
    """The bundle folder of the installed package, whether or not it exists yet."""
    for folder in toolchain.package_folders("glulam"):
        return folder / "_bundle"
    raise BundleMissing(f"no bundle: the package glulam is not installed; `pip install` it, or set {ENV_BUNDLE}")


def load(arch: str, directory: Path | str | None = None, sources: Mapping[str, str] | None = None) -> Bundle:
    """The bundle of `arch`, verified and loaded once a process for each place.

    Args:
        arch: as "sm_90a".
        directory: the folder that holds `arch`/; default as `bundle_root` says, read at each call.
        sources: as of `manifest.verify`.

    Raises:
        BundleMissing, BundleForeign, BundleOutdated, BundleDamaged: nothing was loaded; the message says
            what does not fit and which command mends it.
        ToolchainError: a run-time library (the DSL's or TVM-FFI's) is not installed.
    """
    root = bundle_root(directory)
    key = (arch, os.path.abspath(root))
    with _lock:
        if key not in _loaded:
            folder = root / arch
            _loaded[key] = Bundle(folder, verify(folder, arch, sources))
        return _loaded[key]
