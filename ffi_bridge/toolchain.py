"""Find the tools and their versions: the DSL's wheel, TVM-FFI, the C compiler. None of the packages is imported."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ._version import __version__
from .definitions import parse
from .errors import ToolchainError
from .host import Host, here

DSL = "nvidia-cutlass-dsl"
TVM_FFI = "apache-tvm-ffi"


class Range(NamedTuple):
    """The versions from `oldest` up to, but without, `below`. Only the leading numbers of versions are compared."""

    oldest: str
    below: str

    def __contains__(self, version: object) -> bool:
        return _release(self.oldest) <= _release(str(version)) < _release(self.below)

    def __str__(self) -> str:
        return f">={self.oldest},<{self.below}"


# The versions that a bundle needs. EQUAL: packages that must have the version with which the bundle was built; the
# kernels' sources must be the same, too. RUNS_WITH: any version in the range, whichever built the bundle; the oldest
# and the newest are tested, with others between them. The manifest records which of these versions built the bundle,
# for information only.
EQUAL = ("glulam",)
RUNS_WITH = {DSL: Range("4.7.1", "4.9"), TVM_FFI: Range("0.1.9", "0.2")}

# Versions with which kernels may be compiled; the code depends on the version. TVM-FFI's version does not change a byte
# of an object.
COMPILES_WITH = {DSL: ("4.8.1",)}

INSTALL = {
    DSL: f'run `pip install "{DSL}[cu13]{RUNS_WITH[DSL]}"`',
    TVM_FFI: f'run `pip install "{TVM_FFI}{RUNS_WITH[TVM_FFI]}"`',
}
INSTALL_COMPILER = f'run `pip install "{DSL}[cu13]=={COMPILES_WITH[DSL][0]}"`'

# The DSL comes as several wheels that share one version; a run-time install may hold the libraries' wheel alone.
_DSL_WHEELS = ("nvidia-cutlass-dsl-libs-cu13", DSL, "nvidia-cutlass-dsl-libs-base")


def _release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (0, 1, 15) for "0.1.15.post2". Empty if it begins otherwise."""
    numbers = re.match(r"\d{1,9}(\.\d{1,9})*", version, re.ASCII)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def package_folders(name: str) -> list[Path]:
    """Return the folders of the top-level package `name` without importing it; empty if it is not installed."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    return [Path(p) for p in (found.submodule_search_locations or ())] if found else []


def runtime_library() -> Path:
    """Return the path of the DSL's run-time library (CUDA 13), which is in its wheel.

    Raises:
        ToolchainError: the wheel is not installed, has only the CUDA 12 part, or its version is not in RUNS_WITH.
    """
    folders = package_folders("nvidia_cutlass_dsl")
    for folder in folders:
        library = folder / "cu13" / "lib" / "libcute_dsl_runtime.so"
        if library.is_file():
            _check_range(DSL)
            return library
    lack = "has no CUDA 13 run-time library" if folders else "is not installed"
    raise ToolchainError(f"{DSL} {lack}; {INSTALL[DSL]}")


def tvm_ffi_library() -> Path:
    """Return the path of libtvm_ffi.so, which bundles are linked with.

    Raises:
        ToolchainError: TVM-FFI is not installed, or its version is not in RUNS_WITH.
    """
    for folder in package_folders("tvm_ffi"):
        library = folder / "lib" / "libtvm_ffi.so"
        if library.is_file():
            _check_range(TVM_FFI)
            return library
    raise ToolchainError(f"{TVM_FFI} is not installed; {INSTALL[TVM_FFI]}")


def _check_range(package: str) -> None:
    """Raise ToolchainError if a package's version is not in RUNS_WITH.

    An unknown version (the package is a folder without metadata) passes: the loader checks the symbols.
    """
    version, wanted = versions()[package], RUNS_WITH[package]
    if version and version not in wanted:
        raise ToolchainError(f"{package} {version} is installed, Glulam runs with {wanted}; {INSTALL[package]}")


def tvm_ffi_headers() -> Path:
    """Return the folder of TVM-FFI's C headers. Raises ToolchainError if TVM-FFI, or its headers, are not installed."""
    for folder in package_folders("tvm_ffi"):
        if (folder / "include" / "tvm" / "ffi" / "c_api.h").is_file():
            return folder / "include"
    raise ToolchainError(f"{TVM_FFI} is not installed, or has no headers; {INSTALL[TVM_FFI]}")


def dsl_packages() -> Path:
    """Return the folder in the DSL's wheel that has the package `cutlass`.

    Raises:
        ToolchainError: the compiler's part of the DSL is missing, or its version is not in COMPILES_WITH.
    """
    for folder in package_folders("nvidia_cutlass_dsl"):
        if (folder / "dsl_packages" / "cutlass").is_dir():
            version, tested = versions()[DSL], COMPILES_WITH[DSL]
            if version and version not in tested:
                wanted = " or ".join(tested)
                raise ToolchainError(
                    f"{DSL} {version} is installed, kernels are compiled with {wanted}; {INSTALL_COMPILER}"
                )
            return folder / "dsl_packages"
    raise ToolchainError(f"{DSL} cannot compile here: `cutlass` is not part of it; {INSTALL_COMPILER}")


def code_versions() -> dict[str, str | None]:
    """Return the versions, by distribution name, that compiled code and measurements depend on: Glulam's and the DSL's.

    If the installed DSL's version is not in COMPILES_WITH, the first version in COMPILES_WITH is returned instead: code
    compiled by that version runs here, too.
    """
    tested, installed = COMPILES_WITH[DSL], versions()[DSL]
    return {"glulam": __version__, DSL: installed if installed in tested else tested[0]}


def runtime_stub(machine: Host) -> Path:
    """Return the DSL's library that stands in for its run-time library when linking for another machine.

    Raises:
        ToolchainError: the DSL has no such library.
    """
    stub = runtime_library().parent / "stubs" / machine.triple / "libcute_dsl_runtime.so"
    if not stub.is_file():
        raise ToolchainError(f"{DSL} has nothing to link with for {machine.machine}; {INSTALL_COMPILER}")
    return stub


def c_compiler(machine: Host | None = None) -> list[str]:
    """Return the command of the C compiler as an argument list: $CC if set, otherwise a usual name.

    The usual name is `cc`; for another machine it is that machine's cross compiler.

    Args:
        machine: the machine that the code is for. None: this one.

    Raises:
        ToolchainError: there is no such program, or $CC is not a command.
    """
    is_other = machine is not None and machine != here()
    usual = machine.compiler if machine is not None and is_other else "cc"
    chosen = os.environ.get("CC", "")
    try:
        command = shlex.split(chosen) or [usual]
    except ValueError as error:
        message = f"CC is {chosen!r}, which is no command ({error}); set CC to one such as gcc, or unset it"
        raise ToolchainError(message) from error
    if shutil.which(command[0]) is None:
        kind = f"no C compiler for {machine.machine}" if machine is not None and is_other else "no C compiler"
        install = f"{usual} (Debian, Ubuntu: gcc-{usual.removesuffix('-gcc')})" if is_other else "gcc or clang"
        raise ToolchainError(f"{kind}: {command[0]!r} is not on PATH; install {install}, or set CC")
    return command


def binary_tool(name: str, machine: Host | None = None) -> str:
    """Return the path of a program of binutils (`nm` or `objdump`) that belongs to the C compiler for a machine.

    Args:
        name: the program.
        machine: the machine that the code is for. None: this one.

    Raises:
        ToolchainError: there is no such program, or no C compiler.
    """
    asked = subprocess.run([*c_compiler(machine), f"-print-prog-name={name}"], capture_output=True, text=True)
    found = shutil.which(asked.stdout.strip() or name)
    if found is None:
        raise ToolchainError(f"no {name}, which reads what was linked; install binutils, or set CC")
    return found


def _assigned_version(file: Path) -> str | None:
    """Return the `__version__` that a Python file assigns, without running the file; None if it assigns none."""
    try:
        tree = parse(file.read_text())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
    constants = [n for n in tree.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant)]
    for node in constants:
        if any(isinstance(target, ast.Name) and target.id == "__version__" for target in node.targets):
            return str(ast.literal_eval(node.value))
    return None


def _installed_version(wheels: tuple[str, ...], sources: list[Path]) -> str | None:
    """Return a package's version: the first that one of `wheels` declares, or else the first that `sources` assign.

    Args:
        wheels: distribution names.
        sources: Python files that assign `__version__`, for a package that is a folder on sys.path.
    """
    for wheel in wheels:
        try:
            return importlib.metadata.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            continue
    return next((version for source in sources if (version := _assigned_version(source))), None)


@functools.cache
def versions() -> dict[str, str | None]:
    """Return the installed versions of Glulam, the DSL and TVM-FFI by distribution name; None: absent or unknown."""
    cutlass = [f / "dsl_packages" / "cutlass" / "__init__.py" for f in package_folders("nvidia_cutlass_dsl")]
    tvm_ffi = [f / "_version.py" for f in package_folders("tvm_ffi")]
    return {
        "glulam": __version__,
        DSL: _installed_version(_DSL_WHEELS, cutlass),
        TVM_FFI: _installed_version((TVM_FFI,), tvm_ffi),
    }


class Source(NamedTuple):
    """A Python file as it was listed.

    Attributes:
        name: path within the package.
        path: path on disk.
        mtime_ns, size: time of the last write and bytes, which tell whether the file was written since.
    """

    name: str
    path: str
    mtime_ns: int
    size: int


def _sources_in(folder: str, prefix: str = "") -> Iterator[Source]:
    """Yield every Python file below a folder, with names that begin with `prefix`.

    Paths are strings, not Path objects: this is most of the time that finding a cached kernel takes.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                found = entry.stat()
                yield Source(prefix + entry.name, entry.path, found.st_mtime_ns, found.st_size)
            elif entry.is_dir() and entry.name != "__pycache__":
                yield from _sources_in(entry.path, f"{prefix}{entry.name}/")


def sources_of(package: str) -> list[Source]:
    """Return every Python file of a top-level package or module, sorted. Raises ToolchainError if there is none."""
    if folders := package_folders(package):
        return sorted(source for folder in folders for source in _sources_in(str(folder)))
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ToolchainError(f"the kernels' sources are missing: no package {package!r} in {sys.prefix}")
    written = os.stat(found.origin)
    return [Source(os.path.basename(found.origin), found.origin, written.st_mtime_ns, written.st_size)]


_hashes: dict[str, tuple[list[Source], str]] = {}


def sources_hash(package: str) -> str:
    """Return the sha256 over the names and contents of a package's Python files; their folder does not matter.

    Files are read again only if a file was added, removed or written since this process last called.

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
