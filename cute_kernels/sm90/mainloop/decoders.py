"""Weights as pairs of bfloat16 numbers, exactly: times their scale, two elements a 32-bit register. A class for each
element (decoding/elements.py), with the instructions that Hopper has for it.

E4M3: the hardware converts it to float16; by way of float32 that becomes bfloat16, which has 8 bits of significand
where E4M3 has 4. The product with a block's scale is exact where it is no subnormal. That is five instructions for two
elements, or 20 a warp for its part of 64 x 16 weights, which keep the tensor cores busy for 128 cycles where 256 rows
of x are multiplied.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32

from ...decoding.decoder import Decoder
from ...decoding.elements import E2m1, E4m3, Element
from ...decoding.scales import SCALES
from ...formats import E2M1, E4M3, FLOAT32, Format


def product(pair: Int32, multiplier: Int32) -> Int32:
    """Multiply two bfloat16 numbers each. The instruction takes no constants: a multiplier is moved to a register."""
    ptx = "{ .reg .b32 factor; mov.b32 factor, {$r1}; mul.rn.bf16x2 {$w0}, {$r0}, factor; }"
    return Int32(cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[pair, multiplier]))


class HopperE4m3(E4m3):
    def decoded(self, share: Int32, pair: int, multiplier: Int32) -> Int32:
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
        return Int32(cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[share, multiplier]))


class HopperE4m3InFloat32(E4m3):
    """E4M3 that meets a float32 scale as a float32 number: six instructions for two elements. The product is rounded
    to float32 and then to bfloat16, as a weight is that is dequantised to bfloat16.
    """

    def decoded(self, share: Int32, pair: int, multiplier: Int32) -> Int32:
        """multiplier: the scale."""
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
    def decoded(self, share: Int32, pair: int, multiplier: Int32) -> Int32:
        return product(self.spread(share, pair), multiplier)


ELEMENTS: dict[str, type[Element]] = {E4M3: HopperE4m3, E2M1: HopperE2m1}
IN_FLOAT32: dict[str, type[Element]] = {E4M3: HopperE4m3InFloat32}
"""Decoder of formats with float32 scales."""


def decoder_of(weights: Format) -> Decoder:
    """The decoder of a format."""
    element = (IN_FLOAT32 if weights.scale == FLOAT32 else ELEMENTS)[weights.element]()
    return Decoder(element, SCALES[weights.scale](element, product))
