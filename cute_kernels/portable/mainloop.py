"""The portable mainloop: cp.async fills stages in shared memory, ldmatrix reads them, mma.sync multiplies.

The four warps of a CTA share a tile:

    128 x 128    each warp has 16 rows of each slab (64 rows), over all columns. So a thread's accumulators are in the
                 order of epilogue/fragments.py, and the epilogues that all architectures share can be used.
    16 x 128     for few rows: each warp multiplies a quarter of every stage's depth, and the first warp adds the four
                 sums. Such a tile is called split (split.py).

Terms: a stage holds a *k-tile*, 64 elements of the contraction, of both operands. A *run* is the k-tiles between two
barriers, 1 or 2 (operands.py). A *step* is 16 elements of a k-tile's depth, which one MMA multiplies.

Two CTAs share an SM: one multiplies while the other stores or waits for its first stage.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..device.invariant import Invariant
from ..device.opaque import opaque
from ..device.select import select
from ..device.warp_mma import WarpMma
from ..device.warps import WARP
from ..epilogue.sizes import ROWS
from ..tiles import TileConfig
from .split import WARPS, is_split

DEPTH = 64
CTAS_PER_SM = 2
MMA_K = 16
SMEM_BYTES, MAX_STAGES = 96 * 1024, 8
"""Bytes of shared memory for all stages, and the greatest number of stages.

Of the 99 KB that consumer GPUs have, 3 KB remain. More than 8 stages hide no more latency.
"""


class Mainloop(Invariant):
    """The mainloop of a tile: acc += A B^T.

    Args:
        a, b: the operands (operands.py).
        smem: address in shared memory, from which on the stages of both operands lie.
    """

    def __init__(self, dtype: type[cutlass.Numeric], tile: TileConfig, a: Any, b: Any, smem: Int32):
        self.a, self.b = a, b
        room = SMEM_BYTES - b.decoded_bytes
        self.stages = int(min(MAX_STAGES, room // (a.stage_bytes + b.stage_bytes))) // b.run * b.run
        self.slabs, self.n, self.is_split = tile.slabs, tile.n, is_split(tile)
        self.warp_mma = WarpMma(dtype)
        a.smem, b.smem = smem, smem + self.stages * a.stage_bytes
        self.smem = smem
        thread, _, _ = cute.arch.thread_idx()
        self.warp, self.lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP

    @cute.jit
    def run(self, acc: cute.Tensor, a: Any, b: Any, depth: Int32):
        """Contract `depth` elements into the thread's accumulators; called by the whole CTA.

        When this returns, all stages are free.

        Args:
            acc: the thread's accumulators.
            a, b: the operands' addresses in global memory, which each operand's `copy` takes.
        """
        run = self.b.run
        # The last run may end with a k-tile of zeros.
        num_tiles = cute.ceil_div(depth, DEPTH * run) * run
        # Without `opaque`, the distances of the first copies' lines stay in 8 registers from tile to tile.
        zero = opaque(Int32(0))
        for first in cutlass.range_constexpr(0, self.stages - run, run):
            self._fill(a, b, Int32(first), zero + first, num_tiles, depth)
        stage = Int32(0)
        for tile in cutlass.range(0, num_tiles, run, unroll=1):
            cute.arch.cp_async_wait_group(self.stages // run - 2)
            cute.arch.sync_threads()
            self._fill(a, b, self._before(stage), tile + (self.stages - run), num_tiles, depth)
            if cutlass.const_expr(self.b.decodes):
                self.b.decode(stage)
                cute.arch.sync_threads()
            for place in cutlass.range_constexpr(run):
                self._multiply(acc, stage + place, tile + place)
            stage = select(stage == self.stages - run, Int32(0), stage + run)
        if cutlass.const_expr(self.b.notes_nans):
            self._add_nans(acc)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

    @cute.jit
    def _fill(self, a: Any, b: Any, stage: Int32, tile: Int32, num_tiles: Int32, depth: Int32):
        """Start to copy one run (the k-tiles between two barriers) of both operands, from k-tile `tile` on, into the
        stages from `stage` on.

        Nothing is copied past the last k-tile. Always commit one cp.async group, even an empty one, so that wait counts
        stay fixed.

        Args:
            a, b: the operands' addresses in global memory.
            num_tiles: number of k-tiles of the contraction, rounded up to whole runs.
            depth: elements of the contraction; operands are zero past it.
        """
        if tile < num_tiles:
            for place in cutlass.range_constexpr(self.b.run):
                self.a.copy(a, stage + place, (tile + place) * DEPTH, depth)
                self.b.copy(b, stage + place, (tile + place) * DEPTH, depth)
        self.b.advance(b, tile, self._before(stage))
        cute.arch.cp_async_commit_group()

    def _before(self, stage: Int32) -> Int32:
        """Return the first stage of the previous run (k-tiles between two barriers), around the ring of stages.

        stage: the first stage of a run.
        """
        return select(stage == 0, Int32(self.stages), stage) - self.b.run

    @cute.jit
    def _multiply(self, acc: cute.Tensor, stage: Int32, tile: Int32):
        """Multiply the k-tile in a stage, and add to the thread's accumulators `acc`. tile: the k-tile's index in the
        contraction."""
        if cutlass.const_expr(self.is_split):
            self._step(acc, stage, tile, self.warp)
        else:
            for k in cutlass.range_constexpr(DEPTH // MMA_K):
                self._step(acc, stage, tile, k)

    def _step(self, acc: cute.Tensor, stage: Int32, tile: Int32, k: Int32 | int) -> None:
        """Multiply step `k` of a k-tile (16 elements of its depth) for all rows of this warp and all columns, and add
        to the thread's accumulators `acc`.

        Args:
            stage: the stage that holds the k-tile.
            tile: the k-tile's index in the contraction.
        """
        first_row = 0 if self.is_split else self.warp * 16
        rows = [self.b.rows_of(self.a, stage, slab * ROWS + first_row, tile, k) for slab in range(self.slabs)]
        for pair in range(self.n // 16):
            self._add(acc, rows, pair, self.b.columns(stage, pair, k))

    def _add(self, acc: cute.Tensor, rows: list, pair: int, columns: Any) -> None:
        """Multiply this warp's 16 rows of each slab (64 rows of the tile) by 16 columns, and add to the accumulators.

        Args:
            acc: the thread's accumulators.
            rows: for each slab, four words of mma.sync's operand a.
            pair: number of the 16 columns, which begin at column 16 * `pair`.
            columns: words of mma.sync's operand b, from b's `columns`.
        """
        for slab, half in ((slab, half) for slab in range(self.slabs) for half in range(2)):
            first = slab * (self.n // 2) + (2 * pair + half) * 4
            sums = cute.make_tensor(acc.iterator + first, cute.make_layout(4))
            self.warp_mma.add(sums, [rows[slab][i] for i in range(4)], [columns[2 * half], columns[2 * half + 1]])

    def _add_nans(self, acc: cute.Tensor) -> None:
        """Add NaN to all accumulators of columns in which operand b held a NaN, since its `columns` returned these NaNs
        as numbers.

        To do so, multiply rows of zeros by columns of NaN.
        """
        for pair in range(self.n // 16):
            self._add(acc, [[Int32(0)] * 4] * self.slabs, pair, self.b.nans(pair))

    @cute.jit
    def add_up(self, acc: cute.Tensor):
        """If the tile is split (each warp multiplied a part of the depth), add the warps' sums; otherwise do nothing.

        Warp 0 adds the accumulators of warps 1, 2 and 3, in this order, to its own.
        """
        if cutlass.const_expr(self.is_split):
            count = cute.size(acc)
            pointer = cute.make_ptr(Float32, self.smem, cute.AddressSpace.smem, assumed_align=16)
            parts = cute.make_tensor(pointer, cute.make_layout((4, WARP, count // 4, WARPS)))
            if self.warp > 0:
                for i in cutlass.range_constexpr(count // 4):
                    four = cute.make_tensor(acc.iterator + 4 * i, cute.make_layout(4))
                    cute.autovec_copy(four, parts[None, self.lane, i, self.warp])
            cute.arch.sync_threads()
            if self.warp == 0:
                four = cute.make_rmem_tensor(4, Float32)
                for i in cutlass.range_constexpr(count // 4):
                    for part in cutlass.range_constexpr(1, WARPS):
                        cute.autovec_copy(parts[None, self.lane, i, part], four)
                        for j in cutlass.range_constexpr(4):
                            acc[4 * i + j] += four[j]
            cute.arch.sync_threads()
