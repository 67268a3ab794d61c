"""Text that lies on every machine with Python: the sources of its standard library, as bytes."""

from __future__ import annotations

import os
import sysconfig
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# What is not the library itself, not installed everywhere, or a table of codes.
EXCLUDED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "encodings"}
)
HELD_OUT_SHARE = 16  # one file in so many is held out
FEWEST_BYTES = 2_000_000  # Python 3.10 to 3.14 have 8 to 10 million


class Text(NamedTuple):
    """Text to train on, and held-out text of other files, each uint8 [bytes]."""

    train: Tensor
    held_out: Tensor


def source_files(root: Path) -> list[Path]:
    """Return the library's .py files, in the order of their names."""
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in EXCLUDED]  # they hold most files: 0.3 s a look
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def is_held_out(path: Path, root: Path) -> bool:
    """Return whether a file is held out. Its name decides, so that the answer does not depend on which other files
    there are.
    """
    return zlib.crc32(path.relative_to(root).as_posix().encode()) % HELD_OUT_SHARE == 0


def read_text(root: Path | None = None) -> Text:
    """Return the sources under `root`, by default this Python's library; files one after another.

    Raises:
        RuntimeError: there is too little text to learn from.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for path in source_files(root):
        parts[is_held_out(path, root)].append(path.read_bytes())
    total = sum(map(len, parts[False] + parts[True]))
    if total < FEWEST_BYTES:
        raise RuntimeError(
            f"{root} holds {total} bytes of .py sources, and {FEWEST_BYTES} are needed; "
            "use a Python that is installed with the sources of its library"
        )
    train, held_out = (torch.frombuffer(bytearray(b"".join(parts[side])), dtype=torch.uint8) for side in (False, True))
    return Text(train, held_out)
