"""Turn kernel specs into callables: compile, export, link, verify, load, cache.

Importing this package imports neither torch nor cutlass. A bundle is a shared library of precompiled kernels for one
architecture, with a manifest. `load` loads a bundle; `ffi_bridge.build` makes bundles; `ffi_bridge.jit` compiles, in a
helper process, kernels that a bundle lacks.
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
