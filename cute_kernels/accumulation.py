"""The order in which a GEMM adds. Plain Python: the host asks which kernels agree in it."""

from __future__ import annotations

from typing import NamedTuple

NEIGHBOURS = "neighbours"
"""Elements of the contraction that one instruction adds lie together, and instructions follow the contraction."""


class Accumulation(NamedTuple):
    """The order in which a GEMM adds the products of one element of its result.

    Kernels that multiply the same operands and agree in this give an element the same bits, whatever their tiles are.

    Attributes:
        mma: the instruction that multiplies and adds.
        depth: elements of the contraction that one instruction adds.
        places: where in the contraction these elements lie.
        parts: parts of each k-tile that have sums of their own, which are added last, in their order.
        promoted: elements of the contraction whose sum is scaled and then added in float32; 0: none.
    """

    mma: str
    depth: int
    places: str = NEIGHBOURS
    parts: int = 1
    promoted: int = 0

    def __str__(self) -> str:
        """Say the order in words."""
        words = [f"{self.mma} of depth {self.depth}"]
        if self.places != NEIGHBOURS:
            words.append(f"elements {self.places}")
        if self.parts > 1:
            words.append(f"{self.parts} parts of each k-tile, added last")
        if self.promoted:
            words.append(f"promoted every {self.promoted}")
        return ", ".join(words)
