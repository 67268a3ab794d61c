"""Layout of the E8M0 scales of a matrix's columns, in bands of 128 rows. A group's first band begins at the group's
first row.

A scale is for 32 rows of a column. A column's four scales in a band are a word, and the words of 128 columns are an
atom of 512 bytes (PTX ISA, "Scale factor layout"). For each 128 columns, memory has a sequence of places, each of which
has room for one atom. Band number k of group e, whose rows begin at row `begin`, has its atom at place number

    begin / 128 + e + k

No two groups share a place: a group that ends at row `end` takes at most end / 128 - begin / 128 + 1 places. So a
group's first row alone determines its places, without a sum over earlier groups, and T / 128 + E places are enough. All
atoms of the same 128 columns are neighbours.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8

ATOM_BYTES = 512
ATOM_COLUMNS = 128
BAND_ROWS = 128


class ScaleBands(NamedTuple):
    """Addresses of a matrix's E8M0 scales. The scales lie in atoms of 512 bytes, each for 128 rows of a group by 128
    columns.

    Attributes:
        address: the address of the first atom.
        count: number of places (each has room for one atom) for each 128 columns (`num_places`).
    """

    address: Int64
    count: Int32

    def atom(self, columns: Int32, begin: Int32, group: Int32, band: Int32) -> cute.Tensor:
        """Return a view of the 512 bytes of an atom: the scales of 128 columns in one band of a group.

        Args:
            columns: the first column, divided by 128.
            begin: the group's first row.
            group: the group's index.
            band: the band's number in the group.
        """
        place = columns * self.count + first_place(begin, group) + band
        pointer = cute.make_ptr(
            Uint8, self.address + Int64(place) * ATOM_BYTES, cute.AddressSpace.gmem, assumed_align=16
        )  # fmt: skip
        return cute.make_tensor(pointer, cute.make_layout(ATOM_BYTES))


def first_place(begin: Int32, group: Int32) -> Int32:
    """Return the number of the place of a group's first band (see the top of this file).

    begin: the group's first row. group: the group's index.
    """
    return begin // BAND_ROWS + group


def num_places(rows: Int32, groups: Int32) -> Int32:
    """Return how many places (each has room for the scales of one band) suffice for `groups` groups with `rows` rows
    in all, for each 128 columns."""
    return rows // BAND_ROWS + groups
