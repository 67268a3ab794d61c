"""File locks between processes, safe even if another user put a file or a link at the lock's path."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from .folders import OTHERS_WRITE


@contextlib.contextmanager
def locked(path: Path, timeout: float = -1) -> Iterator[None]:
    """Hold the lock file `path`, which one process at a time can hold; a process that dies releases it.

    The lock file is never removed: a waiting process has it open already, and would hold a different file than a
    process that comes later.

    Args:
        path: the lock file, made if missing.
        timeout: seconds to wait. Negative: no limit.

    Raises:
        filelock.Timeout: another process held the lock for `timeout` seconds.
        OSError: the file cannot be opened, is a link, or is not empty (filelock empties the file that it locks).
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
    """Make a missing lock file, whatever the umask is. Only users who can write the folder can write the file."""
    mode = 0o644 | path.parent.stat().st_mode & OTHERS_WRITE
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode))
