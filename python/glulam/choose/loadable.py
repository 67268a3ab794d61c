"""Find a kernel's function without compiling: in the bundle, or in the cache of kernels that were compiled earlier."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import ffi_bridge
from cute_kernels.specs import Spec
from ffi_bridge import BundleError, ToolchainError

Function = Callable[..., Any]

_from_cache: dict[Spec, Function] = {}


def in_bundle(spec: Spec) -> bool:
    with contextlib.suppress(BundleError, ToolchainError):
        return ffi_bridge.load(spec.arch).has(spec.name)
    return False


def cached(spec: Spec) -> Function | None:
    """Return the function that an earlier compile kept on disk, verified and loaded; None if there is none."""
    if spec not in _from_cache:
        from ffi_bridge import cache  # not imported if the bundle has every kernel

        with contextlib.suppress(ToolchainError, OSError, UnicodeError):  # TVM-FFI opens only paths that are text
            if function := cache.find(spec):
                _from_cache[spec] = function
    return _from_cache.get(spec)


def is_loadable(spec: Spec) -> bool:
    """Return True if the spec's function can be loaded without compiling."""
    return in_bundle(spec) or cached(spec) is not None
