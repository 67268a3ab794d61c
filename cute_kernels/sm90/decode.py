"""MXFP8 weights as pairs of bfloat16 numbers, exactly: E4M3 times a power of two, two elements a 32-bit register.

An element's exponent and mantissa, at the lower end of bfloat16's, are 2^-120 times its value, subnormals too:

    E4M3        s eeee mmm
    bfloat16    s 0000eeee mmm0000      2^(eeee - 127) 1.mmm, or, where eeee is 0, 2^-126 0.mmm

Two multiplications bring that to its value. One would not do: 2^120 times a block's 2^(e - 127) is over bfloat16's
greatest power of two from e = 135 on. The first is by 2^112, which leaves 2^(e - 119) to the second, a bfloat16 number
for e = 0 .. 246; both are exact where the product is no subnormal. That is six instructions for two elements, or 24 a
warp for its part of 64 x 16 weights, which keep the tensor cores busy for 64 cycles where 128 rows of x are multiplied.

What is no number is found on the way and reaches the result at the end of a tile, since it makes a whole row NaN:
E4M3's NaN, whose magnitude is the greatest code, and scale bytes from 247 on, NaN among them, whose blocks leave
bfloat16's range.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

LANES_OF_16 = 0x00010001
# A bfloat16's exponent begins at bit 7; 2^112 has the exponent 239.
TWO_TO_112 = (239 << 7) * LANES_OF_16
EXPONENT_ONE = (1 << 7) * LANES_OF_16
# What a multiplier's exponent is above its scale byte: 2^(e - 119).
EXPONENT_OFFSET = 8
# Sign, exponent and mantissa of both elements. As a signed number, for a literal of 32 bits.
CODE_MASK = 0x87F087F0 - (1 << 32)
NAN_CODE = 0x7F << 4
# Bytes 0 and 1, each with its sign in the byte above.
SIGN_EXTENDED = 0x9180
BYTE_SIGNS = 0x80808080
BYTE_MAGNITUDES = 0x7F7F7F7F
# Added to the lower 7 bits of a byte, it carries into bit 7 from 247 - 128 on.
TO_247 = 0x09090909


def codes(pair: Int32) -> Int32:
    """The two E4M3 bytes in the lower half of a word, as bfloat16 numbers 2^-120 times as great."""
    return (Int32(cute.arch.prmt(pair, Int32(0), Int32(SIGN_EXTENDED))) << 4) & Int32(CODE_MASK)


def decoded(code: Int32, multiplier: Int32) -> Int32:
    """The elements of `codes` times their scale."""
    # A literal would reach the instruction as an immediate, which it does not take.
    by_112 = Int32(cute.arch.inline_ptx(f"mov.b32 {{$w0}}, {TWO_TO_112};", write_only_types=[Int32]))
    return _product(_product(code, by_112), multiplier)


def multiplier_of(scales: Int32, index: int) -> Int32:
    """2^(e - 119) in both halves, of byte `index` of four scale bytes."""
    byte = (scales >> 8 * index) & 0xFF
    return byte * EXPONENT_ONE + EXPONENT_OFFSET * EXPONENT_ONE


def _product(a: Int32, b: Int32) -> Int32:
    return _two("mul.rn.bf16x2", a, b)


def greater(peak: Int32, code: Int32) -> Int32:
    """The greater magnitudes of two pairs of codes; the signs are of no use."""
    return _two("max.xorsign.abs.bf16x2", peak, code)


def _two(instruction: str, a: Int32, b: Int32) -> Int32:
    ptx = f"{instruction} {{$w0}}, {{$r0}}, {{$r1}};"
    return Int32(cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[a, b]))


def bad_scales(scales: Int32, row: int) -> Int32:
    """Not 0 where one of four scale bytes is 247 or more; the bits of up to 8 rows are apart."""
    return ((((scales & Int32(BYTE_MAGNITUDES)) + Int32(TO_247)) & scales) >> row) & Int32(_signs_of(row))


def _signs_of(row: int) -> int:
    bits = BYTE_SIGNS >> row
    return bits - (bits >> 31 << 32)


def has_nan(peak: Int32, bad: Int32, row: int) -> cutlass.Boolean:
    """Whether there was a NaN among the codes that `peak` saw, or a bad scale of the row among those that `bad` did."""
    greatest = cutlass.max(peak & 0x7FFF, (peak >> 16) & 0x7FFF)
    return (greatest >= NAN_CODE) | ((bad & Int32(_signs_of(row))) != 0)
