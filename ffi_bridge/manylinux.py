"""The manylinux tag that libraries deserve: the oldest glibc that they, and the wheels they need, run with."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from . import toolchain
from .errors import ToolchainError

Glibc = tuple[int, int]

_OLDEST: Glibc = (2, 17)  # of the tags that every pip in use knows
_ALIASES: dict[str, Glibc] = {"1": (2, 5), "2010": (2, 12), "2014": (2, 17)}
_GLIBC = ("libc.so", "libm.so", "libdl.so", "libpthread.so", "librt.so", "ld-linux")


def _described(library: Path) -> str:
    """What a library needs, as objdump tells it. Raises ToolchainError."""
    command = [toolchain.binary_tool("objdump"), "-p", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    if done.returncode:
        raise ToolchainError(f"objdump reads no {library.name}: {done.stderr.strip()}")
    return done.stdout


def needed_glibc(described: str) -> Glibc:
    """The newest glibc version that a symbol asks for, (0, 0) where none does. Raises ToolchainError."""
    wanted = set(re.findall(r"^ +0x\w+ 0x\w+ \d+ (\S+)$", described, re.MULTILINE))
    versions = {name: re.fullmatch(r"GLIBC_(\d+)\.(\d+)(\.\d+)?", name) for name in wanted}
    if strange := sorted(name for name, version in versions.items() if not version):
        raise ToolchainError(f"its symbols ask for {', '.join(strange)}, not for versions of glibc alone")
    return max(((int(v[1]), int(v[2])) for v in versions.values() if v), default=(0, 0))


def needed_libraries(described: str) -> list[str]:
    """The libraries that it needs beside glibc's."""
    needed = re.findall(r"^ +NEEDED +(\S+)$", described, re.MULTILINE)
    return [name for name in needed if not name.startswith(_GLIBC)]


def oldest_tag(wheel: str) -> Glibc:
    """The lowest of a wheel's manylinux tags, given its WHEEL file. Raises ToolchainError where it has none."""
    tags = [(int(a), int(b)) for a, b in re.findall(r"^Tag: .*manylinux_(\d+)_(\d+)_", wheel, re.MULTILINE)]
    tags += [_ALIASES[year] for year in re.findall(r"^Tag: .*manylinux(1|2010|2014)_", wheel, re.MULTILINE)]
    if not tags:
        raise ToolchainError("a library that it needs comes in a wheel without a manylinux tag")
    return min(tags)


def _wheel_of(library: Path) -> str:
    """The WHEEL file of the installed distribution that `library` belongs to. Raises ToolchainError."""
    for distribution in importlib.metadata.distributions():
        for file in distribution.files or ():
            if file.name == library.name and Path(str(distribution.locate_file(file))).resolve() == library.resolve():
                return distribution.read_text("WHEEL") or ""
    raise ToolchainError(f"{library} comes from no installed wheel")


def _glibc_for(libraries: Sequence[Path]) -> Glibc:
    installed = {path.name: path for path in (toolchain.runtime_library(), toolchain.tvm_ffi_library())}
    described = [_described(library) for library in libraries]
    others = {name for text in described for name in needed_libraries(text)}
    if unknown := sorted(others - installed.keys()):
        raise ToolchainError(f"no wheel that it depends on brings {', '.join(unknown)}")
    own = (needed_glibc(text) for text in described)
    return max(_OLDEST, *own, *(oldest_tag(_wheel_of(installed[name])) for name in others))


def tag(libraries: Sequence[Path], machine: str) -> str:
    """The tag of a wheel with `libraries`, as manylinux_2_28_x86_64.

    A wheel that it needs is taken to have the same oldest glibc for every machine: the one installed here tells.

    Raises:
        ToolchainError: it cannot be told; the message says why.
    """
    major, minor = _glibc_for(libraries)
    return f"manylinux_{major}_{minor}_{machine}"
