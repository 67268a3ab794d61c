"""From a bundle on disk to callables: verified first, loaded second, never a compiler."""

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
from .errors import BundleDamaged, BundleMissing, ToolchainError, remedy
from .manifest import Manifest, checked, opened_library
from .profiles import profile_of

ENV_BUNDLE = "GLULAM_BUNDLE"
_IN_MEMORY = "/dev/shm"  # a folder there takes 20 us to make and remove, on a disk up to 2 ms

_loaded: dict[tuple[str, str, tuple[str, ...]], Bundle] = {}
_lock = threading.Lock()


@functools.cache
def _load_runtime(path: Path) -> ctypes.CDLL:
    """The DSL's run-time library, global: a bundle finds it by its soname. Kept for the life of the process."""
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _check_symbols(library: ctypes.CDLL, package: str, symbols: list[str]) -> None:
    """What a bundle needs of a run-time library is there, whatever version that is."""
    if lacking := [symbol for symbol in symbols if not hasattr(library, symbol)]:
        version = toolchain.versions()[package] or "of an unknown version"
        raise ToolchainError(
            f"{library._name} of {package} {version} has no {', '.join(lacking)[:200]}, which the kernels need; "
            f"{toolchain.INSTALL[package]}"
        )


def _open_library(path: Path, needs: Mapping[str, list[str]]) -> Any:
    """The TVM-FFI module of a shared library. The only place that executes anything of a bundle."""
    runtime, ffi = toolchain.runtime_library(), toolchain.tvm_ffi_library()
    import tvm_ffi  # imports torch where it is installed

    _check_symbols(_load_runtime(runtime), toolchain.DSL, needs[toolchain.DSL])
    _check_symbols(ctypes.CDLL(str(ffi)), toolchain.TVM_FFI, needs[toolchain.TVM_FFI])
    return tvm_ffi.load_module(str(path))


@contextlib.contextmanager
def _named(handle: int, library: Path) -> Iterator[Path]:
    """A path to the open file `handle`: TVM-FFI wants one that ends in .so, and no one else may turn it elsewhere.

    Without a place for temporary files or without /proc it is the library's own: only this user and root could have
    changed what is there since.
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
        folder: where the library and its manifest lie.
        manifest: what they contain.
        given_out: names of the functions that were asked for.

    Raises:
        BundleForeign, BundleDamaged: the library is another user's, not the manifest's, or does not load.
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
                told = f"damaged bundle: {library} does not load here ({why}); {remedy(library)}"
                raise BundleDamaged(told) from error

    def names(self) -> list[str]:
        """Every function's name, sorted."""
        return list(self.manifest.functions)

    def has(self, name: str) -> bool:
        return name in self.manifest.functions

    def _remedy(self, name: str) -> str:
        if profile := profile_of(self.manifest.arch, name):
            return f"profile {profile!r} has it: {remedy(self.folder, f' --profile {profile}')}"
        return "compile it with `glulam.compile`"

    def function(self, name: str) -> Callable[..., Any]:
        """The function exported under a spec's name: positional arguments only, asynchronous on the current stream.

        Raises:
            BundleMissing: the bundle has no such function.
            BundleDamaged: its manifest lists the function, its library lacks it.
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


def load(
    arch: str,
    directory: Path | str | None = None,
    sources: Mapping[str, str] | None = None,
    spec: Spec | None = None,
) -> Bundle:
    """The bundle of `arch`, verified and loaded once a process for each place.

    Args:
        arch: as "sm_90a".
        directory: the folder that holds `arch`/; default as `bundle_root` says, read at each call.
        sources, spec: as of `manifest.verify`.

    Raises:
        BundleMissing, BundleForeign, BundleOutdated, BundleDamaged: nothing was loaded; the message says
            what does not fit and which command mends it.
        ToolchainError: a run-time library (the DSL's or TVM-FFI's) is not installed.
    """
    root = bundle_root(directory)
    key = (arch, os.path.abspath(root), plain_in(arch))
    with _lock:
        if key not in _loaded:
            bundle = checked(Bundle, root / arch, arch, sources, spec)
            if spec:
                bundle.function(spec.name)  # one that lacks it is not kept: it will be made anew
            _loaded[key] = bundle
        return _loaded[key]
