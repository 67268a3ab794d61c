"""The order of a thread's accumulators, and a warpgroup's share of a tile.

A warpgroup is four warps. Its accumulators of a slab, 64 x n, are spread over 128 threads: for each group j of 8
columns and v = 0..3, register 4 j + v of thread t holds the element in row 16 (t / 32) + (t % 32) / 4 + 8 (v / 2) and
column 8 j + 2 (t % 4) + v % 2. One MMA of a warpgroup leaves registers in this order, and so do MMAs of four warps with
16 rows each.

In tensor memory a slab is 16 of the 32 rows of each of the four warps (`TileConfig.slab_step`).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from ..device.invariant import Invariant
from .sizes import ROWS, THREADS


class Accumulators(Invariant):
    """Accumulators that are not in registers. `slab` reads them; it is called once for each slab, in order."""

    def slab(self, slab: int) -> cute.Tensor:
        """Read a thread's accumulators of slab number `slab`, 64 rows of the tile."""
        raise NotImplementedError


def registers(acc: cute.Tensor, first: int = 0, count: int | None = None) -> cute.Tensor:
    """Return a view of `count` of a thread's accumulators, from number `first` on, in the order at the top of this
    file. count None: all from `first` on."""
    count = cute.size(acc) - first if count is None else count
    return cute.make_tensor(acc.iterator + first, cute.make_layout(count))


def slab_of(acc: cute.Tensor | Accumulators, slab: int, slabs: int) -> cute.Tensor:
    """Return a thread's accumulators of slab number `slab`, 64 rows of the tile. slabs: number of slabs that acc
    holds."""
    if isinstance(acc, Accumulators):
        return acc.slab(slab)
    count = cute.size(acc) // slabs
    return registers(acc, slab * count, count)


def chunk_of(acc: cute.Tensor, chunk: int, cols: int) -> cute.Tensor:
    """Return a thread's accumulators of chunk number `chunk` of a slab (64 rows). cols: columns of a chunk, which are
    stored at once."""
    regs = ROWS * cols // THREADS
    return registers(acc, chunk * regs, regs)


class TileShare(NamedTuple):
    """The part of a tile that a warpgroup computes (its share): some or all of the tile's slabs.

    Attributes:
        first_slab: the first of the warpgroup's slabs (64 rows each) in the tile.
        turn: how many tiles the CTA had before this one.
    """

    first_slab: Int32
    turn: Int32
