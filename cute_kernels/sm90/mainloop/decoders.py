"""Weights as pairs of bfloat16 numbers, exactly: times a power of two, two elements a 32-bit register. A class for each
format.

E4M3: the hardware converts it to float16; by way of float32 that becomes bfloat16, which has 8 bits of significand
where E4M3 has 4. The product with a block's scale is exact where it is no subnormal. That is five instructions for two
elements, or 20 a warp for its part of 64 x 16 weights, which keep the tensor cores busy for 128 cycles where 256 rows
of x are multiplied.

E4M3's NaN stays one on the way, and makes NaN of its whole row, for all rows of x. So must scale bytes from 247 on,
whose blocks leave bfloat16's range.

E2M1, two a byte: a sign, two bits of exponent and one of significand, which are shifted to where bfloat16 has its own,
so that what is read is the element times 2^-126, also where it is 0 or 0.5, which are subnormal in both. The multiplier
has that power of two besides, and is a bfloat16 number up to a scale of 2; only larger ones take a second product.
Two multiplications by constants copy the byte to where its signs are to be and to where its other bits are; a shift
would take the ALU, which has half as many lanes as the FMA pipes and two masks to apply already. With the product that
makes five instructions for two elements. Of a whole word, four byte permutes put two elements each where one
multiplication does for both of their parts, which makes 19 for eight.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Int32, Uint8, Uint16

from ...formats import E2M1, E4M3
from .decode import EXPONENT_ONE, Decoder, byte_of, product


class E4m3Decoder(Decoder):
    element = Float8E4M3FN
    pair = Uint16
    first_bad = 247

    def decoded(self, pair: Int32, multiplier: Int32) -> Int32:
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


# Of a byte with elements 0 and 1 in its halves: their signs to bits 15 and 31, their other bits to 6 to 8 and 22 to 24.
SIGNS, TO_SIGNS = -0x7FFF8000, (1 << 12) + (1 << 24)
NUMBERS, TO_NUMBERS = 0x01C001C0, (1 << 6) + (1 << 18)
# Of elements 0 and 1 in bits 0 to 3 and 16 to 19: both at once.
PLACES, TO_PLACES = SIGNS | NUMBERS, (1 << 12) + (1 << 6)
LOWER_HALVES = 0x0F0F0F0F
EXPONENT_BIAS = 127
# The scale byte of 2: times 2^126, bfloat16's greatest power of two.
GREATEST = 128


class E2m1Decoder(Decoder):
    element = Uint8
    pair = Uint8
    first_bad = 253
    first_large = GREATEST + 1

    def read(self, address: Int32) -> Int32:
        return super().read(address) & 0xFF

    def multiplier(self, scales: Int32, index: int) -> Int32:
        """2^(e - 127 + 126), up to bfloat16's greatest power of two."""
        return self.small_multiplier(cutlass.min(byte_of(scales, index), Int32(GREATEST)))

    def small_multiplier(self, byte: Int32) -> Int32:
        """The same of a scale byte that is not large."""
        return byte * EXPONENT_ONE + (EXPONENT_BIAS - 1) * EXPONENT_ONE

    def rest_of_multiplier(self, scales: Int32, index: int) -> Int32:
        byte = cutlass.max(byte_of(scales, index), Int32(GREATEST))
        return byte * EXPONENT_ONE + (EXPONENT_BIAS - GREATEST) * EXPONENT_ONE

    def decoded(self, pair: Int32, multiplier: Int32) -> Int32:
        """The two E2M1 halves of a byte, times their scale."""
        return product(self.spread(pair), multiplier)

    def spread(self, pair: Int32) -> Int32:
        """The two, times 2^-126."""
        return ((pair * TO_SIGNS) & Int32(SIGNS)) | ((pair * TO_NUMBERS) & Int32(NUMBERS))

    def decoded_word(self, word: Int32, multiplier: Int32) -> list[Int32]:
        """The eight E2M1 numbers of a word, times their scale: four pairs."""
        even, odd = word & Int32(LOWER_HALVES), (word >> 4) & Int32(LOWER_HALVES)
        return [product((_beside(even, odd, byte) * TO_PLACES) & Int32(PLACES), multiplier) for byte in range(4)]


def _beside(low: Int32, high: Int32, byte: int) -> Int32:
    """A byte of each of two words, under 128, at bits 0 and 16, zeros elsewhere: each byte's sign, eight times."""
    sign = 8
    chosen = byte | (sign | byte) << 4 | (4 + byte) << 8 | (sign | 4 + byte) << 12
    return Int32(cute.arch.prmt(low, high, Int32(chosen)))


DECODERS: dict[str, Decoder] = {E4M3: E4m3Decoder(), E2M1: E2m1Decoder()}
"""By the element of a weight format, whose scales are of SCALE_BLOCK elements."""
