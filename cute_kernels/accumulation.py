"""The order in which a GEMM adds its products. Plain Python, since host code compares kernels by this order."""

from __future__ import annotations

from typing import NamedTuple

NEIGHBOURS = "neighbours"
"""The usual value of `Accumulation.places`: an instruction adds neighbouring elements of the contraction, and
instructions go through the contraction in order."""


class Accumulation(NamedTuple):
    """The order in which a GEMM adds the products of one element of its result.

    Two kernels with equal Accumulations give an element the same bits from the same operands, whatever their tiles are.

    Attributes:
        mma: the instruction that multiplies and adds.
        depth: elements of the contraction that one instruction adds.
        places: says where in the contraction these elements lie; NEIGHBOURS: together.
        parts: number of equal parts into which each k-tile is split. Each part has a sum of its own over all k-tiles;
            at the end these sums are added in order. 1: one sum.
        promoted: number of elements of the contraction after which the sum so far is scaled and added to a float32 sum;
            0: products are not promoted.
        shares: number of sums to which k-tiles go alternately: each sum has every `shares`-th k-tile. At the end these
            sums are added in order. 1: one sum.
    """

    mma: str
    depth: int
    places: str = NEIGHBOURS
    parts: int = 1
    promoted: int = 0
    shares: int = 1

    def __str__(self) -> str:
        """Return the order in words, for messages and tables."""
        words = [f"{self.mma} of depth {self.depth}"]
        if self.places != NEIGHBOURS:
            words.append(f"elements {self.places}")
        if self.parts > 1:
            words.append(f"{self.parts} parts of each k-tile, added last")
        if self.shares > 1:
            words.append(f"{self.shares} sums, which take turns at k-tiles, added last")
        if self.promoted:
            words.append(f"promoted every {self.promoted}")
        return ", ".join(words)
