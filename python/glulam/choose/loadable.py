"""Functions that exist already: in the bundle, or compiled before and kept in the cache on disk. Nothing compiles."""

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
    """The function that an earlier compile left on disk, verified and loaded; None where there is none."""
    if spec not in _from_cache:
        from ffi_bridge import cache  # where every kernel is the bundle's, it is never asked

        with contextlib.suppress(ToolchainError, OSError, UnicodeError):  # TVM-FFI opens no path that is no text
            if function := cache.find(spec):
                _from_cache[spec] = function
    return _from_cache.get(spec)


def is_loadable(spec: Spec) -> bool:
    """Whether the spec's function can be had without compiling it."""
    return in_bundle(spec) or cached(spec) is not None
