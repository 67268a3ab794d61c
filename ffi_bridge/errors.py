"""Errors of compiling, linking and loading kernels. Every message ends in the command that mends the error."""

from __future__ import annotations

from pathlib import Path

from cute_kernels.architectures import ARCHS


def remedy(place: Path, options: str = "") -> str:
    """Return advice for an error message: to run the command that builds the bundle anew.

    The command has `--arch` if the path tells the architecture: without `--arch`, a build is for the architecture of
    the machine that it runs on.

    Args:
        place: the bundle's folder <root>/<arch>, or a file in that folder.
        options: further options of the command, with a leading space.
    """
    arch = next((f" --arch {name}" for name in (place.name, place.parent.name) if name in ARCHS), "")
    return f"run `glulam build{arch}{options}`"


class BundleError(RuntimeError):
    """A bundle that cannot be used. No part of the bundle was loaded."""


class BundleMissing(BundleError):
    """There is no bundle for this architecture, or the bundle has no function of this name."""


class BundleDamaged(BundleError):
    """The manifest cannot be read, or the library does not match the manifest."""


class BundleForeign(BundleError):
    """The bundle was not made by `glulam build`, is for another architecture, or can be written by another user."""


class BundleOutdated(BundleError):
    """The bundle was built by, or for, other versions of Glulam, of its toolchain or of its kernels' sources."""


class BundleBusy(BundleError):
    """Another process is building this bundle. Nothing was compiled."""


class ToolchainError(RuntimeError):
    """A tool or library that building or loading needs is missing on this machine."""


class CompileError(RuntimeError):
    """A kernel did not compile, or the build refuses its code (spills, serialised wgmma)."""
