"""A thread's accumulators, and which part of a tile is a warpgroup's.

wgmma's accumulator of 64 x n gives thread t of the warpgroup, for each 8 columns j and v = 0..3, the element
(16 (t / 32) + (t % 32) / 4 + 8 (v / 2), 8 j + 2 (t % 4) + v % 2) at register 4 j + v.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from ..tiles import TileConfig
from .budget import ROWS
from .turns import THREADS


def registers(acc: cute.Tensor, first: int = 0, count: int | None = None) -> cute.Tensor:
    """A thread's accumulators as a vector, in the order above."""
    count = cute.size(acc) - first if count is None else count
    return cute.make_tensor(acc.iterator + first, cute.make_layout(count))


def chunk_of(acc: cute.Tensor, chunk: int, cols: int) -> cute.Tensor:
    """A thread's accumulators of one chunk of `cols` columns."""
    regs = ROWS * cols // THREADS
    return registers(acc, chunk * regs, regs)


class TileShare(NamedTuple):
    """A warpgroup's share of a tile: its slabs from `first_slab` on. `turn`: the tiles that the CTA had before."""

    first_slab: Int32
    turn: Int32


def share_of(tile: TileConfig, turn: Int32, warpgroup: Int32) -> TileShare:
    """A warpgroup's share of the CTA's tile number `turn`."""
    return TileShare(Int32(0) if tile.takes_turns else warpgroup, turn)
