"""Temporary folders for work in progress, removal of folders that killed processes left, and errors of full disks."""

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
"""Name of an empty file in each scratch folder; a folder without the file was not made here and is never removed."""
ABANDONED_S = 3600.0
"""Seconds without a write after which a scratch folder counts as abandoned: compiling one kernel takes seconds."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_PROBE_BYTES = 1 << 20


@contextlib.contextmanager
def scratch(root: Path, prefix: str) -> Iterator[Path]:
    """Make a folder in `root` that only this user can enter, yield it, and remove it at the end.

    Args:
        root: an existing folder.
        prefix: the beginning of the new folder's name, by which `sweep` finds the folder if this process is killed.
    """
    folder = Path(tempfile.mkdtemp(dir=root, prefix=prefix))
    try:
        (folder / MARKER).touch()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def private_scratch(root: Path, prefix: str) -> Iterator[Path]:
    """Make a `scratch` folder that no other user can replace by another folder.

    The folder lies in `root`, or in the folder for temporary files if other users may rename entries of `root`.
    prefix: the beginning of the new folder's name, by which `sweep` finds the folder if this process is killed.
    """
    place = Path(os.path.realpath(root))
    if not folders.only_ours(place):
        place = _place_for_temporary_files()
        sweep(place, prefix)
    with scratch(place, prefix) as folder:
        yield folder


def _place_for_temporary_files() -> Path:
    """Return the first folder for temporary files that others cannot replace; if there is none, the first one.

    There is none in a user namespace where "/" may have no known owner.
    """
    places = [Path(os.path.realpath(place)) for place in (tempfile.gettempdir(), "/tmp", "/var/tmp")]
    return next((place for place in places if place.is_dir() and folders.only_ours(place)), places[0])


def install(made: Path, target: Path, prefix: str) -> None:
    """Move a finished folder to `target`, so that no other user can change its content.

    If other users may rename entries of the target's folder, the folder is copied instead of moved. Each file and
    folder is then made inside its opened parent, so that everything is written into folders of this user.

    Args:
        made: a folder of folders of files, in a `private_scratch` for the target's folder.
        target: the new path.
        prefix: the beginning of a temporary name in the target's folder, by which `sweep` finds it.

    Raises:
        OSError: `made` cannot be moved or copied.
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
    """Copy folder `source` to a new folder `name` in the open folder `at`."""
    with folders.made(name, at) as inner:
        for path in source.iterdir():
            if path.is_dir():
                _copy(path, path.name, inner)
            else:
                folders.write(path.name, inner, path.read_bytes())


def _is_ours(folder: Path) -> bool:
    """Return True if a folder is a scratch folder of this user. Raises OSError if it has no marker."""
    found = folder.lstat()
    made_here = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return made_here and stat.S_ISREG((folder / MARKER).lstat().st_mode)


def _last_written(folder: Path) -> float:
    """Return the time when an entry of the folder, or of a folder in it, was last made, renamed or removed."""
    inner = [path.lstat().st_mtime for path in folder.iterdir() if path.is_dir()]
    return max(folder.stat().st_mtime, *inner, 0.0)


def sweep(root: Path, prefix: str) -> None:
    """Remove this user's old `scratch` folders in `root` whose names begin with `prefix`, left by killed processes.

    New ones stay, since they may be in use.
    """
    for folder in root.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if _is_ours(folder) and time.time() - _last_written(folder) > ABANDONED_S:
                shutil.rmtree(folder)


@contextlib.contextmanager
def full_disk_told(folder: Path, remedy: str) -> Iterator[None]:
    """Turn any error of the block that a full disk caused into an OSError (ENOSPC) that names `folder` and the remedy.

    Args:
        folder: the folder in which the block writes.
        remedy: advice for the message.
    """
    try:
        yield
    except (OSError, CompileError) as error:
        if not _is_full(folder, error):
            raise
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}; {remedy}", str(folder)) from error


def _is_full(folder: Path, error: Exception) -> bool:
    """Return True if a full disk (or a full quota) caused `error`.

    An OSError has an error number for this. A CompileError may quote the system's text for it, but compiler and linker
    may also report it in other words, or not at all after they removed the file that did not fit. So without that text,
    True is returned if 1 MiB cannot be written to `folder`.
    """
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
