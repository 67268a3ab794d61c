"""Owners and permissions that a bundle's files must have.

A library runs with its caller's rights, so no other user may have written the library or put it in its place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from . import folders, toolchain
from .errors import PACKAGED, BundleForeign, remedy
from .folders import OTHERS_WRITE


@dataclasses.dataclass(frozen=True)
class Trust:
    """Requirements on a bundle's folders and files.

    Attributes:
        owners: user ids that may own the folders and files. None: any owner.
        shared: write bits of group and others that are allowed.
        follows: True: names below the bundle's root may be symbolic links.
    """

    owners: frozenset[int] | None
    shared: int = 0
    follows: bool = False

    def check(self, path: Path, found: os.stat_result) -> None:
        """Raise BundleForeign if `found`, the status of `path`, shows that another user owns it or may write it."""
        if self.owners is not None and found.st_uid not in self.owners:
            raise BundleForeign(
                f"foreign bundle: {path} belongs to uid {found.st_uid}, neither to this user (uid {os.geteuid()}) "
                f"nor to root; {remedy(path)} as this user"
            )
        if found.st_mode & OTHERS_WRITE & ~self.shared:
            raise BundleForeign(
                f"foreign bundle: others can write {path} (mode {stat.S_IMODE(found.st_mode):04o}); "
                f"run `chmod go-w` on it if all in it is yours, else {remedy(path, elsewhere=True)} into another folder"
            )

    @contextlib.contextmanager
    def opened(self, path: Path, at: int | None = None, *, folder: bool = False) -> Iterator[int]:
        """Open a file or folder, check it, and yield its descriptor.

        Args:
            path: the file or folder.
            at: descriptor of the open folder in which the last part of `path` is opened. None: open the whole path.
            folder: True for a folder, False for a regular file.

        Raises:
            BundleForeign: another user owns the file or folder, or may write it.
            OSError: it cannot be opened, is not of the kind that `folder` says, or is a symbolic link in `at` that must
                not be followed.
        """
        kind = os.O_DIRECTORY if folder else os.O_NONBLOCK  # O_NONBLOCK: opening a FIFO would wait for a writer
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
    """Return the requirement that this user or root owns the files and nobody else can write them."""
    return Trust(frozenset((os.geteuid(), 0)))


def of(root: Path) -> Trust:
    """Return the requirements on the bundle in `root`: owned by this user or root, and writable by nobody else.

    The bundle inside the installed package needs no more trust than the package's Python files, which run already: its
    owner may also be the owner of the package's folder, and it may have the same write bits as that folder.
    """
    for package in toolchain.package_folders("glulam"):
        if os.path.realpath(root) == os.path.realpath(package / PACKAGED):
            beside = package.stat()
            return Trust(frozenset((os.geteuid(), 0, beside.st_uid)), beside.st_mode & OTHERS_WRITE, follows=True)
    return ours()


def anybodys(root: Path) -> Trust:
    """Return requirements that allow any owner and any writer, for files below `root` that are shown, never loaded."""
    return dataclasses.replace(of(root), owners=None, shared=OTHERS_WRITE)


@contextlib.contextmanager
def inside(root: Path, *names: str, make: bool = False) -> Iterator[int]:
    """Open the folder `root`/<names[0]>/<names[1]>/... and yield its descriptor.

    Each folder below `root` is opened inside its parent, must not be a link, and must meet the requirements of `ours`.

    Args:
        root: a folder that may be shared, and may be a link.
        names: folders below `root`, one inside the other.
        make: True: make the folders that are missing.

    Raises:
        BundleForeign: another user owns one of the folders below the root, or may write it.
        OSError: a folder is missing, is a link (except `root`), or cannot be opened or made.
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
def opened(file: Path, required: Trust | None = None) -> Iterator[int]:
    """Yield a descriptor of the file <root>/<arch>/<name>, after checking the root, the folder and the file.

    Each is opened inside its parent, so none can be replaced after its check.

    Args:
        file: the path.
        required: the requirements. None: `of(root)`.

    Raises:
        BundleForeign: a folder or the file belongs to another user, or another user may write it.
        OSError: a folder or the file cannot be opened, or is a symbolic link that must not be followed.
    """
    folder = file.parent
    trust = required or of(folder.parent)
    with (
        trust.opened(folder.parent, folder=True) as root,
        trust.opened(folder, root, folder=True) as inner,
        trust.opened(file, inner) as handle,
    ):
        yield handle
