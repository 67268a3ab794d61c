"""Folders that work in progress lies in, what is left of them where a process was killed, and disks that are full."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from . import folders
from .errors import CompileError

MARKER = ".glulam-scratch"
"""An empty file in each of these folders; a folder without it is somebody else's."""
ABANDONED_S = 3600.0
"""Nothing is written for this long by a process that lives: compiling one kernel takes seconds."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_PROBE_BYTES = 1 << 20


@contextlib.contextmanager
def scratch(root: Path, prefix: str) -> Iterator[Path]:
    """A new folder of `root` that only this user can enter, removed at the end."""
    folder = Path(tempfile.mkdtemp(dir=root, prefix=prefix))
    try:
        (folder / MARKER).touch()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def private_scratch(root: Path, prefix: str) -> Iterator[Path]:
    """A `scratch` folder that no other user can exchange for another.

    It lies in `root`, or in the folder for temporary files if others may rename what lies in `root`.
    """
    place = Path(os.path.realpath(root))
    if not folders.only_ours(place):
        place = _place_for_temporary_files()
        sweep(place, prefix)
    with scratch(place, prefix) as folder:
        yield folder


def _place_for_temporary_files() -> Path:
    """The first place that others cannot exchange, else the first: in a user namespace "/" may have no known owner."""
    places = [Path(os.path.realpath(place)) for place in (tempfile.gettempdir(), "/tmp", "/var/tmp")]
    return next((place for place in places if place.is_dir() and folders.only_ours(place)), places[0])


def install(made: Path, target: Path, prefix: str) -> None:
    """Move `made`, a folder of folders of files in a `private_scratch` of the target's folder, to `target`.

    If others may rename what lies in the target's folder, `made` is copied to it: each name is made inside the open
    folder above it, so that all that is written lies in folders of this user's. Raises OSError.
    """
    root = Path(os.path.realpath(target.parent))
    if made.parent.parent == root:
        made.rename(root / target.name)
        return
    name = f"{prefix}{secrets.token_hex(8)}"
    with folders.opened(root) as at:
        try:
            with folders.made(name, at, 0o700) as work:
                try:
                    folders.write(MARKER, work, b"")
                    _copy(made, made.name, work)
                    os.rename(made.name, target.name, src_dir_fd=work, dst_dir_fd=at)
                finally:
                    folders.empty(work)
        finally:
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=at)


def _copy(source: Path, name: str, at: int) -> None:
    with folders.made(name, at) as inner:
        for path in source.iterdir():
            if path.is_dir():
                _copy(path, path.name, inner)
            else:
                folders.write(path.name, inner, path.read_bytes())


def _is_ours(folder: Path) -> bool:
    found = folder.lstat()
    made_here = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return made_here and stat.S_ISREG((folder / MARKER).lstat().st_mode)


def _last_written(folder: Path) -> float:
    """When an entry of the folder, or of a folder in it, was last made, renamed or removed."""
    inner = [path.lstat().st_mtime for path in folder.iterdir() if path.is_dir()]
    return max(folder.stat().st_mtime, *inner, 0.0)


def sweep(root: Path, prefix: str) -> None:
    """Removes this user's `scratch` folders of `root` that killed processes left. Others may be in use: old ones go."""
    for folder in root.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if _is_ours(folder) and time.time() - _last_written(folder) > ABANDONED_S:
                shutil.rmtree(folder)


@contextlib.contextmanager
def full_disk_told(folder: Path, remedy: str) -> Iterator[None]:
    """Turns whatever a full disk makes of work in `folder` into one OSError (ENOSPC) that names folder and remedy."""
    try:
        yield
    except (OSError, CompileError) as error:
        if not _is_full(folder, error):
            raise
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}; {remedy}", str(folder)) from error


def _is_full(folder: Path, error: Exception) -> bool:
    """Compiler and linker report a full disk in their own words, or in none and have removed what did not fit."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    if any(os.strerror(code) in str(error) for code in _FULL):
        return True
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\0" * _PROBE_BYTES)
    except OSError as refused:
        return refused.errno in _FULL
    return False
