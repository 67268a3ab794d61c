"""Scales of weights that are decoded. A class for each type, made for the element that it multiplies.

Some scale bytes are bad: their block makes NaN of its whole row, for all rows of x. They are noted, and reach the
result at the end of a tile.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32

from ..device.select import select
from ..formats import E8M0
from .elements import Element
from .lanes import EXPONENT_BIAS, EXPONENT_ONE, HALF_OF_LEAST_NORMAL, NAN

BYTE_LANES = 0x01010101
BYTE_SIGNS = 0x80808080
BYTE_MAGNITUDES = 0x7F7F7F7F
E8M0_NAN = 0xFF


class Scales:
    """Scale bytes of a type, four a word, as bfloat16 numbers in both halves of a word.

    Attributes:
        first_large: the least byte whose multiplier leaves bfloat16's range, 128 or more: what it multiplies is
            multiplied by the rest afterwards. None: there is none.
    """

    first_large: int | None = None

    def __init__(self, element: Element):
        self.element = element

    def value(self, byte: Int32) -> Int32:
        """A scale; NaN where it is bad."""
        raise NotImplementedError

    def multiplier(self, scales: Int32, index: int) -> Int32:
        """Byte `index` of four, times what the element is read too small by."""
        raise NotImplementedError

    def small_multiplier(self, byte: Int32) -> Int32:
        """`multiplier` of a byte that is not large."""
        raise NotImplementedError

    def rest_of_multiplier(self, scales: Int32, index: int) -> Int32:
        """What `multiplier` lacks where a byte is large; 1 where it is not."""
        raise NotImplementedError

    def bad(self, scales: Int32, row: int) -> Int32:
        """Not 0 where one of four bytes is bad; the bits of up to 8 rows are apart."""
        raise NotImplementedError

    def large(self, scales: Int32) -> Int32:
        """Not 0 where one of four bytes is large."""
        raise NotImplementedError


class E8m0(Scales):
    """Byte e is 2^(e - 127), at e = 0 a subnormal number. Bad are NaN, and scales that take the greatest element out of
    bfloat16's range: the bytes from `first_bad` on, 128 or more.
    """

    def __init__(self, element: Element):
        super().__init__(element)
        self.first_bad = E8M0_NAN - element.greatest_exponent
        self.shift = -element.read_exponent
        self.first_large = E8M0_NAN - self.shift if self.shift else None

    def value(self, byte: Int32) -> Int32:
        return select(byte >= self.first_bad, Int32(NAN), power_of(byte))

    def multiplier(self, scales: Int32, index: int) -> Int32:
        byte = byte_of(scales, index)
        if self.first_large is None:
            return power_of(byte)
        return self.small_multiplier(cutlass.min(byte, Int32(self.first_large - 1)))

    def small_multiplier(self, byte: Int32) -> Int32:
        return byte * EXPONENT_ONE + self.shift * EXPONENT_ONE

    def rest_of_multiplier(self, scales: Int32, index: int) -> Int32:
        greatest = E8M0_NAN - 1 - self.shift
        byte = cutlass.max(byte_of(scales, index), Int32(greatest))
        return byte * EXPONENT_ONE + (EXPONENT_BIAS - greatest) * EXPONENT_ONE

    def bad(self, scales: Int32, row: int) -> Int32:
        return (_from(self.first_bad, scales) >> row) & Int32(_signs_of(row))

    def large(self, scales: Int32) -> Int32:
        return _from(self.first_large, scales) & Int32(_signs_of(0))


SCALES: dict[str, type[Scales]] = {E8M0: E8m0}


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
    """Whether `bad` noted a byte of the row."""
    return (bad & Int32(_signs_of(row))) != 0
