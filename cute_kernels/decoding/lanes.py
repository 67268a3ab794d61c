"""32-bit words that hold the same bfloat16 number in both halves."""

from __future__ import annotations

LANES_OF_16 = 0x00010001
EXPONENT_BIAS = 127
# A bfloat16's exponent begins at bit 7.
EXPONENT_ONE = (1 << 7) * LANES_OF_16
# 2^-127, a subnormal.
HALF_OF_LEAST_NORMAL = (1 << 6) * LANES_OF_16
NAN = 0x7FC0 * LANES_OF_16
