"""Link objects to one shared library, reproducibly, and list what the library needs from the machine that loads it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from . import host, toolchain
from .errors import CompileError

# No build id and only exported symbols: the library does not depend on the machine or on the build's folders.
# `-z defs` reports a symbol that neither run-time library has now, not in a user's first call.
_FLAGS = ("-shared", "-Wl,--build-id=none", "-Wl,--strip-all", "-Wl,--hash-style=gnu", "-Wl,-z,defs", "-Wl,-z,now")

_CHUNK = 1 << 20  # bytes of a listing that are searched at a time; that of the whole library has 100 MB


def _quoted(path: Path) -> bytes:
    """Return a path as a linker's response file has it: in quotes, with quotes and backslashes escaped."""
    return b'"' + re.sub(rb'[\\"]', rb"\\\g<0>", os.fsencode(path)) + b'"'


def link(objects: Iterable[Path], library: Path, machine: host.Host | None = None) -> dict[str, list[str]]:
    """Link object files, in the order of their names, into a shared library with the C compiler.

    The DSL's and TVM-FFI's run-time libraries are recorded by name only (soname, no run path).

    Args:
        objects: the object files.
        library: the path of the new library.
        machine: the CPUs that the code is for. None: this machine's.

    Returns:
        By distribution name (DSL and TVM-FFI), the symbols that the library needs from that run-time library.

    Raises:
        CompileError: the linker failed (the message has its output), or the code has instructions above the baseline.
        ToolchainError: a C compiler, binutils or a run-time library is missing.
    """
    ordered = sorted(objects, key=lambda path: path.name)
    arguments = library.with_suffix(".rsp")  # thousands of objects outgrow a command line
    arguments.write_bytes(b"".join(_quoted(path) + b"\n" for path in ordered))
    machine = machine or host.here()
    flags, theirs = _of_other_machine(machine, library.parent) if machine != host.here() else ([], _run_time())
    command = [*toolchain.c_compiler(machine), *_FLAGS, *flags, "-o", str(library), f"@{arguments}"]
    command += map(str, theirs.values())
    environment = {**os.environ, "LC_ALL": "C", "TMPDIR": str(library.parent)}
    done = subprocess.run(command, capture_output=True, text=True, errors="backslashreplace", env=environment)
    arguments.unlink()
    if done.returncode:
        raise CompileError(f"linking {library.name} failed:\n{done.stderr.strip()}")
    check_instructions(library, machine)
    return _needs(library, theirs, machine)


def _run_time() -> dict[str, Path]:
    """Return this machine's run-time libraries by distribution name. Raises ToolchainError if one is not installed."""
    return {toolchain.DSL: toolchain.runtime_library(), toolchain.TVM_FFI: toolchain.tvm_ffi_library()}


def _of_other_machine(machine: host.Host, folder: Path) -> tuple[list[str], dict[str, Path]]:
    """Return linker flags for another machine, and libraries that stand in for its run-time libraries.

    The DSL's wheel has such stub libraries. For TVM-FFI one is compiled in `folder`; it exports the same names as this
    machine's TVM-FFI library. The code generator also exports wrappers, which a version script (one of the flags)
    hides.

    Returns:
        The flags; the libraries by distribution name.

    Raises:
        CompileError: the stub library does not compile.
        ToolchainError: a tool or library is missing.
    """
    stub = folder / "libtvm_ffi.so"
    names = sorted(_symbols(toolchain.tvm_ffi_library(), "--defined-only", host.here()))
    text = "".join(f"void {name}(void) {{}}\n" for name in names if re.fullmatch(r"TVMFFI\w+", name))
    (folder / "tvm_ffi.c").write_text(text)
    (exported := folder / "exported.map").write_text("{ global: __tvm_ffi_*; local: *; };\n")
    command = [*toolchain.c_compiler(machine), "-shared", "-fPIC", "-nostdlib", f"-Wl,-soname,{stub.name}"]
    command += ["-o", str(stub), str(folder / "tvm_ffi.c")]
    done = subprocess.run(command, capture_output=True, text=True, errors="backslashreplace")
    if done.returncode:
        raise CompileError(f"linking {stub.name} for {machine.machine} failed:\n{done.stderr.strip()}")
    libraries = {toolchain.DSL: toolchain.runtime_stub(machine), toolchain.TVM_FFI: stub}
    return [f"-Wl,--version-script={exported}"], libraries


def check_instructions(library: Path, machine: host.Host | None = None) -> None:
    """Check that a library has only instructions of a machine's baseline, so that it also runs on the oldest CPU.

    Args:
        library: the library.
        machine: the kind of CPU. None: this machine's.

    Raises:
        CompileError: the library has an instruction of newer CPUs, which the message names, or cannot be disassembled.
    """
    machine = machine or host.here()
    command = [toolchain.binary_tool("objdump", machine), "--disassemble", "--wide", str(library)]
    listing, returns = b"", False  # returns: a `ret` was seen, which every library has, so objdump did disassemble
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout
        while lines := process.stdout.readlines(_CHUNK):
            listing = b"".join(lines)
            returns = returns or b"\tret" in listing
            if found := next(filter(None, (above.search(listing) for above in machine.above)), None):
                process.kill()
                instruction = " ".join(found[0].decode(errors="replace").split()).strip(": ")
                raise CompileError(f"{library.name} is not for every {machine.baseline} CPU: it has {instruction!r}")
    if process.returncode or not returns:
        said = listing.decode(errors="replace").strip()[-200:]
        raise CompileError(f"the instructions of {library.name} cannot be checked: {command[0]} says {said!r}")


def _symbols(library: Path, which: str, machine: host.Host) -> set[str]:
    """Return the names of a library's dynamic symbols. `which`: "--defined-only" or "--undefined-only"."""
    command = [toolchain.binary_tool("nm", machine), "--dynamic", "--format=posix", which, str(library)]
    listing = subprocess.run(command, capture_output=True, text=True, errors="backslashreplace")
    if listing.returncode:
        raise CompileError(f"the symbols of {library.name} cannot be read: {listing.stderr.strip()}")
    return {line.split()[0].partition("@")[0] for line in listing.stdout.splitlines() if line.strip()}


def _needs(library: Path, theirs: dict[str, Path], machine: host.Host) -> dict[str, list[str]]:
    """Return the names of the symbols that a linked library takes from each run-time library, by distribution name.

    Args:
        library: the linked library, in which these symbols are undefined.
        theirs: the run-time libraries, or stubs of them, by distribution name.
        machine: the kind of CPU that the libraries are for.
    """
    undefined = _symbols(library, "--undefined-only", machine)
    return {package: sorted(undefined & _symbols(path, "--defined-only", machine)) for package, path in theirs.items()}
