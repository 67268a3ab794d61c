"""Errors of compiling, linking and loading kernels. Every message ends in the command that mends the error."""

from __future__ import annotations

import shlex
from pathlib import Path

from cute_kernels.architectures import ARCHS

PACKAGED = "_bundle"
"""The folder in the installed package `glulam` that holds bundles, where `glulam build` puts them without --out."""


def remedy(place: Path, options: str = "", elsewhere: bool = False) -> str:
    """Return advice for an error message: "run `glulam build ...`", the command that builds the bundle anew.

    The command has `--arch` if the path tells the architecture: without `--arch`, a build is for the architecture of
    the machine that it runs on. It has `--out` if the bundle does not lie in the installed package.

    Args:
        place: path of the bundle's folder <root>/<arch>, or of a file in that folder.
        options: further options of the command, with a leading space.
        elsewhere: True: the message names another folder for the new bundle.
    """
    folder = next((one for one in (place, place.parent) if one.name in ARCHS), None)
    if folder is None:
        return f"run `glulam build{options}`"
    out = "" if elsewhere or folder.parent.name == PACKAGED else f" --out {shlex.quote(str(folder.parent))}"
    return f"run `glulam build --arch {folder.name}{options}{out}`"


class BundleError(RuntimeError):
    """Base class of the errors raised if a bundle cannot be used. No part of the bundle was loaded."""


class BundleMissing(BundleError):
    """Raised if there is no bundle for an architecture, or if the bundle has no function of the requested name."""


class BundleDamaged(BundleError):
    """Raised if a bundle's manifest cannot be read, or if its library does not match the manifest."""


class BundleForeign(BundleError):
    """Raised if a bundle was not made by `glulam build`, is for another architecture or CPU, or can be written by
    another user.
    """


class BundleOutdated(BundleError):
    """Raised if a bundle was built by another version of Glulam or of its toolchain, from other sources of the kernels,
    or with other settings (CPU baseline, $GLULAM_PLAIN).
    """


class BundleBusy(BundleError):
    """Raised by a build if another process is building in the same folder. Nothing was compiled."""


class ToolchainError(RuntimeError):
    """Raised if a tool or library that building or loading needs is missing on this machine, or has an unsupported
    version.
    """


class CompileError(RuntimeError):
    """Raised if a kernel does not compile or link, or if a build refuses its code (spills, serialised wgmma)."""
