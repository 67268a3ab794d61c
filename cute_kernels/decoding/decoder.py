"""What a mainloop that decodes asks of a weight format: how its elements are read, and what they are multiplied by.

A block's scale byte e is 2^(e - 127), which is a bfloat16 number, at e = 0 a subnormal one. Where the greatest element
times it leaves bfloat16's range, and where it is NaN, the block makes NaN of its whole row, for all rows of x. Such
bytes are those from `first_bad` on; they are noted, and reach the result at the end of a tile.

A decoder may read elements as smaller than they are, which its multipliers then make up for. Those of scale bytes from
`first_large` on are no bfloat16 numbers: what they multiply is multiplied by the rest afterwards.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

LANES_OF_16 = 0x00010001
# A bfloat16's exponent begins at bit 7.
EXPONENT_BIAS = 127
EXPONENT_ONE = (1 << 7) * LANES_OF_16
# What stands for 2^-127, which has no exponent.
HALF_OF_LEAST_NORMAL = (1 << 6) * LANES_OF_16
BYTE_LANES = 0x01010101
BYTE_SIGNS = 0x80808080
BYTE_MAGNITUDES = 0x7F7F7F7F


class Decoder:
    """Of a format. element: what rows are loaded as. share: an unsigned integer, what a thread reads at once of a row,
    which has `pairs` pairs of elements. first_bad: the least scale byte of a block that leaves bfloat16's range, 128 or
    more. first_large: the least one whose multiplier does, likewise; None: there is none.
    """

    element: Any
    share: Any
    pairs: int
    first_bad: int
    first_large: int | None = None

    @property
    def share_bytes(self) -> int:
        return int(self.share.width // 8)

    def read(self, address: Int32) -> Int32:
        """A share, from shared memory."""
        pointer = cute.make_ptr(self.share, address, cute.AddressSpace.smem, assumed_align=self.share_bytes)
        return Int32(cute.make_tensor(pointer, cute.make_layout(1))[0])

    def place(self, pair: int, block: int) -> int:
        """Which of the thread's pairs of a block of 32 a share's pair is. block: by its number in the row."""
        return pair

    def multiplier(self, scales: Int32, index: int) -> Int32:
        """2^(e - 127) in both halves, of byte `index` of four scale bytes."""
        return power_of(byte_of(scales, index))

    def small_multiplier(self, byte: Int32) -> Int32:
        """`multiplier` of a scale byte that is not large."""
        raise NotImplementedError

    def rest_of_multiplier(self, scales: Int32, index: int) -> Int32:
        """What `multiplier` lacks of a large scale byte's; 1 of any other."""
        raise NotImplementedError

    def decoded(self, share: Int32, pair: int, multiplier: Int32) -> Int32:
        """A pair of what `read` gave, times its scale, as two bfloat16 numbers: by the instructions that a GPU has."""
        raise NotImplementedError

    def bad_scales(self, scales: Int32, row: int) -> Int32:
        """Not 0 where one of four scale bytes is bad; the bits of up to 8 rows are apart."""
        return (_from(self.first_bad, scales) >> row) & Int32(_signs_of(row))

    def large_scales(self, scales: Int32) -> Int32:
        """Not 0 where one of four scale bytes is large."""
        return _from(self.first_large, scales) & Int32(_signs_of(0))


def byte_of(scales: Int32, index: int) -> Int32:
    return (scales >> 8 * index) & 0xFF


def power_of(byte: Int32) -> Int32:
    """2^(e - 127) in both halves, of a scale byte."""
    return cutlass.max(byte * EXPONENT_ONE, Int32(HALF_OF_LEAST_NORMAL))


def _from(first: Any, scales: Int32) -> Int32:
    """Bit 7 of each byte that is `first` or more."""
    # Added to the lower 7 bits of a byte, it carries into bit 7 where these are those of one.
    carry = Int32((256 - first) * BYTE_LANES)
    return ((scales & Int32(BYTE_MAGNITUDES)) + carry) & scales


def _signs_of(row: int) -> int:
    bits = BYTE_SIGNS >> row
    return bits - (bits >> 31 << 32)


def is_bad(bad: Int32, row: int) -> cutlass.Boolean:
    """Whether `bad_scales` noted one of the row."""
    return (bad & Int32(_signs_of(row))) != 0
