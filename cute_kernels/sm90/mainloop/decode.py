"""MXFP8 weights as pairs of bfloat16 numbers, exactly: E4M3 times a power of two, two elements a 32-bit register.

The hardware converts E4M3 to float16; by way of float32 that becomes bfloat16, which has 8 bits of significand where
E4M3 has 4. A block's 2^(e - 127) is a bfloat16 number, at e = 0 a subnormal one, and the product is exact where it is
no subnormal. That is five instructions for two elements, or 20 a warp for its part of 64 x 16 weights, which keep the
tensor cores busy for 128 cycles where 256 rows of x are multiplied.

E4M3's NaN stays one on the way, and makes NaN of its whole row, for all rows of x. So must scale bytes from 247 on, NaN
among them, whose blocks leave bfloat16's range: those are noted, and reach the result at the end of a tile.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

LANES_OF_16 = 0x00010001
# A bfloat16's exponent begins at bit 7.
EXPONENT_ONE = (1 << 7) * LANES_OF_16
# What stands for 2^-127, which has no exponent.
HALF_OF_LEAST_NORMAL = (1 << 6) * LANES_OF_16
BYTE_SIGNS = 0x80808080
BYTE_MAGNITUDES = 0x7F7F7F7F
# Added to the lower 7 bits of a byte, it carries into bit 7 from 247 - 128 on.
TO_247 = 0x09090909


def decoded(pair: Int32, multiplier: Int32) -> Int32:
    """The two E4M3 bytes in the lower half of a word, times their scale."""
    ptx = """{
    .reg .b16 bytes, low, high; .reg .b32 pair; .reg .f32 first, second;
    cvt.u16.u32 bytes, {$r0};
    cvt.rn.f16x2.e4m3x2 pair, bytes;
    mov.b32 {low, high}, pair;
    cvt.f32.f16 first, low;
    cvt.f32.f16 second, high;
    cvt.rn.bf16x2.f32 pair, second, first;
    mul.rn.bf16x2 {$w0}, pair, {$r1};
    }"""
    return Int32(cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[pair, multiplier]))


def multiplier_of(scales: Int32, index: int) -> Int32:
    """2^(e - 127) in both halves, of byte `index` of four scale bytes."""
    byte = (scales >> 8 * index) & 0xFF
    return cutlass.max(byte * EXPONENT_ONE, Int32(HALF_OF_LEAST_NORMAL))


def bad_scales(scales: Int32, row: int) -> Int32:
    """Not 0 where one of four scale bytes is 247 or more; the bits of up to 8 rows are apart."""
    return ((((scales & Int32(BYTE_MAGNITUDES)) + Int32(TO_247)) & scales) >> row) & Int32(_signs_of(row))


def _signs_of(row: int) -> int:
    bits = BYTE_SIGNS >> row
    return bits - (bits >> 31 << 32)


def is_bad(bad: Int32, row: int) -> cutlass.Boolean:
    """Whether `bad_scales` noted one of the row."""
    return (bad & Int32(_signs_of(row))) != 0
