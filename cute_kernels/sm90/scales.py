"""E8M0 scale bytes as numbers: byte e is 2^(e - 127), 255 is NaN."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32

E8M0_NAN = 0xFF
F32_TWO_TO_MINUS_127 = 0x00400000
F32_NAN = 0x7FC00000


def power_of_two(byte: Int32) -> Float32:
    """A scale byte, 0 .. 255, as float32, exactly: byte 0 is a subnormal."""
    bits = cutlass.max(byte << 23, Int32(F32_TWO_TO_MINUS_127))
    return Int32(cutlass.select_(byte == E8M0_NAN, Int32(F32_NAN), bits)).bitcast(Float32)
