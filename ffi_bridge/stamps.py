"""Stamps: files which say that this machine's user validated a bundle on a GPU of this machine.

    <cache root>/validated/<arch>/<64 digits>.stamp

The digits are a hash of the GPU's name and the library's hash, so a stamp holds for no other build. The stamp's text
also names the version of Glulam, since another version may validate the same library more strictly. A stamp counts if
its text is as expected, and if nobody except this user and root can write it or the two folders that contain it.
The cache's root may be shared: no link below the root is followed when a stamp is read or written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from . import cache, folders, trust
from ._version import __version__
from .errors import BundleError

FOLDER = "validated"


def _file(arch: str, gpu: str, library: str) -> Path:
    """Return the path of the stamp (the file which says that a library was validated on this machine's GPU).

    Args:
        arch: the library's architecture.
        gpu: the GPU's name.
        library: the library's sha256.
    """
    digits = hashlib.sha256(f"{gpu}\n{library}".encode()).hexdigest()
    return cache.cache_root() / FOLDER / arch / f"{digits}.stamp"


def _text(arch: str, gpu: str, library: str) -> bytes:
    """Return the expected content of the stamp for an architecture, a GPU's name and a library's sha256."""
    return f"`glulam validate` of {__version__} passed on a {gpu} with the {arch} library {library}.\n".encode()


def is_there(arch: str, gpu: str, library: str) -> bool:
    """Return True if a valid stamp says that `glulam validate` passed for a library on a GPU of this machine.

    Args:
        arch: the library's architecture.
        gpu: the GPU's name.
        library: the library's sha256, hexadecimal.
    """
    text = _text(arch, gpu, library)
    with (
        contextlib.suppress(BundleError, OSError),
        trust.inside(cache.cache_root(), FOLDER, arch) as at,
        trust.ours().opened(_file(arch, gpu, library), at) as handle,
    ):
        return os.pread(handle, len(text) + 1, 0) == text
    return False


def check_place(arch: str) -> None:
    """Make the folder of an architecture's stamps. Raises OSError if `leave` could not write a stamp there."""
    cache.make_root(cache.cache_root())
    with _place(arch) as at:
        name = _temporary()
        folders.write(name, at, b"")
        os.unlink(name, dir_fd=at)


@contextlib.contextmanager
def _place(arch: str) -> Iterator[int]:
    """Make the folder of an architecture's stamps and yield its descriptor. Raises PermissionError if it is unsafe."""
    with contextlib.ExitStack() as stack:
        try:
            at = stack.enter_context(trust.inside(cache.cache_root(), FOLDER, arch, make=True))
        except (BundleError, NotADirectoryError) as error:
            raise PermissionError(
                f"no stamp can be left in {cache.cache_root() / FOLDER / arch}: one of the last two folders is a link, "
                f"is another user's, or others can write it; remove it, or set {cache.ENV_CACHE} to another folder"
            ) from error
        yield at


def _temporary() -> str:
    return f".{secrets.token_hex(8)}.new"


def leave(arch: str, gpu: str, library: str) -> Path:
    """Write a stamp, readable by everybody whatever the umask is, and return its path.

    Args:
        arch, gpu, library: the validated architecture, GPU and library, as for `is_there`.

    Raises:
        OSError: the cache's folder cannot be written, or is not safe from other users.
    """
    file, name = _file(arch, gpu, library), _temporary()
    cache.make_root(cache.cache_root())
    with _place(arch) as at:
        try:
            folders.write(name, at, _text(arch, gpu, library))
            os.rename(name, file.name, src_dir_fd=at, dst_dir_fd=at)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=at)
            raise
    return file
