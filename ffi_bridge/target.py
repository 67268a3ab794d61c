"""Replace the bundle in a folder <root>/<arch>: only files that Glulam wrote are replaced or removed."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from cute_kernels.architectures import ARCHS

from . import manifest as manifests
from . import trust
from .errors import BundleForeign
from .manifest import Manifest

_MAX_BYTES = 64 << 20
_MARK = f'"format": "{manifests.FORMAT}"'.encode()
_NAMED = re.compile(rb'"library": "([!-~]{1,255})"')


def check(folder: Path) -> None:
    """Check that a bundle can be published in `folder`, so that a build fails now and not after minutes of compiling.

    Raises:
        BundleForeign: other users can write the folder, or it has a bundle's file that Glulam did not write.
        OSError: the folder cannot be read, or is a link.
    """
    required = trust.of(folder.parent)
    with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
        root = stack.enter_context(required.opened(folder.parent, folder=True))
        stack.enter_context(required.opened(folder, root, folder=True))
        _libraries(folder)


def publish(new: Path, target: Path, manifest: Manifest) -> None:
    """Move the bundle in folder `new` to folder `target` on the same file system; readers never see half a bundle.

    The library is moved first: its name contains its hash, so it replaces no other library. Then the manifest
    atomically replaces the old manifest. Last, the libraries of earlier builds are removed; processes that have loaded
    one keep it.

    Raises:
        BundleForeign: `target` has a bundle's file that Glulam did not write. Nothing was replaced.
    """
    target.mkdir(mode=0o755, exist_ok=True)
    old = _libraries(target)
    for file in (manifest.library, manifests.FILE):
        os.replace(new / file, target / file)
    for path in old:
        if path.name != manifest.library:
            with contextlib.suppress(OSError):
                path.unlink()


def _libraries(folder: Path) -> list[Path]:
    """Return the libraries of earlier builds in a folder.

    Raises:
        BundleForeign: a library or the manifest in the folder was not written by Glulam.
    """
    described = _described(folder)
    found = [path for path in sorted(folder.iterdir()) if manifests.LIBRARY.fullmatch(path.name)]
    for path in found:
        if path.name != described and not _has_the_name_of_its_content(path):
            _refuse(path, "no manifest of Glulam's names it, and its own name is not the hash of its content")
    return found


def _described(folder: Path) -> str:
    """Return the name of the library that the manifest in `folder` describes; empty if it is missing or incomplete."""
    path = folder / manifests.FILE
    if not os.path.lexists(path):
        return ""
    with _opened(path) as handle, open(handle, "rb", closefd=False) as file:
        content = file.read(_MAX_BYTES)
    # The first bytes that `Manifest.write` writes.
    head = f'{{\n "arch": "{folder.name}",\n "format": "{manifests.FORMAT}"'.encode()
    if _MARK not in content and not head.startswith(content):
        _refuse(path, "it is no manifest of Glulam's")
    named = _NAMED.search(content)
    return named[1].decode() if named else ""


def _has_the_name_of_its_content(path: Path) -> bool:
    """Return True if a library's file name is the one that `manifest.library_name` makes from its content."""
    with _opened(path) as handle:
        sha256 = manifests.hash_of(handle)
    return any(path.name == manifests.library_name(arch, sha256) for arch in ARCHS)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a file for reading, whoever owns it, and yield its descriptor. Raises BundleForeign if that fails."""
    try:
        with trust.opened(path, trust.anybodys(path.parent.parent)) as handle:
            yield handle
    except OSError as error:
        _refuse(path, f"it cannot be read ({error.strerror or error})")


def _refuse(path: Path, why: str) -> NoReturn:
    """Raise BundleForeign for a file that a build would replace or remove. `why`: the reason."""
    message = f"foreign bundle: {path} would be replaced or removed, but {why}"
    raise BundleForeign(f"{message}; move it elsewhere, or build into another folder")
