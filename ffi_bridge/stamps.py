"""Stamps: that a bundle was validated on a GPU of this machine, by its user.

    <cache root>/validated/<arch>/<64 digits>.stamp

The digits stand for the name of the GPU and the content of the library, so a stamp holds for no other build. That the
file is there says all; what is asked of its owner and of who may write it is what is asked of a bundle (`trust`).
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from . import cache, trust
from .errors import BundleError

FOLDER = "validated"


def _file(arch: str, gpu: str, library: str) -> Path:
    digits = hashlib.sha256(f"{gpu}\n{library}".encode()).hexdigest()
    return cache.cache_root() / FOLDER / arch / f"{digits}.stamp"


def is_there(arch: str, gpu: str, library: str) -> bool:
    """Whether the library of this sha256 was validated here on a GPU of this name."""
    with contextlib.suppress(BundleError, OSError), trust.opened(_file(arch, gpu, library)):
        return True
    return False


def leave(arch: str, gpu: str, library: str) -> Path:
    """Says so from now on, whatever the umask. Raises OSError where the cache's folder cannot be written."""
    file = _file(arch, gpu, library)
    cache.make_root(cache.cache_root())
    for folder in (file.parent.parent, file.parent):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
    file.write_text(f"`glulam validate` passed on a {gpu} with the {arch} library {library}.\n")
    file.chmod(0o644)
    return file
