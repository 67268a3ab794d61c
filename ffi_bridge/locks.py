"""Locks between processes, on files that another user may have put there."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from .folders import OTHERS_WRITE


@contextlib.contextmanager
def locked(path: Path, timeout: float = -1) -> Iterator[None]:
    """Let one process at a time go on for the lock file `path`; a process that dies lets go.

    The file stays: a process that waits holds it open already, and would lock another file than one that comes later.

    Raises:
        filelock.Timeout: after `timeout` seconds; negative: never.
        OSError: the file cannot be opened, is a link, or is not empty: filelock empties the file that it locks.
    """
    import filelock

    _make(path)
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        raise PermissionError(f"{path} is no plain file; remove it")
    if found.st_size:
        raise PermissionError(f"{path} is no lock file, it has content; move it elsewhere")
    with filelock.FileLock(path).acquire(timeout=timeout):
        yield


def _make(path: Path) -> None:
    """Make a missing lock file. Whatever the umask, others can write the file only if they can write its folder."""
    mode = 0o644 | path.parent.stat().st_mode & OTHERS_WRITE
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode))
