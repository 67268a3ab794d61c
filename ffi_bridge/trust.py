"""Whose files are loaded. A library runs as its caller, so no other user may have written it, or put it where it is."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from . import folders, toolchain
from .errors import BundleForeign, remedy
from .folders import OTHERS_WRITE


@dataclasses.dataclass(frozen=True)
class Trust:
    """What is asked of a bundle's folders and files.

    Attributes:
        owners: user ids that may own them; None: anybody.
        shared: write bits of the group and of others that are let pass.
        follows: whether the names below the bundle's root may be symbolic links.
    """

    owners: frozenset[int] | None
    shared: int = 0
    follows: bool = False

    def check(self, path: Path, found: os.stat_result) -> None:
        """Raises BundleForeign where another user owns `path`, whose status is `found`, or may write it."""
        if self.owners is not None and found.st_uid not in self.owners:
            raise BundleForeign(
                f"foreign bundle: {path} belongs to uid {found.st_uid}, neither to this user (uid {os.geteuid()}) "
                f"nor to root; {remedy(path)} as this user"
            )
        if found.st_mode & OTHERS_WRITE & ~self.shared:
            raise BundleForeign(
                f"foreign bundle: others can write {path} (mode {stat.S_IMODE(found.st_mode):04o}); "
                f"run `chmod go-w` on it if all in it is yours, else {remedy(path)} into another folder"
            )

    @contextlib.contextmanager
    def opened(self, path: Path, at: int | None = None, *, folder: bool = False) -> Iterator[int]:
        """A descriptor of a checked file or folder; with `at`, of the last part of `path` in that open folder.

        Raises:
            BundleForeign: another user owns it or may write it.
            OSError: it cannot be opened, is a symbolic link, or is no regular file (no folder).
        """
        kind = os.O_DIRECTORY if folder else os.O_NONBLOCK  # the latter: a FIFO has no writer to wait for
        links = 0 if at is None or self.follows else os.O_NOFOLLOW
        handle = os.open(path if at is None else path.name, os.O_RDONLY | os.O_CLOEXEC | kind | links, dir_fd=at)
        try:
            found = os.fstat(handle)
            if not folder and not stat.S_ISREG(found.st_mode):
                raise OSError(f"{path.name} is no regular file")
            self.check(path, found)
            yield handle
        finally:
            os.close(handle)


def ours() -> Trust:
    """Ask that this user or root owns the files, and that nobody else can write them."""
    return Trust(frozenset((os.geteuid(), 0)))


def of(root: Path) -> Trust:
    """What is asked of the bundle in `root`: this user's or root's, written by nobody else.

    The bundle inside the installed package is as good as the Python files beside it, which run already: whoever
    owns the package's folder may own it, and it may be as writable.
    """
    for package in toolchain.package_folders("glulam"):
        if os.path.realpath(root) == os.path.realpath(package / "_bundle"):
            beside = package.stat()
            return Trust(frozenset((os.geteuid(), 0, beside.st_uid)), beside.st_mode & OTHERS_WRITE, follows=True)
    return ours()


def anybodys(root: Path) -> Trust:
    """Ask nothing about owners: for files below `root` that are described to the user, and never loaded."""
    return dataclasses.replace(of(root), owners=None, shared=OTHERS_WRITE)


@contextlib.contextmanager
def inside(root: Path, *names: str, make: bool = False) -> Iterator[int]:
    """Give a descriptor of `root`/<names>: folders of `ours`, each opened in the one above, and none of them a link.

    Args:
        root: may be shared, and may be a link.
        make: make the folders that are missing.

    Raises:
        BundleForeign: another user owns one of the folders below the root, or may write it.
        OSError: a folder is missing, is a link, or cannot be opened or made.
    """
    with contextlib.ExitStack() as stack:
        at = stack.enter_context(folders.opened(root))
        for name in names:
            root /= name
            if make:
                with contextlib.suppress(FileExistsError), folders.made(name, at):
                    pass
            at = stack.enter_context(ours().opened(root, at, folder=True))
        yield at


@contextlib.contextmanager
def opened(file: Path, asked: Trust | None = None) -> Iterator[int]:
    """A descriptor of <root>/<arch>/<name>, each of the three checked and opened inside the one before.

    `asked`: default, what `of` the root asks. Raises as `Trust.opened`.
    """
    folder = file.parent
    trust = asked or of(folder.parent)
    with (
        trust.opened(folder.parent, folder=True) as root,
        trust.opened(folder, root, folder=True) as inner,
        trust.opened(file, inner) as handle,
    ):
        yield handle
