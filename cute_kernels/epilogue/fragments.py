"""A thread's accumulators, and which part of a tile is a warpgroup's.

A warpgroup is four warps, which have slabs of 64 x n. Thread t has of each 8 columns j and for v = 0..3 the element
(16 (t / 32) + (t % 32) / 4 + 8 (v / 2), 8 j + 2 (t % 4) + v % 2) at register 4 j + v: what one MMA of a warpgroup
leaves, and MMAs of four warps with 16 rows each.

Of an accumulator in tensor memory a slab is 16 of each warp's 32 rows (`TileConfig.slab_step`).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from ..device.invariant import Invariant
from .sizes import ROWS, THREADS


class Accumulators(Invariant):
    """Accumulators that are elsewhere, and are read into registers slab by slab, in order and once each."""

    def slab(self, slab: int) -> cute.Tensor:
        """A thread's accumulators of a slab."""
        raise NotImplementedError


def registers(acc: cute.Tensor, first: int = 0, count: int | None = None) -> cute.Tensor:
    """A thread's accumulators as a vector, in the order above."""
    count = cute.size(acc) - first if count is None else count
    return cute.make_tensor(acc.iterator + first, cute.make_layout(count))


def slab_of(acc: cute.Tensor | Accumulators, slab: int, slabs: int) -> cute.Tensor:
    """A thread's accumulators of one of its slabs."""
    if isinstance(acc, Accumulators):
        return acc.slab(slab)
    count = cute.size(acc) // slabs
    return registers(acc, slab * count, count)


def chunk_of(acc: cute.Tensor, chunk: int, cols: int) -> cute.Tensor:
    """A thread's accumulators of one chunk of `cols` columns."""
    regs = ROWS * cols // THREADS
    return registers(acc, chunk * regs, regs)


class TileShare(NamedTuple):
    """A warpgroup's share of a tile: its slabs from `first_slab` on. `turn`: the tiles that the CTA had before."""

    first_slab: Int32
    turn: Int32
