"""What can go wrong between a kernel's source and a callable. Every message ends in the command that mends it."""

from __future__ import annotations

from pathlib import Path

from cute_kernels.architectures import ARCHS


def remedy(place: Path, options: str = "") -> str:
    """Name the command that builds a bundle anew. `place`: its folder <root>/<arch>, or a file in that folder.

    Without `--arch` a build makes the bundle for the machine it runs on, which may be another one.
    """
    arch = next((f" --arch {name}" for name in (place.name, place.parent.name) if name in ARCHS), "")
    return f"run `glulam build{arch}{options}`"


class BundleError(RuntimeError):
    """A bundle that cannot be used. Nothing of it was loaded."""


class BundleMissing(BundleError):
    """No bundle for this architecture, or no such function in it."""


class BundleDamaged(BundleError):
    """The manifest cannot be read, or the library is not the one that it describes."""


class BundleForeign(BundleError):
    """Files that `glulam build` did not make, or made for another architecture, or that another user may write."""


class BundleOutdated(BundleError):
    """Built by, or for, other versions of Glulam, of its toolchain or of its kernels' sources."""


class BundleBusy(BundleError):
    """Another process is building this bundle. Nothing was compiled."""


class ToolchainError(RuntimeError):
    """A tool or a library that is needed to build or to load is not on this machine."""


class CompileError(RuntimeError):
    """A kernel did not compile, or compiled to code that the build refuses (spills, serialised wgmma)."""
