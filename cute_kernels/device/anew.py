"""Values that the compiler computes again rather than keep in registers."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32


def anew(value: Int32) -> Int32:
    """The same value, opaque to the compiler: what is computed from it is neither kept from an earlier use nor moved
    out of a loop."""
    return Int32(cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]))
