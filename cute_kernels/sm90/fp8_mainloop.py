"""The FP8 mainloop: E4M3 rows with a scale for each 128 of the contraction, times weights folded to one scale a row.

Hopper's tensor cores know no scales, and add E4M3 products in fewer bits than float32 has. So a k-tile is 128 deep, its
wgmmas start from zero, and CUDA cores add their sum, times the row's scale, to float32 accumulators: one fused
multiply-add for each element and k-tile, beside 128 in the tensor cores. The weights' scales are left to the epilogue.

A thread has 128 accumulators, and 64 for a k-tile of a `piece`: 64 rows and 128 columns. While one warpgroup of a
cooperative tile promotes a piece, the other's wgmmas run.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import warpgroup

from ..gmem import vector_at
from ..invariant import Invariant
from ..specs import TileConfig
from .epilogue import TileShare, registers
from .mainloop import GemmMainloop, Operands
from .scales import power_of_two
from .store import ROWS
from .tile_scheduler import WorkTile
from .turns import THREADS, Turns

MMA_K = 32
PIECE_N = 128
PIECE_REGS = ROWS * PIECE_N // THREADS
SCALE_BLOCK = 32
"""Elements that have a scale byte of their own in memory; a k-tile's four are equal, and the first is read."""


class RowScales(Invariant):
    """Where the scales of a thread's rows lie, two rows a slab, and those of the next k-tile, on their way.

    last: the last k-tile. has_rows: whether the warpgroup's share of the tile has any.
    """

    def __init__(self, rows: list[Int64], last: Int32, has_rows: Boolean):
        self.rows = rows
        self.last = last
        self.has_rows = has_rows
        self.next = cute.make_rmem_tensor(len(rows), Int32)

    @cute.jit
    def fetch(self, k_tile: Int32):
        block = cutlass.min(k_tile, self.last) * (PIECE_N // SCALE_BLOCK)
        for i in cutlass.range_constexpr(len(self.rows)):
            self.next[i] = Int32(vector_at(Uint8, self.rows[i])[block]) & 0xFF

    @cute.jit
    def take(self, k_tile: Int32) -> cute.Tensor:
        """The scales of a k-tile, which the call before asked for; asks for the next one's."""
        scales = cute.make_rmem_tensor(len(self.rows), Float32)
        for i in cutlass.range_constexpr(len(self.rows)):
            scales[i] = power_of_two(self.next[i])
        self.fetch(k_tile + 1)
        return scales


class Fp8Mainloop(GemmMainloop):
    """A: E4M3 rows of x; B: ranges of an expert's E4M3 weight rows; both along the contraction.

    `scales` of the operands is the address of x's scale bytes, [T, K / 32].
    """

    def __init__(self, tile: TileConfig, parts: int, stages: int):
        super().__init__(Float8E4M3FN, tile, parts, False, stages)
        self.pieces = tile.n // PIECE_N

    def tiled_mma(self) -> cute.TiledMma:
        """64 x 128 wgmmas, the warpgroups of a tile stacked along rows."""
        return sm90_utils.make_trivial_tiled_mma(
            self.dtype, self.dtype, self.a_major, self.b_major, Float32, (self.tile.warpgroups_per_tile, 1, 1),
            (ROWS, PIECE_N),
        )  # fmt: skip

    def accumulators(self) -> cute.Tensor:
        """A thread's accumulators: slab by slab, in the order that one wgmma of all columns would have."""
        return cute.make_rmem_tensor(self.tile.slabs * self.pieces * PIECE_REGS, Float32)

    def begin(self, operands: Operands, work: WorkTile, share: TileShare) -> RowScales:
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % THREADS
        first = work.row + share.first_slab * ROWS + thread // 32 * 16 + thread % 32 // 4
        # Rows behind the group's end are never stored: any row's scale will do.
        rows = (cutlass.min(first + i // 2 * ROWS + i % 2 * 8, work.group_end - 1) for i in range(2 * self.tile.slabs))
        pitch = Int64(cute.size(operands.a, mode=[1]) // SCALE_BLOCK)
        has_rows = work.row + share.first_slab * ROWS < work.group_end
        last = self.num_k_tiles(operands, work) - 1
        scales = RowScales([operands.scales + row * pitch for row in rows], last, has_rows)
        scales.fetch(Int32(0))
        return scales

    @cute.jit
    def _skip(self, num_k_tiles: Int32, stages: pipeline.PipelineTmaAsync, state: pipeline.PipelineState):
        """Pass over a tile's stages, each once it is full: released before, it could count for a round too early."""
        for _ in cutlass.range(num_k_tiles, unroll=1):
            stages.consumer_wait(state)
            stages.consumer_release(state)
            state.advance()
        return state

    @cute.jit
    def mma(
        self, acc: cute.Tensor, tCrA: cute.Tensor, tCrB: cute.Tensor, scales: RowScales, num_k_tiles: Int32,
        stages: pipeline.PipelineTmaAsync, state: pipeline.PipelineState, turns: Turns,
    ):  # fmt: skip
        acc.fill(0.0)
        turns.wait()
        if scales.has_rows:
            state = self._multiply(acc, tCrA, tCrB, scales, num_k_tiles, stages, state)
        else:
            state = self._skip(num_k_tiles, stages, state)
        turns.pass_on()
        return state

    @cute.jit
    def _multiply(
        self, acc: cute.Tensor, tCrA: cute.Tensor, tCrB: cute.Tensor, scales: RowScales, num_k_tiles: Int32,
        stages: pipeline.PipelineTmaAsync, state: pipeline.PipelineState,
    ):  # fmt: skip
        tiled_mma = self.tiled_mma()
        partial = cute.make_rmem_tensor(PIECE_REGS, Float32)
        wgmma_acc = cute.make_tensor(partial.iterator, tiled_mma.partition_shape_C((tiled_mma.shape_mnk[0], PIECE_N)))
        for k_tile in cutlass.range(num_k_tiles, unroll=1):
            stages.consumer_wait(state)
            row_scales = cute.make_rmem_tensor(2 * self.tile.slabs, Float32)
            for piece in cutlass.range_constexpr(self.tile.slabs * self.pieces):
                slab, columns = piece // self.pieces, piece % self.pieces
                warpgroup.fence()
                for k_block in cutlass.range_constexpr(self.tile.k // MMA_K):
                    tiled_mma.set(warpgroup.Field.ACCUMULATE, Boolean(k_block > 0))
                    a = cute.append_ones(tCrA[None, slab, k_block, state.index], 2)
                    b = cute.append_ones(tCrB[None, columns, k_block, state.index], 2)
                    cute.gemm(tiled_mma, wgmma_acc, a, b, wgmma_acc)
                warpgroup.commit_group()
                if const_expr(piece == 0):
                    row_scales.store(scales.take(k_tile).load())
                warpgroup.wait_group(0)
                self._promote(registers(acc, piece * PIECE_REGS, PIECE_REGS), partial, row_scales, slab)
            stages.consumer_release(state)
            state.advance()
        return state

    @cute.jit
    def _promote(self, acc: cute.Tensor, partial: cute.Tensor, scales: cute.Tensor, slab: cutlass.Constexpr[int]):
        for i in cutlass.range_constexpr(PIECE_REGS):
            acc[i] += partial[i] * scales[2 * slab + i // 2 % 2]
