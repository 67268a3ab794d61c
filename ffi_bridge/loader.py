"""Load a bundle from disk: verify it first, then load its functions. No compiler is ever called."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cute_kernels.plain import plain_in
from cute_kernels.specs import Spec

from . import toolchain
from .errors import PACKAGED, BundleDamaged, BundleMissing, ToolchainError, remedy
from .manifest import Manifest
from .profiles import profile_of
from .verification import checked, opened_library

ENV_BUNDLE = "GLULAM_BUNDLE"
_IN_MEMORY = "/dev/shm"  # a folder there takes 20 us to make and remove, on a disk up to 2 ms

_loaded: dict[tuple[str, str, tuple[str, ...]], Bundle] = {}
_lock = threading.Lock()


@functools.cache
def _load_runtime(path: Path) -> ctypes.CDLL:
    """Load the DSL's run-time library globally, for the life of the process: a bundle finds it by its soname."""
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _check_symbols(library: ctypes.CDLL, package: str, symbols: list[str]) -> None:
    """Raise ToolchainError if a run-time library lacks one of `symbols`, which a bundle needs.

    The library's version does not matter. package: name of the library's distribution.
    """
    if lacking := [symbol for symbol in symbols if not hasattr(library, symbol)]:
        version = toolchain.versions()[package] or "of an unknown version"
        raise ToolchainError(
            f"{library._name} of {package} {version} has no {', '.join(lacking)[:200]}, which the kernels need; "
            f"{toolchain.INSTALL[package]}"
        )


def _open_library(path: Path, needs: Mapping[str, list[str]]) -> Any:
    """Load a shared library as a TVM-FFI module. This is the only function that executes code of a bundle.

    needs: the symbols that the library takes from each run-time library, as in `Manifest.needs`.
    """
    runtime, ffi = toolchain.runtime_library(), toolchain.tvm_ffi_library()
    import tvm_ffi  # imports torch if torch is installed

    _check_symbols(_load_runtime(runtime), toolchain.DSL, needs[toolchain.DSL])
    _check_symbols(ctypes.CDLL(str(ffi)), toolchain.TVM_FFI, needs[toolchain.TVM_FFI])
    return tvm_ffi.load_module(str(path))


@contextlib.contextmanager
def _named(handle: int, library: Path) -> Iterator[Path]:
    """Yield a path for an open file: a symbolic link in a temporary folder to the file descriptor `handle`.

    TVM-FFI loads by path, which must end in .so. The link leads to the checked file even if `library` is replaced
    meanwhile. Without a temporary folder or /proc, the path is `library` itself, which only this user and root can
    change.
    """
    place = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK | os.X_OK) else None
    try:
        folder = tempfile.mkdtemp(prefix="glulam-", dir=place)
    except OSError:
        yield library
        return
    try:
        link = Path(folder, library.name)
        link.symlink_to(f"/proc/self/fd/{handle}")
        yield link if link.exists() else library
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Bundle:
    """A loaded bundle of one architecture.

    Attributes:
        folder: the folder of the library and its manifest.
        manifest: the description of the library.
        given_out: names of the functions that `function` has returned.

    Raises:
        BundleForeign, BundleDamaged: the library is another user's, does not match the manifest, or does not load.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.given_out: set[str] = set()
        library = folder / manifest.library
        with opened_library(folder, manifest) as handle, _named(handle, library) as path:
            try:
                self._module = _open_library(path, manifest.needs)
            except ToolchainError:
                raise
            except RuntimeError as error:
                why = " ".join(str(error).split())
                message = f"damaged bundle: {library} does not load here ({why}); {remedy(library)}"
                raise BundleDamaged(message) from error

    def names(self) -> list[str]:
        """Return the names (spec names) of all functions that the bundle's manifest lists, sorted."""
        return list(self.manifest.functions)

    def has(self, name: str) -> bool:
        """Return True if the bundle has a function of this name."""
        return name in self.manifest.functions

    def _remedy(self, name: str) -> str:
        """Return advice for an error message on how to get a function that the bundle lacks."""
        if profile := profile_of(self.manifest.arch, name):
            return f"profile {profile!r} has it: {remedy(self.folder, f' --profile {profile}')}"
        return "compile it with `glulam.compile`"

    def function(self, name: str) -> Callable[..., Any]:
        """Return the function exported under a spec's name: positional arguments only, runs on the current stream.

        Raises:
            BundleMissing: the bundle has no such function.
            BundleDamaged: the manifest lists the function, but the library lacks it.
        """
        if not self.has(name):
            raise BundleMissing(f"no function {name!r} in the bundle {self.folder}; {self._remedy(name)}")
        try:
            function: Callable[..., Any] = self._module.get_function(name)
        except AttributeError as error:
            library = self.folder / self.manifest.library
            raise BundleDamaged(f"damaged bundle: {library} has no function {name}; {remedy(library)}") from error
        self.given_out.add(name)
        return function


def bundle_root(directory: Path | str | None = None) -> Path:
    """Return the folder that holds bundles: `directory`, else $GLULAM_BUNDLE, else inside the installed package.

    Raises:
        BundleMissing: `directory` and $GLULAM_BUNDLE are not given, and the package is not installed.
    """
    if directory is not None:
        return Path(directory)
    if chosen := os.environ.get(ENV_BUNDLE):
        return Path(chosen)
    return packaged_root()


def packaged_root() -> Path:
    """Return the bundle folder in the installed package `glulam`; the folder may not exist yet.

    Raises:
        BundleMissing: the package is not installed.
    """
    for folder in toolchain.package_folders("glulam"):
        return folder / PACKAGED
    raise BundleMissing(f"no bundle: the package glulam is not installed; `pip install` it, or set {ENV_BUNDLE}")


def load(
    arch: str,
    directory: Path | str | None = None,
    sources: Mapping[str, str] | None = None,
    spec: Spec | None = None,
) -> Bundle:
    """Return the bundle of `arch`, verified and loaded once per process and folder.

    Args:
        arch: an architecture, for example "sm_90a".
        directory: the folder that holds `arch`/. None: `bundle_root()`, read at each call.
        sources: the source hashes that the manifest must record. None: the hashes of the installed kernels' sources.
        spec: the one function that the bundle must have, with no others except its stages; a bundle that lacks it is
            not kept in memory. None: any functions.

    Returns:
        The loaded bundle.

    Raises:
        BundleMissing, BundleForeign, BundleOutdated, BundleDamaged: nothing was loaded; the message names the
            mismatch and the command that mends it.
        ToolchainError: a run-time library (the DSL's or TVM-FFI's) is not installed.
    """
    root = bundle_root(directory)
    key = (arch, os.path.abspath(root), plain_in(arch))
    with _lock:
        if key not in _loaded:
            bundle = checked(Bundle, root / arch, arch, sources, spec)
            if spec:
                bundle.function(spec.name)  # a bundle that lacks it is not kept: it will be made anew
            _loaded[key] = bundle
        return _loaded[key]
