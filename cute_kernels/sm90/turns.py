"""Turns of two pingpong warpgroups, which have alternate tiles; and the share of a tile (which of its slabs) that each
warpgroup computes."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from ..device.invariant import Invariant
from ..epilogue.fragments import TileShare
from ..epilogue.sizes import THREADS
from ..tiles import PINGPONG_WARPGROUPS, TileConfig

# First named barrier of each kind, one a warpgroup. Barrier 0 is the whole CTA's. Barrier 1 + w belongs to the epilogue
# of warpgroup w (sm90/epilogue/store.py): with turns, of two warpgroups.
MMA_BARRIER, EPILOGUE_BARRIER = 3, 5


class Turns(Invariant):
    """Turns of two warpgroups at a resource that both use (tensor cores, or shared staging slots), one tile at a time.

    At named barrier first_barrier + w, warpgroup w waits, and the other warpgroup arrives when it is done with its
    tile. Turns are required for correctness. Without them, a warpgroup could wait for a stage more than one round of
    the ring early. It would then mistake an older phase of the stage's barrier for its own.

    Args:
        first_barrier: named barrier of warpgroup 0.
        apply: False: every turn is this warpgroup's, and nothing waits.
        warpgroup_index: 0 or 1, this warpgroup.
    """

    def __init__(self, first_barrier: int, apply: bool, warpgroup_index: Int32):
        self.first_barrier = first_barrier
        self.apply = apply
        self.index = warpgroup_index

    def is_mine(self, turn: Int32) -> Boolean | bool:
        """Return True if the CTA's tile number `turn` is this warpgroup's: every second tile, or every tile without
        turns.
        """
        return turn % PINGPONG_WARPGROUPS == self.index if self.apply else True

    @cute.jit
    def open(self):
        """Give the first turn to warpgroup 0; called by both warpgroups before their first tile."""
        if const_expr(self.apply):
            if self.index == 1:
                self.pass_on()

    @cute.jit
    def wait(self):
        """Wait until it is this warpgroup's turn."""
        if const_expr(self.apply):
            cute.arch.barrier(
                barrier_id=self.first_barrier + self.index, number_of_threads=PINGPONG_WARPGROUPS * THREADS
            )

    @cute.jit
    def pass_on(self):
        """Give the turn to the other warpgroup."""
        if const_expr(self.apply):
            cute.arch.barrier_arrive(
                barrier_id=self.first_barrier + 1 - self.index, number_of_threads=PINGPONG_WARPGROUPS * THREADS
            )


def share_of(tile: TileConfig, turn: Int32, warpgroup: Int32) -> TileShare:
    """Return a warpgroup's share of the CTA's tile number `turn`: its slabs of 64 rows, or all slabs if warpgroups take
    turns or share the depth of a tile.
    """
    has_all = tile.takes_turns or tile.splits > 1
    return TileShare(Int32(0) if has_all else warpgroup, turn)
