"""Values that the compiler computes again instead of keeping them in registers."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32


def opaque(value: Int32) -> Int32:
    """Return `value` through an instruction that hides from the compiler that both are equal.

    So the compiler neither keeps results that it computed earlier from `value`, nor moves computations with the
    returned number out of a loop.
    """
    return Int32(cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]))
