"""Scale types of weights that are decoded, one class for each. An object of such a class belongs to the element type
that it scales.

Some scale bytes are bad, for example NaN. The output column of a weight row with a bad byte must be NaN for all rows of
x. Kernels note bad bytes while they decode, and write NaN at the end of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ..device.select import select
from ..formats import E4M3, E8M0, FLOAT32
from .elements import Element
from .lanes import EXPONENT_BIAS, EXPONENT_ONE, HALF_OF_LEAST_NORMAL, LANES_OF_16, NAN

BYTE_LANES = 0x01010101
BYTE_SIGNS = 0x80808080
BYTE_MAGNITUDES = 0x7F7F7F7F
E8M0_NAN, E4M3_NAN = 0xFF, 0x7F
# Exponent of 448, the greatest E4M3 number; and the difference of bfloat16's and E4M3's biases, 127 - 7.
GREATEST_E4M3_EXPONENT, MOVED_E4M3_EXPONENT = 8, 120
# Added to a selector of prmt, so that bytes 0 and 2 of the result take the next byte of the scales.
LOW_BYTES = 0x0101


class Scales:
    """A scale type. Its methods convert scale bytes, four in a word, to bfloat16 numbers. Each result is a word with
    the number in both halves.

    A byte's *value* is its scale. Elements may be read too small by a power of two (`Element.read_exponent`). A byte's
    *multiplier* is its scale times the inverse of this power. The multipliers of *large* bytes exceed bfloat16's range.

    Attributes:
        first_large: the least large byte (128 or more). Products with large bytes are multiplied a second time, by
            `rest_of_multiplier`. None: all multipliers are in range.
        rest_exponent: products lack the factor 2^rest_exponent. The epilogue multiplies sums by it.
    """

    first_large: int | None = None
    rest_exponent = 0

    def __init__(self, element: Element, product: Callable[[Int32, Int32], Int32]):
        """Make the scales of an element type.

        product: a function that multiplies two words of two bfloat16 numbers each, by an instruction that the GPU has.
        """
        self.element, self.product = element, product

    def value(self, byte: Int32) -> Int32:
        """Return the value of one scale byte; NaN if the byte is bad, since its weight row must then become NaN."""
        raise NotImplementedError

    def multipliers(self, scales: Int32, first: int, count: int) -> list[Int32]:
        """Return the multipliers of `count` of the four bytes in `scales`, from byte number `first` on. A multiplier is
        the byte's scale times the power of two by which elements are read too small.

        The multiplier of a large byte is returned too small, by the factor that `rest_of_multiplier` returns.
        """
        raise NotImplementedError

    def small_multipliers(self, scales: Int32, count: int, is_turned: Boolean) -> list[Int32]:
        """Return the multipliers of the first `count` bytes in `scales`, in reverse order if `is_turned`. None of these
        bytes may be large."""
        raise NotImplementedError

    def rest_of_multiplier(self, scales: Int32, index: int) -> Int32:
        """Return the factor that `multipliers` left out of the multiplier of byte number `index`; 1 if the byte is not
        large."""
        raise NotImplementedError

    def bad(self, scales: Int32, row: int) -> Int32:
        """Return a word that is not 0 if one of the four bytes in `scales` is bad, so that its weight row must become
        NaN.

        Rows 0 to 7 set different bits, so that the words of several rows can be combined by OR; see `is_bad`.
        """
        raise NotImplementedError

    def large(self, scales: Int32) -> Int32:
        """Return a word that is not 0 if one of the four bytes in `scales` is large, so that its multiplier exceeds
        bfloat16's range."""
        raise NotImplementedError


class E8m0(Scales):
    """Powers of two: byte e is 2^(e - 127), a subnormal number at e = 0.

    Bad bytes are NaN and all bytes from `first_bad` (128 or more) on: for these, the scale times the greatest element
    exceeds bfloat16's range.

    If elements are read as 2^-126 times their value, multipliers include 2^126. Then the multipliers of scales up to 2
    fit into bfloat16; larger scales take a second product.
    """

    def __init__(self, element: Element, product: Callable[[Int32, Int32], Int32]):
        super().__init__(element, product)
        self.first_bad = E8M0_NAN - element.greatest_exponent
        self.shift = -element.read_exponent
        self.first_large = E8M0_NAN - self.shift if self.shift else None

    def value(self, byte: Int32) -> Int32:
        return select(byte >= self.first_bad, Int32(NAN), power_of(byte))

    def multipliers(self, scales: Int32, first: int, count: int) -> list[Int32]:
        return [self._multiplier(byte_of(scales, index)) for index in range(first, first + count)]

    def _multiplier(self, byte: Int32) -> Int32:
        """Return the multiplier of a byte. For a large byte, return the multiplier of the greatest byte that is not
        large."""
        if self.first_large is None:
            return power_of(byte)
        return self._small_multiplier(cutlass.min(byte, Int32(self.first_large - 1)))

    def small_multipliers(self, scales: Int32, count: int, is_turned: Boolean) -> list[Int32]:
        assert count == 1
        return [self._small_multiplier(scales)]

    def _small_multiplier(self, byte: Int32) -> Int32:
        """Return the multiplier of one byte that is not large."""
        return byte * EXPONENT_ONE + self.shift * EXPONENT_ONE

    def rest_of_multiplier(self, scales: Int32, index: int) -> Int32:
        greatest = E8M0_NAN - 1 - self.shift
        byte = cutlass.max(byte_of(scales, index), Int32(greatest))
        return byte * EXPONENT_ONE + (EXPONENT_BIAS - greatest) * EXPONENT_ONE

    def bad(self, scales: Int32, row: int) -> Int32:
        return (_from(self.first_bad, scales) >> row) & Int32(_signs_of(row))

    def large(self, scales: Int32) -> Int32:
        return _from(self.first_large, scales) & Int32(_signs_of(0))


class UnsignedE4m3(Scales):
    """E4M3 numbers of at most 448, without sign. Bad bytes are NaN and bytes with a sign.

    A byte shifted left by four bits has its exponent and significand in bfloat16's places. As a bfloat16 number it is
    the scale times 2^-120, including subnormals. Two powers of two (`powers`) then multiply it. They compensate 2^-120
    and, as far as bfloat16's range allows, the power of two by which elements are read too small. `rest_exponent` is
    what remains.
    """

    def __init__(self, element: Element, product: Callable[[Int32, Int32], Int32]):
        super().__init__(element, product)
        made_up_for = min(EXPONENT_BIAS - GREATEST_E4M3_EXPONENT, -element.read_exponent)
        self.rest_exponent = -element.read_exponent - made_up_for
        self.powers = EXPONENT_BIAS, MOVED_E4M3_EXPONENT + made_up_for - EXPONENT_BIAS

    def value(self, byte: Int32) -> Int32:
        number = self.product(byte * (LANES_OF_16 << 4), Int32(power(MOVED_E4M3_EXPONENT)))
        return select(byte >= E4M3_NAN, Int32(NAN), number)

    def multipliers(self, scales: Int32, first: int, count: int) -> list[Int32]:
        assert count == 2
        return self._two(scales, Int32(0x4140 + first * LOW_BYTES))

    def small_multipliers(self, scales: Int32, count: int, is_turned: Boolean) -> list[Int32]:
        assert count == 2
        return self._two(scales, select(is_turned, Int32(0x4041), Int32(0x4140)))

    def _two(self, scales: Int32, bytes_: Int32) -> list[Int32]:
        """Return the multipliers of two of the four scale bytes in `scales`.

        bytes_: a selector of the instruction prmt, which moves the two bytes into the two halves of a word.
        """
        moved = Int32(cute.arch.prmt(scales, Int32(0), bytes_)) << 4
        two = self.product(self.product(moved, Int32(power(self.powers[0]))), Int32(power(self.powers[1])))
        return [doubled(two, half) for half in ("low", "high")]

    def bad(self, scales: Int32, row: int) -> Int32:
        found = ((scales & Int32(BYTE_MAGNITUDES)) + Int32(BYTE_LANES)) | scales
        return (found >> row) & Int32(_signs_of(row))


class Float32s(Scales):
    """Scales that are float32 numbers, one for each block. They are used unchanged, and multiply elements in float32.

    Kernels need not look for bad scales: a NaN or infinite scale makes its weight row NaN or infinite by
    multiplication.
    """

    def value(self, byte: Int32) -> Int32:
        return byte

    def multipliers(self, scales: Int32, first: int, count: int) -> list[Int32]:
        assert count == 1
        return [scales]


SCALES: dict[str, type[Scales]] = {E8M0: E8m0, E4M3: UnsignedE4m3, FLOAT32: Float32s}
"""The classes of scale types, by `Format.scale`."""


def doubled(word: Int32, half: str) -> Int32:
    """Return a word whose two halves are both the "low" or the "high" half of `word`. On Hopper this is only a modifier
    of the instruction that reads the word."""
    ptx = f"{{ .reg .b16 low, high; mov.b32 {{low, high}}, {{$r0}}; mov.b32 {{$w0}}, {{{half}, {half}}}; }}"
    return Int32(cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[word]))


def power(exponent: int) -> int:
    """Return the bfloat16 number 2^exponent in both halves of a word."""
    return (EXPONENT_BIAS + exponent) * EXPONENT_ONE


def byte_of(scales: Int32, index: int) -> Int32:
    """Return byte number `index` of a word."""
    return (scales >> 8 * index) & 0xFF


def power_of(byte: Int32) -> Int32:
    """Return 2^(e - 127) for scale byte e, as a bfloat16 number in both halves of a word."""
    return cutlass.max(byte * EXPONENT_ONE, Int32(HALF_OF_LEAST_NORMAL))


def _from(first: Any, scales: Int32) -> Int32:
    """Return a word in which bit 7 of each byte is set if the same byte of `scales` is at least `first` (128 or more).
    Other bits are arbitrary."""
    # Adding 256 - first to a byte's lower 7 bits carries into bit 7 if the byte (with bit 7 set) is at least `first`.
    carry = Int32((256 - first) * BYTE_LANES)
    return ((scales & Int32(BYTE_MAGNITUDES)) + carry) & scales


def _signs_of(row: int) -> int:
    """Return the mask of the bits that `Scales.bad` sets for a row (0 to 7): the sign bits of all bytes, shifted right
    by `row`.
    """
    bits = BYTE_SIGNS >> row
    return bits - (bits >> 31 << 32)


def is_bad(bad: Int32, row: int) -> cutlass.Boolean:
    """Return True if row number `row` has a bad scale. bad: the words that `Scales.bad` returned for rows, combined by
    OR."""
    return (bad & Int32(_signs_of(row))) != 0
