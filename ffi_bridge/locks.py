"""Locks between processes, on files that another user may have put there."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(path: Path, timeout: float = -1) -> Iterator[None]:
    """Let one process at a time go on for the lock file `path`; a process that dies lets go.

    The file stays: a process that waits holds it open already, and would lock another file than one that comes later.

    Raises:
        filelock.Timeout: after `timeout` seconds; negative: never.
        OSError: the file cannot be opened, is a link, or is not empty: filelock empties the file that it locks.
    """
    import filelock

    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise PermissionError(f"{path} is no plain file; remove it")
        if found.st_size:
            raise PermissionError(f"{path} is no lock file, it has content; move it elsewhere")
    with filelock.FileLock(path).acquire(timeout=timeout):
        yield
