"""From kernel specs to callables: compile, export, link, verify, load, cache.

Importing this imports neither torch nor cutlass. `load` serves a precompiled bundle; `ffi_bridge.jit`
compiles what a bundle lacks, in a helper process; `ffi_bridge.build` makes bundles.
"""

from ._version import __version__
from .errors import (
    BundleBusy,
    BundleDamaged,
    BundleError,
    BundleForeign,
    BundleMissing,
    BundleOutdated,
    CompileError,
    ToolchainError,
)
from .loader import Bundle, load

__all__ = [
    "Bundle",
    "BundleBusy",
    "BundleDamaged",
    "BundleError",
    "BundleForeign",
    "BundleMissing",
    "BundleOutdated",
    "CompileError",
    "ToolchainError",
    "__version__",
    "load",
]
