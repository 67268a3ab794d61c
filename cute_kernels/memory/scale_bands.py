"""E8M0 scales of a matrix's columns, in bands of 128 rows that begin with a group: how memory holds them.

A scale is of 32 rows of a column. Four scales of a column, those of a band, are a word, and the words of 128 columns an
atom of 512 bytes (PTX ISA, "Scale factor layout"). Group e, from row `begin` on, has its band number k at place

    begin / 128 + e + k

which no other group has: a group that ends at row `end` takes at most end / 128 - begin / 128 + 1 places. So places
follow from a group's first row alone, without a sum over the groups before, and T / 128 + E of them are enough. The
atoms of 128 columns are neighbours.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8

ATOM_BYTES = 512
ATOM_COLUMNS = 128
BAND_ROWS = 128


class ScaleBands(NamedTuple):
    """The address of the first atom, and the bands of `count` places that memory has for 128 columns."""

    address: Int64
    count: Int32

    def atom(self, columns: Int32, begin: Int32, group: Int32, band: Int32) -> cute.Tensor:
        """The bytes of an atom: 128 columns, number `columns`, of a band of the group that begins at row `begin`."""
        place = columns * self.count + first_place(begin, group) + band
        pointer = cute.make_ptr(
            Uint8, self.address + Int64(place) * ATOM_BYTES, cute.AddressSpace.gmem, assumed_align=16
        )  # fmt: skip
        return cute.make_tensor(pointer, cute.make_layout(ATOM_BYTES))


def first_place(begin: Int32, group: Int32) -> Int32:
    """The place of the first band of the group that begins at row `begin`."""
    return begin // BAND_ROWS + group


def num_places(rows: Int32, groups: Int32) -> Int32:
    """Places of all groups of so many rows."""
    return rows // BAND_ROWS + groups
