"""Decoders of quantised weights to bfloat16 by Hopper's instructions.

A decoder returns elements times their scale, two elements in a 32-bit register. There is one class for each element
type (decoding/elements.py). Decoding is exact, except for subnormal products of E4M3 and for float32 scales.

E4M3 (4 bits of significand) is converted to float16 by hardware, then to float32 and to bfloat16 (8 bits of
significand). The product with a block's scale is exact unless it is subnormal. Two elements take five instructions, so
a warp's quarter of 64 x 16 weights takes 20; with 256 rows of x, the tensor cores need 128 cycles for these weights.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32

from ...decoding.decoder import Decoder
from ...decoding.elements import E2m1, E4m3, Element
from ...decoding.scales import SCALES
from ...formats import E2M1, E4M3, FLOAT32, Format


def product(pair: Int32, multiplier: Int32) -> Int32:
    """Multiply two pairs of bfloat16 numbers element by element; a 32-bit word holds a pair.

    The instruction takes no constants, so PTX first moves `multiplier` to a register.
    """
    ptx = "{ .reg .b32 factor; mov.b32 factor, {$r1}; mul.rn.bf16x2 {$w0}, {$r0}, factor; }"
    return Int32(cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[pair, multiplier]))


class HopperE4m3(E4m3):
    """E4M3 elements whose scale is a bfloat16 number."""

    def decoded(self, share: Int32, pair: int, multiplier: Int32) -> Int32:
        """Return two E4M3 elements times their scale, as two bfloat16 numbers in a word.

        Args:
            share: a word whose lower half holds the two elements, as the thread read them from shared memory.
            pair: not used; a share has one pair.
            multiplier: the scale, a bfloat16 number in both halves of a word.
        """
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
        return Int32(cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[share, multiplier]))


class HopperE4m3InFloat32(E4m3):
    """E4M3 elements whose scale is a float32 number. Two elements take six instructions.

    The product is rounded to float32 and then to bfloat16, as when a weight is dequantised to bfloat16.
    """

    def decoded(self, share: Int32, pair: int, multiplier: Int32) -> Int32:
        """Return two E4M3 elements times their scale, as two bfloat16 numbers in a word.

        Args:
            share: a word whose lower half holds the two elements, as the thread read them from shared memory.
            pair: not used; a share has one pair.
            multiplier: the bits of the scale, a float32 number.
        """
        ptx = """{
        .reg .b16 bytes, low, high; .reg .b32 pair; .reg .f32 first, second, scale;
        mov.b32 scale, {$r1};
        cvt.u16.u32 bytes, {$r0};
        cvt.rn.f16x2.e4m3x2 pair, bytes;
        mov.b32 {low, high}, pair;
        cvt.f32.f16 first, low;
        cvt.f32.f16 second, high;
        mul.rn.f32 first, first, scale;
        mul.rn.f32 second, second, scale;
        cvt.rn.bf16x2.f32 {$w0}, second, first;
        }"""
        return Int32(cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[share, multiplier]))


class HopperE2m1(E2m1):
    """E2M1 elements, four pairs in a word."""

    def decoded(self, share: Int32, pair: int, multiplier: Int32) -> Int32:
        """Return the elements of pair number `pair` (0 to 3) of the word `share` times `multiplier`, as bfloat16."""
        return product(self.spread(share, pair), multiplier)


ELEMENTS: dict[str, type[Element]] = {E4M3: HopperE4m3, E2M1: HopperE2m1}
IN_FLOAT32: dict[str, type[Element]] = {E4M3: HopperE4m3InFloat32}
"""Element classes for formats that have float32 scales, by element type."""


def decoder_of(weights: Format) -> Decoder:
    """Make the decoder of a weight format."""
    element = (IN_FLOAT32 if weights.scale == FLOAT32 else ELEMENTS)[weights.element]()
    return Decoder(element, SCALES[weights.scale](element, product))
