"""Turn kernel specs into callables: compile, export, link, verify, load, cache.

Importing this package imports neither torch nor cutlass. `load` loads a precompiled bundle; `ffi_bridge.jit` compiles
kernels that a bundle lacks in a helper process; `ffi_bridge.build` makes bundles.
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
