"""Elements of weights that are decoded. A class for each, which an architecture completes by `decoded`.

E4M3's NaN stays one on the way, and makes NaN of its whole row, for all rows of x.

E2M1: a sign, two bits of exponent and one of significand, which are brought to where bfloat16 has its own, so that
what is read is the element times 2^-126, also where it is 0 or 0.5, which are subnormal in both. Weights lie in words
of eight elements whose bits are ordered for this (`python/glulam/formats/words.py`): four shifts, four logical
operations and four products, 12 instructions, make all eight. In the order of checkpoints it is 19, since no shift
brings the sign and the other bits of an element to their places together, nor two elements to two halves of a word.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float8E4M3FN, Int32, Uint16, Uint32

# The bits of two bfloat16 numbers that an element of E2M1 has: its sign, and its three others.
PLACES = -0x7E3F7E40


class Element:
    """Elements of a format.

    Attributes:
        dtype: what rows are loaded as.
        share: an unsigned integer, what a thread reads at once of a row; it has `pairs` pairs of elements.
        greatest_exponent: floor(log2) of the greatest element.
        read_exponent: elements are read as 2^read_exponent times what they are.
    """

    dtype: Any
    share: Any
    pairs: int
    greatest_exponent: int
    read_exponent = 0

    @property
    def share_bytes(self) -> int:
        return int(self.share.width // 8)

    def read(self, address: Int32) -> Int32:
        """A share, from shared memory."""
        pointer = cute.make_ptr(self.share, address, cute.AddressSpace.smem, assumed_align=self.share_bytes)
        return Int32(cute.make_tensor(pointer, cute.make_layout(1))[0])

    def place(self, pair: int, block: int) -> int:
        """Return a share's pair as one of the thread's pairs of 32 elements. block: these 32's number in the row."""
        return pair

    def decoded(self, share: Int32, pair: int, multiplier: Int32) -> Int32:
        """A pair of a share, as two bfloat16 numbers times a multiplier, by the instructions that a GPU has."""
        raise NotImplementedError


class E4m3(Element):
    dtype = Float8E4M3FN
    share = Uint16
    pairs = 1
    greatest_exponent = 8


class E2m1(Element):
    dtype = Int32
    share = Uint32
    pairs = 4
    greatest_exponent = 2
    read_exponent = -126

    def place(self, pair: int, block: int) -> int:
        """Of every second two blocks the halves are exchanged, so that threads which have neighbouring blocks may ask
        for x from banks of their own.
        """
        return pair ^ block & 2

    def spread(self, word: Int32, pair: int) -> Int32:
        """The two elements of a pair, times 2^-126."""
        bits = Uint32(word)
        down = bits >> 4
        turned = bits << 10 | bits >> 22
        return Int32((bits, bits << 4, down ^ turned, down ^ bits << 6)[pair]) & Int32(PLACES)
