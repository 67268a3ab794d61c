"""A way to make the compiler compute values again, instead of keeping them in registers."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32


def opaque(value: Int32) -> Int32:
    """Return `value`, through an instruction that hides from the compiler that the result equals `value`.

    So the compiler does not reuse results that it computed from `value` before, and does not move computations with the
    result out of a loop.
    """
    return Int32(cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]))
