"""Where the tools are and which versions: the DSL's wheel, TVM-FFI, the C compiler. Imports none of them."""

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
from .errors import ToolchainError
from .host import Host, here

DSL = "nvidia-cutlass-dsl"
TVM_FFI = "apache-tvm-ffi"


class Range(NamedTuple):
    """Versions from `oldest` to before `below`, compared by the numbers they begin with."""

    oldest: str
    below: str

    def __contains__(self, version: object) -> bool:
        return _release(self.oldest) <= _release(str(version)) < _release(self.below)

    def __str__(self) -> str:
        return f">={self.oldest},<{self.below}"


# Which versions a bundle asks for. Equal: Glulam's, and its kernels' sources. Within a range: the two run-time
# libraries, whichever version it was built with; the oldest and the newest are tested, with others between them.
# Information only: the versions of the two that it was built with.
EQUAL = ("glulam",)
RUNS_WITH = {DSL: Range("4.7.1", "4.9"), TVM_FFI: Range("0.1.9", "0.2")}

# Compiling asks for one of these; the code depends on it. TVM-FFI's version does not change a byte of an object.
COMPILES_WITH = {DSL: ("4.8.1",)}

INSTALL = {
    DSL: f'run `pip install "{DSL}[cu13]{RUNS_WITH[DSL]}"`',
    TVM_FFI: f'run `pip install "{TVM_FFI}{RUNS_WITH[TVM_FFI]}"`',
}
INSTALL_COMPILER = f'run `pip install "{DSL}[cu13]=={COMPILES_WITH[DSL][0]}"`'

# The DSL comes as several wheels that share one version; a run-time install may hold the libraries' wheel alone.
_DSL_WHEELS = ("nvidia-cutlass-dsl-libs-cu13", DSL, "nvidia-cutlass-dsl-libs-base")


def _release(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: (0, 1, 15) of "0.1.15.post2"; empty where it begins with none."""
    numbers = re.match(r"\d{1,9}(\.\d{1,9})*", version, re.ASCII)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


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
        ToolchainError: the wheel is not installed, only its CUDA 12 half is, or its version is not of RUNS_WITH.
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
    """libtvm_ffi.so, which a bundle is linked against.

    Raises:
        ToolchainError: TVM-FFI is not installed, or its version is not of RUNS_WITH.
    """
    for folder in package_folders("tvm_ffi"):
        library = folder / "lib" / "libtvm_ffi.so"
        if library.is_file():
            _check_range(TVM_FFI)
            return library
    raise ToolchainError(f"{TVM_FFI} is not installed; {INSTALL[TVM_FFI]}")


def _check_range(package: str) -> None:
    """An unknown version (a package that is a bare folder) passes: the symbols decide."""
    version, wanted = versions()[package], RUNS_WITH[package]
    if version and version not in wanted:
        raise ToolchainError(f"{package} {version} is installed, Glulam runs with {wanted}; {INSTALL[package]}")


def tvm_ffi_headers() -> Path:
    """The folder of TVM-FFI's C headers. Raises ToolchainError where TVM-FFI is not installed, or without them."""
    for folder in package_folders("tvm_ffi"):
        if (folder / "include" / "tvm" / "ffi" / "c_api.h").is_file():
            return folder / "include"
    raise ToolchainError(f"{TVM_FFI} is not installed, or has no headers; {INSTALL[TVM_FFI]}")


def dsl_packages() -> Path:
    """The folder that holds `cutlass`.

    Raises:
        ToolchainError: the compiler's part of the DSL is missing, or its version is not of COMPILES_WITH.
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
    """The versions that compiled code depends on: what is kept of it, and what was measured, holds for these.

    Where the compiler here is none of COMPILES_WITH, it is their first: what that one compiled runs here, too.
    """
    tested, installed = COMPILES_WITH[DSL], versions()[DSL]
    return {"glulam": __version__, DSL: installed if installed in tested else tested[0]}


def runtime_stub(machine: Host) -> Path:
    """A library of the DSL's to link another machine's bundle with, in place of its own. Raises ToolchainError."""
    stub = runtime_library().parent / "stubs" / machine.triple / "libcute_dsl_runtime.so"
    if not stub.is_file():
        raise ToolchainError(f"{DSL} has nothing to link with for {machine.machine}; {INSTALL_COMPILER}")
    return stub


def c_compiler(machine: Host | None = None) -> list[str]:
    """A C compiler for a machine, by default this one, as an argument list: $CC where set, else what systems call it.

    Raises:
        ToolchainError: there is none.
    """
    is_other = machine is not None and machine != here()
    usual = machine.compiler if machine is not None and is_other else "cc"
    chosen = os.environ.get("CC", "")
    try:
        command = shlex.split(chosen) or [usual]
    except ValueError as error:
        told = f"CC is {chosen!r}, which is no command ({error}); set CC to one such as gcc, or unset it"
        raise ToolchainError(told) from error
    if shutil.which(command[0]) is None:
        kind = f"no C compiler for {machine.machine}" if machine is not None and is_other else "no C compiler"
        install = f"{usual} (Debian, Ubuntu: gcc-{usual.removesuffix('-gcc')})" if is_other else "gcc or clang"
        raise ToolchainError(f"{kind}: {command[0]!r} is not on PATH; install {install}, or set CC")
    return command


def binary_tool(name: str, machine: Host | None = None) -> str:
    """`nm` or `objdump` as the C compiler for a machine finds them: they come with its linker.

    Raises:
        ToolchainError: there is none.
    """
    asked = subprocess.run([*c_compiler(machine), f"-print-prog-name={name}"], capture_output=True, text=True)
    found = shutil.which(asked.stdout.strip() or name)
    if found is None:
        raise ToolchainError(f"no {name}, which reads what was linked; install binutils, or set CC")
    return found


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
    """The installed versions, by distribution name; None where a package is absent or does not say."""
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
