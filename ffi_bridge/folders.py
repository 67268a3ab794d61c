"""Make, open and fill folders safely where other users may write, too.

No other user can exchange an opened folder for another folder or a link, or write into a folder made here.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
MODE = 0o755
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def make(folder: Path) -> None:
    """Make a folder and its missing parents. Other users cannot write into new folders, whatever the umask is."""
    try:
        os.mkdir(folder, MODE)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        make(folder.parent)
        with contextlib.suppress(FileExistsError):  # another process may have been faster
            os.mkdir(folder, MODE)
    except OSError:  # not FileExistsError alone: a file system that cannot be written names that first
        if not folder.is_dir():
            raise


def only_ours(folder: Path) -> bool:
    """Return True if only this user and root can rename or replace entries of `folder` and of its parents.

    Args:
        folder: an absolute path without symbolic links.
    """
    for path in (folder, *folder.parents):
        found = path.lstat()
        is_shared = found.st_mode & OTHERS_WRITE and not found.st_mode & stat.S_ISVTX
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.geteuid(), 0) or is_shared:
            return False
    return True


@contextlib.contextmanager
def opened(folder: Path | str, at: int | None = None) -> Iterator[int]:
    """Open a folder and yield its descriptor.

    Args:
        folder: a path; with `at`, the name of a folder in the open folder `at`.
        at: descriptor of an open folder. None: `folder` is a path, and links are followed.

    Raises:
        OSError: the folder cannot be opened, or `at` is given and `folder` is a link.
    """
    handle = os.open(folder, _FLAGS if at is None else _FLAGS | os.O_NOFOLLOW, dir_fd=at)
    try:
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def made(name: str, at: int, mode: int = MODE) -> Iterator[int]:
    """Make a folder in the open folder `at` and yield the new folder's descriptor.

    Args:
        name: name of the new folder.
        at: descriptor of the open folder.
        mode: mode of the new folder, whatever the umask is.

    Raises:
        PermissionError: another user replaced the new folder, or the file system does not keep owners.
        OSError: the folder cannot be made, for example because it exists.
    """
    os.mkdir(name, mode & MODE, dir_fd=at)
    with opened(name, at) as handle:
        found = os.fstat(handle)
        if found.st_uid != os.geteuid() or found.st_mode & OTHERS_WRITE or os.listdir(handle):
            raise PermissionError(f"the new folder {name} was exchanged by another user, or its owner is not kept")
        os.fchmod(handle, mode)
        yield handle


def write(name: str, at: int, content: bytes) -> None:
    """Write a new file in the open folder `at`: all users can read it, its owner can write it. Raises OSError."""
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=at)
    with open(handle, "wb") as file:
        file.write(content)
        os.fchmod(handle, 0o644)


def empty(at: int) -> None:
    """Remove all entries of the open folder `at`; links are removed, never followed. Raises OSError."""
    for name in os.listdir(at):
        try:
            os.unlink(name, dir_fd=at)
        except IsADirectoryError:
            with opened(name, at) as inner:
                empty(inner)
            os.rmdir(name, dir_fd=at)
