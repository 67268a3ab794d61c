"""Weights as pairs of bfloat16 numbers, exactly: times a power of two, two elements a 32-bit register. A class for each
format.

E4M3: the hardware converts it to float16; by way of float32 that becomes bfloat16, which has 8 bits of significand
where E4M3 has 4. The product with a block's scale is exact where it is no subnormal. That is five instructions for two
elements, or 20 a warp for its part of 64 x 16 weights, which keep the tensor cores busy for 128 cycles where 256 rows
of x are multiplied.

E4M3's NaN stays one on the way, and makes NaN of its whole row, for all rows of x. So must scale bytes from 247 on,
whose blocks leave bfloat16's range.

E2M1: a sign, two bits of exponent and one of significand, which are brought to where bfloat16 has its own, so that
what is read is the element times 2^-126, also where it is 0 or 0.5, which are subnormal in both. The multiplier has
that power of two besides, and is a bfloat16 number up to a scale of 2; only larger ones take a second product. Weights
lie in words of eight elements whose bits are ordered for this (`python/glulam/mxfp4/words.py`): four shifts, four
logical operations and four products, 12 instructions, make all eight. In the order of checkpoints it is 19, since no
shift brings the sign and the other bits of an element to their places together, nor two elements to two halves of a
word.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Int32, Uint16, Uint32

from ...formats import E2M1, E4M3
from .decode import EXPONENT_ONE, Decoder, byte_of, product


class E4m3Decoder(Decoder):
    element = Float8E4M3FN
    share = Uint16
    pairs = 1
    first_bad = 247

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


# The bits of two bfloat16 numbers that an element has: its sign, and its three others.
PLACES = -0x7E3F7E40
EXPONENT_BIAS = 127
# The scale byte of 2: times 2^126, bfloat16's greatest power of two.
GREATEST = 128


class E2m1Decoder(Decoder):
    element = Int32
    share = Uint32
    pairs = 4
    first_bad = 253
    first_large = GREATEST + 1

    def place(self, pair: int, block: int) -> int:
        """Of every second two blocks the halves are exchanged: else threads of few_rows.py whose blocks these are would
        ask for x from the same banks.
        """
        return pair ^ block & 2

    def multiplier(self, scales: Int32, index: int) -> Int32:
        """2^(e - 127 + 126), up to bfloat16's greatest power of two."""
        return self.small_multiplier(cutlass.min(byte_of(scales, index), Int32(GREATEST)))

    def small_multiplier(self, byte: Int32) -> Int32:
        """The same of a scale byte that is not large."""
        return byte * EXPONENT_ONE + (EXPONENT_BIAS - 1) * EXPONENT_ONE

    def rest_of_multiplier(self, scales: Int32, index: int) -> Int32:
        byte = cutlass.max(byte_of(scales, index), Int32(GREATEST))
        return byte * EXPONENT_ONE + (EXPONENT_BIAS - GREATEST) * EXPONENT_ONE

    def decoded(self, share: Int32, pair: int, multiplier: Int32) -> Int32:
        return product(self.spread(share, pair), multiplier)

    def spread(self, word: Int32, pair: int) -> Int32:
        """The two elements of a pair, times 2^-126."""
        bits = Uint32(word)
        down = bits >> 4
        turned = bits << 10 | bits >> 22
        return Int32((bits, bits << 4, down ^ turned, down ^ bits << 6)[pair]) & Int32(PLACES)


DECODERS: dict[str, Decoder] = {E4M3: E4m3Decoder(), E2M1: E2m1Decoder()}
"""By the element of a weight format, whose scales are of SCALE_BLOCK elements."""
