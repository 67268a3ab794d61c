"""The formats of weights to be decoded. A class for each, which an architecture's own completes by `decoded`.

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
from cutlass import Float8E4M3FN, Int32, Uint16, Uint32

from .decoder import EXPONENT_BIAS, EXPONENT_ONE, Decoder, byte_of

# The bits of two bfloat16 numbers that an element has: its sign, and its three others.
PLACES = -0x7E3F7E40
# The scale byte of 2: times 2^126, bfloat16's greatest power of two.
GREATEST = 128


class E4m3(Decoder):
    element = Float8E4M3FN
    share = Uint16
    pairs = 1
    first_bad = 247


class E2m1(Decoder):
    element = Int32
    share = Uint32
    pairs = 4
    first_bad = 253
    first_large = GREATEST + 1

    def place(self, pair: int, block: int) -> int:
        """Of every second two blocks the halves are exchanged, so that threads which have neighbouring blocks may ask
        for x from banks of their own.
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

    def spread(self, word: Int32, pair: int) -> Int32:
        """The two elements of a pair, times 2^-126."""
        bits = Uint32(word)
        down = bits >> 4
        turned = bits << 10 | bits >> 22
        return Int32((bits, bits << 4, down ^ turned, down ^ bits << 6)[pair]) & Int32(PLACES)
