"""Errors of compiling, linking and loading kernels. Every message ends in the command that mends the error."""

from __future__ import annotations

from pathlib import Path

from cute_kernels.architectures import ARCHS


def remedy(place: Path, options: str = "") -> str:
    """Return the advice to run the command that builds a bundle anew.

    The command has `--arch` where the path tells the architecture: without `--arch`, a build is for the architecture
    of the machine that it runs on.

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
    """Files not made by `glulam build`, or made for another architecture, or writable by another user."""


class BundleOutdated(BundleError):
    """A bundle built by or for other versions of Glulam, its toolchain or its kernel sources."""


class BundleBusy(BundleError):
    """Another process is building this bundle. Nothing was compiled."""


class ToolchainError(RuntimeError):
    """A tool or library that building or loading needs is missing on this machine."""


class CompileError(RuntimeError):
    """A kernel did not compile, or the build refuses its code (spills, serialised wgmma)."""
