"""E8M0 scale bytes: byte e means 2^(e - 127), byte 255 means NaN. The functions convert bytes to numbers, and find a
block's byte from the block's greatest magnitude (amax)."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..device.select import select
from ..device.target import has_packed_integers

E8M0_INF, E8M0_NAN = 0xFE, 0xFF
F32_MIN_NORMAL, F32_INF, F32_NAN, F32_MANTISSA = 0x00800000, 0x7F800000, 0x7FC00000, 0x007FFFFF
F32_TWO_TO_MINUS_127, F32_MAGNITUDE = 0x00400000, 0x7FFFFFFF


def power_of_two(byte: Int32) -> Float32:
    """Return the exact float32 value of a scale byte, 0 .. 255. Byte 0 gives a subnormal."""
    bits = cutlass.max(byte << 23, Int32(F32_TWO_TO_MINUS_127))
    return select(byte == E8M0_NAN, Int32(F32_NAN), bits).bitcast(Float32)


def magnitude_of(value: Float32) -> Int32:
    """Return the bits of |value| as an integer. These integers have the same order as the numbers, and NaN is the
    greatest."""
    return value.bitcast(Int32) & F32_MAGNITUDE


def exponent_of(amax: Float32) -> Int32:
    """Return a block's scale byte e, so that 2^(e - 127) is the least power of two, from 2^-127 on, that is not below
    the float32 quotient amax / 448. Inf gives 0xFE, NaN gives 0xFF.

    From 2^-126 on, e is the quotient's exponent field if its mantissa is 0 (the quotient is a power of two), otherwise
    one more. Below 2^-126 the quotient is subnormal and its exponent field is 0. There 2^-127 has mantissa 0x400000, so
    e is 0 up to this mantissa and 1 above it.
    """
    quotient = (amax * Float32(1 / 448)).bitcast(Int32)
    carry = select(quotient < F32_MIN_NORMAL, Int32(0x3FFFFF), Int32(F32_MANTISSA))
    exponent = cutlass.min((quotient + carry) >> 23, Int32(E8M0_INF))
    return select(quotient > F32_INF, Int32(E8M0_NAN), exponent)


def multiplier_of(exponent: Int32) -> Float32:
    """Return 1 / scale = 2^(127 - exponent) for a scale byte; NaN for 0xFF. The result is exact in float32 (subnormal
    for 0xFE)."""
    bits = (Int32(E8M0_INF) - exponent) << 23
    bits = select(exponent == E8M0_INF, Int32(F32_TWO_TO_MINUS_127), bits)
    return select(exponent == E8M0_NAN, Int32(F32_NAN), bits).bitcast(Float32)


def pairs(dtype: type[cutlass.Numeric]) -> str:
    """Return the type suffix of the PTX `max` that compares two pairs of 16-bit magnitudes. On sm_90 and later it is
    u16x2. On older GPUs (from sm_80 on), it is the suffix that compares them as floating-point numbers of `dtype`."""
    if has_packed_integers():
        return "u16x2"
    return "NaN.bf16x2" if dtype is cutlass.BFloat16 else "NaN.f16x2"


class Magnitudes:
    """Operations on magnitudes |x|, held as unsigned integers in 32-bit words: two in a word if x is 16-bit, else one.
    The integers have the same order as the numbers. NaN is above Inf, so a NaN in a block reaches the block's scale."""

    def __init__(self, dtype: type[cutlass.Numeric]):
        self.dtype = dtype
        self.packed = dtype.width == 16
        self.mask = 0x7FFF7FFF if self.packed else 0x7FFFFFFF

    def absolute(self, word: Int32) -> Int32:
        return word & Int32(self.mask)

    def absolute_after(self, word: Int32, other: Int32) -> Int32:
        """Return `absolute(word)`, and make the result depend on `other`, a word of magnitudes, so that it is computed
        after `other`.

        Without this dependence, the compiler keeps earlier results or computes all 64 at once, which takes 10 registers
        too many. `other` has no sign bits, so it does not change the mask.
        """
        return word & (other | Int32(self.mask))

    def max(self, a: Int32, b: Int32) -> Int32:
        kind = pairs(self.dtype) if self.packed else "u32"
        ptx = f"max.{kind} {{$w0}}, {{$r0}}, {{$r1}};"
        return Int32(cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[a, b]))

    def greatest(self, word: Int32) -> Float32:
        """Return the magnitude in a word, or the greater of the word's two magnitudes, as float32."""
        pair = cute.make_rmem_tensor(32 // self.dtype.width, self.dtype)
        words = cute.recast_tensor(pair, Int32)
        words[0] = self.max(word, word >> 16) if self.packed else word
        return pair[0].to(Float32)
