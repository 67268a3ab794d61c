"""The order of a thread's accumulators, and a warpgroup's share of a tile.

A warpgroup is four warps, which share slabs of 64 x n. For each 8 columns j and v = 0..3, register 4 j + v of thread t
holds the element (16 (t / 32) + (t % 32) / 4 + 8 (v / 2), 8 j + 2 (t % 4) + v % 2). One MMA of a warpgroup leaves
registers in this order, and so do MMAs of four warps with 16 rows each.

In tensor memory a slab is 16 of each warp's 32 rows (`TileConfig.slab_step`).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from ..device.invariant import Invariant
from .sizes import ROWS, THREADS


class Accumulators(Invariant):
    """Accumulators outside of registers. They are read into registers slab by slab, in order and once each."""

    def slab(self, slab: int) -> cute.Tensor:
        """Read a thread's accumulators of a slab."""
        raise NotImplementedError


def registers(acc: cute.Tensor, first: int = 0, count: int | None = None) -> cute.Tensor:
    """Return `count` of a thread's accumulators from `first` on as a vector, in the order above; None: all of them."""
    count = cute.size(acc) - first if count is None else count
    return cute.make_tensor(acc.iterator + first, cute.make_layout(count))


def slab_of(acc: cute.Tensor | Accumulators, slab: int, slabs: int) -> cute.Tensor:
    """Return a thread's accumulators of one of its `slabs` slabs."""
    if isinstance(acc, Accumulators):
        return acc.slab(slab)
    count = cute.size(acc) // slabs
    return registers(acc, slab * count, count)


def chunk_of(acc: cute.Tensor, chunk: int, cols: int) -> cute.Tensor:
    """Return a thread's accumulators of one chunk of `cols` columns."""
    regs = ROWS * cols // THREADS
    return registers(acc, chunk * regs, regs)


class TileShare(NamedTuple):
    """A warpgroup's share of a tile: slabs from `first_slab` on. turn: how many tiles the CTA had before this one."""

    first_slab: Int32
    turn: Int32
