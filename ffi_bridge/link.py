"""Objects to one shared library, reproducibly."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from . import toolchain
from .errors import CompileError

# No build id, no symbols but the exported ones: nothing of the machine or of the build's folders stays in the
# library. `-z defs` finds a symbol that neither run-time library has here rather than in a user's first call.
_FLAGS = ("-shared", "-Wl,--build-id=none", "-Wl,--strip-all", "-Wl,--hash-style=gnu", "-Wl,-z,defs", "-Wl,-z,now")


def _quoted(path: Path) -> bytes:
    """A path as a response file has it: a backslash takes the meaning from what follows it."""
    return b'"' + re.sub(rb'[\\"]', rb"\\\g<0>", os.fsencode(path)) + b'"'


def link(objects: Iterable[Path], library: Path) -> None:
    """Links `objects`, in the order of their names, into `library` with the system's C compiler.

    The DSL's and TVM-FFI's libraries are needed by name only (their sonames, no run path).

    Raises:
        CompileError: the linker failed; the message carries what it said.
        ToolchainError: there is no C compiler, or one of the two libraries is not installed.
    """
    ordered = sorted(objects, key=lambda path: path.name)
    arguments = library.with_suffix(".rsp")  # thousands of objects outgrow a command line
    arguments.write_bytes(b"".join(_quoted(path) + b"\n" for path in ordered))
    libraries = [str(toolchain.runtime_library()), str(toolchain.tvm_ffi_library())]
    command = [*toolchain.c_compiler(), *_FLAGS, "-o", str(library), f"@{arguments}", *libraries]
    environment = {**os.environ, "LC_ALL": "C", "TMPDIR": str(library.parent)}
    done = subprocess.run(command, capture_output=True, text=True, errors="backslashreplace", env=environment)
    arguments.unlink()
    if done.returncode:
        raise CompileError(f"linking {library.name} failed:\n{done.stderr.strip()}")
