"""Values that the compiler computes again rather than keep in registers."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32


def anew(value: Int32) -> Int32:
    """Return the value in a form that is opaque to the compiler, which then neither keeps results computed from it
    before nor moves computations out of a loop."""
    return Int32(cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]))
