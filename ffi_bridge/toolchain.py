"""Where the tools are and which versions: the DSL's wheel, TVM-FFI, the C compiler. Imports none of them."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ._version import __version__
from .errors import ToolchainError

DSL = "nvidia-cutlass-dsl"
TVM_FFI = "apache-tvm-ffi"
INSTALL_DSL = 'run `pip install "nvidia-cutlass-dsl[cu13]==4.8.1"`'
INSTALL_TVM_FFI = "run `pip install apache-tvm-ffi==0.1.15.post2`"

# The DSL comes as several wheels that share one version; a run-time install may hold the libraries' wheel alone.
_DSL_WHEELS = (DSL, "nvidia-cutlass-dsl-libs-cu13", "nvidia-cutlass-dsl-libs-base")


def package_folders(name: str) -> list[Path]:
    """The folders of top-level package `name`, found without importing it; empty where there is none."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    return [Path(p) for p in (found.submodule_search_locations or ())] if found else []


def runtime_library() -> Path:
    """The DSL's run-time library (CUDA 13), inside its wheel.

    Raises:
        ToolchainError: the wheel is not installed, or only its CUDA 12 half is.
    """
    folders = package_folders("nvidia_cutlass_dsl")
    for folder in folders:
        library = folder / "cu13" / "lib" / "libcute_dsl_runtime.so"
        if library.is_file():
            return library
    lack = "has no CUDA 13 run-time library" if folders else "is not installed"
    raise ToolchainError(f"{DSL} {lack}; {INSTALL_DSL}")


def tvm_ffi_library() -> Path:
    """libtvm_ffi.so, which a bundle is linked against. Raises ToolchainError where TVM-FFI is not installed."""
    for folder in package_folders("tvm_ffi"):
        library = folder / "lib" / "libtvm_ffi.so"
        if library.is_file():
            return library
    raise ToolchainError(f"{TVM_FFI} is not installed; {INSTALL_TVM_FFI}")


def dsl_packages() -> Path:
    """The folder that holds `cutlass`. Raises ToolchainError where the compiler's part of the DSL is missing."""
    for folder in package_folders("nvidia_cutlass_dsl"):
        if (folder / "dsl_packages" / "cutlass").is_dir():
            return folder / "dsl_packages"
    raise ToolchainError(f"{DSL} cannot compile here: `cutlass` is not part of it; {INSTALL_DSL}")


def c_compiler() -> list[str]:
    """The system's C compiler as an argument list: $CC where set, else `cc`. Raises ToolchainError without one."""
    command = shlex.split(os.environ.get("CC", "")) or ["cc"]
    if shutil.which(command[0]) is None:
        raise ToolchainError(f"no C compiler: {command[0]!r} is not on PATH; install gcc or clang, or set CC")
    return command


def _assigned_version(file: Path) -> str | None:
    """`__version__` as a Python file assigns it, read without running the file."""
    try:
        tree = ast.parse(file.read_text())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
    constants = [n for n in tree.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant)]
    for node in constants:
        if any(isinstance(target, ast.Name) and target.id == "__version__" for target in node.targets):
            return str(ast.literal_eval(node.value))
    return None


def _installed_version(wheels: tuple[str, ...], sources: list[Path]) -> str | None:
    """The version that any of `wheels` declares; where none does (a folder on sys.path), what its source says."""
    for wheel in wheels:
        try:
            return importlib.metadata.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            continue
    return next((version for source in sources if (version := _assigned_version(source))), None)


@functools.cache
def versions() -> dict[str, str | None]:
    """The versions that a bundle must agree with; None where a package is absent or does not say."""
    cutlass = [f / "dsl_packages" / "cutlass" / "__init__.py" for f in package_folders("nvidia_cutlass_dsl")]
    tvm_ffi = [f / "_version.py" for f in package_folders("tvm_ffi")]
    return {
        "glulam": __version__,
        DSL: _installed_version(_DSL_WHEELS, cutlass),
        TVM_FFI: _installed_version((TVM_FFI,), tvm_ffi),
    }


class Source(NamedTuple):
    """A Python file: its name within the package, where it is, and what tells whether it was written since."""

    name: str
    path: str
    mtime_ns: int
    size: int


def _sources_in(folder: str, prefix: str = "") -> Iterator[Source]:
    """Every Python file below a folder; of strings, since this is most of what finding a cached kernel takes."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                found = entry.stat()
                yield Source(prefix + entry.name, entry.path, found.st_mtime_ns, found.st_size)
            elif entry.is_dir() and entry.name != "__pycache__":
                yield from _sources_in(entry.path, f"{prefix}{entry.name}/")


def sources_of(package: str) -> list[Source]:
    """Every Python file of a top-level package or module."""
    if folders := package_folders(package):
        return sorted(source for folder in folders for source in _sources_in(str(folder)))
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ToolchainError(f"the kernels' sources are missing: no package {package!r} in {sys.prefix}")
    written = os.stat(found.origin)
    return [Source(os.path.basename(found.origin), found.origin, written.st_mtime_ns, written.st_size)]


_hashes: dict[str, tuple[list[Source], str]] = {}


def sources_hash(package: str) -> str:
    """sha256 over the names and contents of a package's Python files; where they lie does not matter.

    Files are read again where one was added, removed or written since this process last asked.

    Raises:
        ToolchainError: there is no such package.
    """
    sources = sources_of(package)
    known = _hashes.get(package)
    if known is None or known[0] != sources:
        known = _hashes[package] = sources, _hash_of(sources)
    return known[1]


def _hash_of(sources: list[Source]) -> str:
    digest = hashlib.sha256()
    for source in sources:
        content = Path(source.path).read_bytes()
        digest.update(f"{source.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
