"""Element types of weights that are decoded. Each architecture completes a class by a method `decoded`.

E4M3: NaN stays NaN when it is decoded. So it turns its whole output column, for all rows of x, into NaN.

E2M1: the sign, the two exponent bits and the significand bit are moved to their places in bfloat16. The result is the
element times 2^-126, including 0 and 0.5, which are subnormal in both formats. Weights lie in words of eight elements
whose bits are ordered for this (`python/glulam/formats/words.py`). So 12 instructions decode all eight: four shifts,
four logical operations and four products. In the order of checkpoints, decoding takes 19 instructions, since no single
shift moves both the sign and the other bits of an element, or two elements, to their places.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float8E4M3FN, Int32, Uint16, Uint32

# Mask of an E2M1 element's sign and three other bits, in both bfloat16 numbers of a word.
PLACES = -0x7E3F7E40


class Element:
    """An element type of weights. A *share* is the unsigned integer of elements that a thread reads at once. A *pair*
    is two elements of a share, which are decoded together.

    Attributes:
        dtype: the type with which rows are loaded.
        share: the type of a share.
        pairs: pairs in a share.
        greatest_exponent: floor(log2) of the greatest element.
        read_exponent: elements are read as 2^read_exponent times their value.
    """

    dtype: Any
    share: Any
    pairs: int
    greatest_exponent: int
    read_exponent = 0

    @property
    def share_bytes(self) -> int:
        """Bytes of a share, the unsigned integer of elements that a thread reads at once."""
        return int(self.share.width // 8)

    def read(self, address: Int32) -> Int32:
        """Read a share from an address in shared memory. A share is the integer of elements that a thread reads at
        once."""
        pointer = cute.make_ptr(self.share, address, cute.AddressSpace.smem, assumed_align=self.share_bytes)
        return Int32(cute.make_tensor(pointer, cute.make_layout(1))[0])

    def place(self, pair: int, block: int) -> int:
        """Return the position of a pair among the thread's pairs of a block of 32 elements.

        Args:
            pair: the pair's number in its share.
            block: the block's index in the row.
        """
        return pair

    def decoded(self, share: Int32, pair: int, multiplier: Int32) -> Int32:
        """Decode pair number `pair` of a share (two of the elements read at once). The result is two bfloat16 numbers,
        times a multiplier. Each architecture defines this method."""
        raise NotImplementedError


class E4m3(Element):
    """E4M3 elements; a share is two of them."""

    dtype = Float8E4M3FN
    share = Uint16
    pairs = 1
    greatest_exponent = 8


class E2m1(Element):
    """E2M1 elements. A share, which a thread reads at once, is a 32-bit word of eight elements."""

    dtype = Int32
    share = Uint32
    pairs = 4
    greatest_exponent = 2
    read_exponent = -126

    def place(self, pair: int, block: int) -> int:
        """Return the position of a pair in its block, as `Element.place` does.

        In blocks 2 and 3 of every four, the first two pairs of a share change places with the last two. Then threads
        with neighbouring blocks read x from different banks.
        """
        return pair ^ block & 2

    def spread(self, word: Int32, pair: int) -> Int32:
        """Return the two elements of pair number `pair` of a word as two bfloat16 numbers, each times 2^-126."""
        bits = Uint32(word)
        down = bits >> 4
        turned = bits << 10 | bits >> 22
        return Int32((bits, bits << 4, down ^ turned, down ^ bits << 6)[pair]) & Int32(PLACES)
