"""Values that are worked out again rather than kept."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32


def anew(value: Int32) -> Int32:
    """The value, which the compiler takes for another one each time: it keeps nothing that came of it before, nor moves
    what comes of it out of a loop."""
    return Int32(cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]))
