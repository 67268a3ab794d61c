"""Folders that work in progress lies in, and what is left of them where a process was killed."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

ABANDONED_S = 3600.0
"""Nothing is written for this long by a process that lives: compiling one kernel takes seconds."""


def _last_written(folder: Path) -> float:
    """When an entry of the folder, or of a folder in it, was last made, renamed or removed."""
    inner = [path.stat().st_mtime for path in folder.iterdir() if path.is_dir()]
    return max(folder.stat().st_mtime, *inner, 0.0)


def sweep(root: Path, *prefixes: str) -> None:
    """Removes folders of `root` with these prefixes that killed processes left. Others' may be in use: old ones go."""
    for prefix in prefixes:
        for folder in root.glob(f"{prefix}*"):
            with contextlib.suppress(OSError):
                if time.time() - _last_written(folder) > ABANDONED_S:
                    shutil.rmtree(folder)
