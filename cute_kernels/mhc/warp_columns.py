"""Which columns of 16-bit streams a warp of the projection's backward keeps for all of its tokens."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ..device.invariant import Invariant
from .shapes import row_vectors

VECTOR = 8  # elements of 16 bytes


class Place(NamedTuple):
    """A warp's columns: `stream`; `at`, the first of them in a token's row; `inside`, vectors that exist."""

    stream: Int32
    at: Int32
    inside: Int32


class WarpColumns(Invariant):
    """`vectors` vectors of one stream to a warp.

    side_by_side: whether neighbouring warps have neighbouring columns of a stream, or else the n streams' parts of the
    same columns.
    """

    def __init__(self, n: int, side_by_side: bool):
        self.n = n
        self.side_by_side = side_by_side
        self.vectors = row_vectors(n)

    def _across(self, width: Int32) -> Int32:
        return cute.ceil_div(width, VECTOR * self.vectors)

    def warps(self, width: Int32) -> Int32:
        """That have columns. `width`: of a stream."""
        return self._across(width) * self.n

    def place(self, warp: Int32, width: Int32) -> Place:
        """By the warp's number in the grid."""
        stream, column = warp % self.n, warp // self.n
        if const_expr(self.side_by_side):
            stream, column = warp // self._across(width), warp % self._across(width)
        column *= VECTOR * self.vectors
        inside = cutlass.min(Int32(self.vectors), (width - column) // VECTOR)
        return Place(stream, stream * width + column, inside)
