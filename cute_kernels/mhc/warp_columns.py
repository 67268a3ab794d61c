"""Assignment of columns to warps in the projection's backward of 16-bit residual streams. A warp has the same columns
for all of its tokens."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ..device.invariant import Invariant
from .shapes import row_vectors

VECTOR = 8  # elements in 16 bytes


class Place(NamedTuple):
    """The columns of a warp.

    Attributes:
        stream: index of the stream of these columns.
        at: the first column, counted in a token's row of n C columns.
        inside: how many of the warp's vectors exist; the others lie past the stream's end.
    """

    stream: Int32
    at: Int32
    inside: Int32


class WarpColumns(Invariant):
    """Assignment of columns to warps: each warp has `vectors` vectors of 8 columns of one stream.

    side_by_side: True: neighbouring warps have neighbouring columns of the same stream. False: n neighbouring warps
    have the same columns of the n streams.
    """

    def __init__(self, n: int, side_by_side: bool):
        self.n = n
        self.side_by_side = side_by_side
        self.vectors = row_vectors(n)

    def _across(self, width: Int32) -> Int32:
        """Return the number of warps that share the columns of one stream."""
        return cute.ceil_div(width, VECTOR * self.vectors)

    def warps(self, width: Int32) -> Int32:
        """Return the number of warps that have columns of a token's n streams. The grid may have more warps, which have
        no columns.

        width: C, the columns of a stream.
        """
        return self._across(width) * self.n

    def place(self, warp: Int32, width: Int32) -> Place:
        """Return the columns of warp number `warp` of the grid. width: C."""
        stream, column = warp % self.n, warp // self.n
        if const_expr(self.side_by_side):
            stream, column = warp // self._across(width), warp % self._across(width)
        column *= VECTOR * self.vectors
        inside = cutlass.min(Int32(self.vectors), (width - column) // VECTOR)
        return Place(stream, stream * width + column, inside)
