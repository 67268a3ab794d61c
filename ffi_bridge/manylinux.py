"""The manylinux tag for wheels with compiled libraries.

The tag names the oldest glibc with which the libraries, and the wheels that they need, run.
"""

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

_OLDEST: Glibc = (2, 17)  # oldest glibc whose tag every pip in use knows
_ALIASES: dict[str, Glibc] = {"1": (2, 5), "2010": (2, 12), "2014": (2, 17)}
_GLIBC = ("libc.so", "libm.so", "libdl.so", "libpthread.so", "librt.so", "ld-linux")


def _described(library: Path) -> str:
    """Return the headers of a library as `objdump -p` prints them. Raises ToolchainError if objdump fails."""
    command = [toolchain.binary_tool("objdump"), "-p", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    if done.returncode:
        raise ToolchainError(f"objdump reads no {library.name}: {done.stderr.strip()}")
    return done.stdout


def needed_glibc(described: str) -> Glibc:
    """Return the newest glibc version that a library's symbols need; (0, 0) if they need none.

    Args:
        described: the library's headers, as `objdump -p` prints them.

    Raises:
        ToolchainError: symbols need versions of something other than glibc.
    """
    wanted = set(re.findall(r"^ +0x\w+ 0x\w+ \d+ (\S+)$", described, re.MULTILINE))
    versions = {name: re.fullmatch(r"GLIBC_(\d+)\.(\d+)(\.\d+)?", name) for name in wanted}
    if strange := sorted(name for name, version in versions.items() if not version):
        raise ToolchainError(f"its symbols ask for {', '.join(strange)}, not for versions of glibc alone")
    return max(((int(v[1]), int(v[2])) for v in versions.values() if v), default=(0, 0))


def needed_libraries(described: str) -> list[str]:
    """Return the libraries, other than glibc's, that a library needs. `described`: its headers from `objdump -p`."""
    needed = re.findall(r"^ +NEEDED +(\S+)$", described, re.MULTILINE)
    return [name for name in needed if not name.startswith(_GLIBC)]


def oldest_tag(wheel: str) -> Glibc:
    """Return the lowest glibc version of a wheel's manylinux tags. `wheel`: the text of its WHEEL file.

    Raises:
        ToolchainError: the wheel has no manylinux tag.
    """
    tags = [(int(a), int(b)) for a, b in re.findall(r"^Tag: .*manylinux_(\d+)_(\d+)_", wheel, re.MULTILINE)]
    tags += [_ALIASES[year] for year in re.findall(r"^Tag: .*manylinux(1|2010|2014)_", wheel, re.MULTILINE)]
    if not tags:
        raise ToolchainError("a library that it needs comes in a wheel without a manylinux tag")
    return min(tags)


def _wheel_of(library: Path) -> str:
    """Return the text of the WHEEL file of the installed distribution that contains `library`.

    Raises:
        ToolchainError: no installed distribution contains it.
    """
    for distribution in importlib.metadata.distributions():
        for file in distribution.files or ():
            if file.name == library.name and Path(str(distribution.locate_file(file))).resolve() == library.resolve():
                return distribution.read_text("WHEEL") or ""
    raise ToolchainError(f"{library} comes from no installed wheel")


def _glibc_for(libraries: Sequence[Path]) -> Glibc:
    """Return the oldest glibc with which all libraries, and the wheels that they need, run; at least 2.17.

    Raises:
        ToolchainError: it cannot be determined.
    """
    installed = {path.name: path for path in (toolchain.runtime_library(), toolchain.tvm_ffi_library())}
    described = [_described(library) for library in libraries]
    others = {name for text in described for name in needed_libraries(text)}
    if unknown := sorted(others - installed.keys()):
        raise ToolchainError(f"no wheel that it depends on brings {', '.join(unknown)}")
    own = (needed_glibc(text) for text in described)
    return max(_OLDEST, *own, *(oldest_tag(_wheel_of(installed[name])) for name in others))


def tag(libraries: Sequence[Path], machine: str) -> str:
    """Return the platform tag of a wheel with `libraries`, for example "manylinux_2_28_x86_64".

    The wheels that the libraries need are examined as they are installed here. Their builds for `machine` are assumed
    to need the same glibc.

    Args:
        libraries: the wheel's shared libraries.
        machine: the kind of machine, for example "x86_64".

    Raises:
        ToolchainError: the tag cannot be determined; the message says why.
    """
    major, minor = _glibc_for(libraries)
    return f"manylinux_{major}_{minor}_{machine}"
