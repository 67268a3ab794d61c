"""MMA warpgroups that share the depth of a tile and add their sums (schedules "swapped_halves", "swapped_quarters").

Warpgroup w multiplies the k-tiles w, w + splits, w + 2 splits, ... At the end of a tile each warpgroup writes its
accumulators to shared memory, and one of them, another one for each tile, adds all of them and runs the epilogue. The
other warpgroups go on with the next tile.

The number of stages is a multiple of `splits`, so that within a tile a stage always has the same reader. Otherwise a
stage's next reader might begin to wait while the phase two before the awaited one has not ended. Both phases have the
same parity, so a wait on an mbarrier cannot tell them apart.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Float32, Int32

from ..device.invariant import Invariant
from ..epilogue.sizes import THREADS
from ..tiles import TileConfig

# Named barrier at which the warpgroups of a CTA wait for each other's sums. Lower ones belong to epilogues and to turns
# (turns.py).
SUMS_BARRIER = 7
# While one tile's sums are being added, the next tile's sums may be written.
BUFFERS = 2
# Accumulators that one access to shared memory moves: 16 bytes.
VECTOR = 4


class KTiles(Invariant):
    """The k-tiles of a tile that this warpgroup multiplies: all of them or, if warpgroups share the depth, every
    `splits`-th one.

    Attributes:
        splits: number of warpgroups that share the depth.
        total: number of k-tiles of a tile.
        first: number of the warpgroup's first k-tile.
        count: how many k-tiles the warpgroup multiplies.
    """

    def __init__(self, splits: int, total: Int32):
        self.splits = splits
        self.total = total
        self.first: Int32 | int = 0
        self.count = total
        if splits > 1:
            thread, _, _ = cute.arch.thread_idx()
            self.first = cute.arch.make_warp_uniform(thread // THREADS - 1) % splits
            self.count = (total + (splits - 1) - self.first) // splits

    def number(self, i: Int32) -> Int32:
        """Return the number, in the tile, of the warpgroup's i-th k-tile; past the tile's end, of the last k-tile."""
        return i if self.splits == 1 else cutlass.min(self.first + i * self.splits, self.total - 1)

    def state(self, state: pipeline.PipelineState) -> pipeline.PipelineState:
        """Return the pipeline state of the warpgroup's first k-tile. state: the tile's state at its first k-tile."""
        state = state.clone()
        state.advance(self.first)
        return state


def sums_size(tile: TileConfig) -> int:
    """Return the number of float32 elements of shared memory in which warpgroups exchange sums; 0: they do not."""
    return BUFFERS * tile.splits * THREADS * tile.accumulators if tile.splits > 1 else 0


class SharedSums(Invariant):
    """The sums that the warpgroups of a CTA exchange.

    Args:
        tile: the kernel's tile.
        memory: shared memory for `sums_size` float32 elements.
        index: this warpgroup's index.
    """

    def __init__(self, tile: TileConfig, memory: cute.Pointer, index: Int32):
        thread, _, _ = cute.arch.thread_idx()
        self.splits = tile.splits
        self.index = index
        layout = cute.make_layout((VECTOR, THREADS, tile.accumulators // VECTOR, tile.splits, BUFFERS))
        self.mine = cute.make_tensor(memory, layout)[None, thread % THREADS, None, None, None]

    @cute.jit
    def collect(self, acc: cute.Tensor, turn: Int32) -> Boolean:
        """Give this warpgroup's sums of a tile to the others. Return True in one warpgroup, whose `acc` then holds the
        sums of all warpgroups, added in order.

        turn: how many tiles the CTA had before this one.
        """
        sums = self.mine[None, None, None, turn % BUFFERS]
        own = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
        vectors = cute.make_tensor(acc.iterator, cute.make_layout((VECTOR, cute.size(acc) // VECTOR)))
        cute.autovec_copy(vectors, sums[None, None, self.index])
        cute.arch.barrier(barrier_id=SUMS_BARRIER, number_of_threads=self.splits * THREADS)
        adds = turn % self.splits == self.index
        if adds:
            own.fill(0.0)
            for other in cutlass.range_constexpr(self.splits):
                part = cute.make_rmem_tensor((VECTOR, cute.size(acc) // VECTOR), Float32)
                cute.autovec_copy(sums[None, None, other], part)
                for i in cutlass.range_constexpr(cute.size(acc)):
                    own[i] += part[i]
        return adds
