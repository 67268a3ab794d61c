"""Cache of parsed and translated kernels, since both steps take longer than running a small problem.

A file holds the programs of one PTX text. Its name depends on the text and on the translator's sources. It is a pickle,
so it is read only from a folder that no other user can write.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import pickle
import shutil
import sys
import time
import zlib
from pathlib import Path
from typing import NamedTuple

from ffi_bridge import folders
from ffi_bridge.scratch import private_scratch

from . import ptx, translate

WRITING = "writing-"
UNUSED_S = 3 * 86400.0
"""Seconds without use after which translations made by other translator sources are removed."""


class Program(NamedTuple):
    """A parsed kernel and its translation."""

    kernel: ptx.Kernel
    translation: translate.Translation


TRANSLATOR = ("ptx.py", "instructions.py", "translate.py", "emitter.py", "float_registers.py", "formats.py", "lanes.py",
              "members.py", "parameters.py", "faults.py", "engines/__init__.py", "forms/*.py")  # fmt: skip
"""Source files that translation imports.

A change to any other file, such as the machine, its engines or the race check, keeps the cached programs.
"""


def sources() -> list[Path]:
    """Return the translator's source files (TRANSLATOR)."""
    return sorted(file for pattern in TRANSLATOR for file in Path(__file__).parent.glob(pattern))


@functools.cache
def _translator() -> str:
    """Return a hash of the Python version and the translator's sources."""
    found = hashlib.sha256(sys.version.encode())
    for file in sources():
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


def of(text: str, root: Path) -> dict[str, Program]:
    """Return the programs of a PTX text's kernels, by name. `root`: the cache's folder."""
    folder = root / _translator()
    folders.make(folder)
    if not folders.only_ours(folder.resolve()):
        return _made(text)
    file = folder / hashlib.sha256(text.encode()).hexdigest()
    if file.exists():
        return _loaded(file.read_bytes())
    found = _made(text)
    with private_scratch(folder, WRITING) as work:
        written = work / file.name
        written.write_bytes(zlib.compress(pickle.dumps(found, pickle.HIGHEST_PROTOCOL), 1))
        written.replace(file)
    return found


def trim(root: Path) -> None:
    """Remove programs made by translator sources that are no longer in use."""
    for folder in root.iterdir() if root.exists() else ():
        if folder.name != _translator() and folder.stat().st_mtime < time.time() - UNUSED_S:
            shutil.rmtree(folder, ignore_errors=True)


def _made(text: str) -> dict[str, Program]:
    return {kernel.name: Program(kernel, translate.translate(kernel)) for kernel in ptx.parse(text)}


def _loaded(content: bytes) -> dict[str, Program]:
    collects = gc.isenabled()
    gc.disable()  # it would look at each of a hundred thousand new objects again and again
    try:
        return pickle.loads(zlib.decompress(content))
    finally:
        if collects:
            gc.enable()
