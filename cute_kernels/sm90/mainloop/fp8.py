"""The FP8 mainloop: E4M3 rows of x with a scale for each 128 elements, times E4M3 weights with one scale a weight row.

Hopper's tensor cores apply no scales, and add E4M3 products in fewer bits than float32 has. So a k-tile is 128 deep,
its wgmmas start from zero, and CUDA cores promote the sum: they add it, times the scale of x's row, to float32
accumulators. Promotion takes one fused multiply-add for each result and k-tile; the tensor cores do 128 meanwhile. The
epilogue multiplies by the weights' scales.

A k-tile is multiplied and promoted piece by piece; a piece is 64 rows by 128 columns of the result. A thread has 128
accumulators, and 64 more registers for the sums of a piece. While one warpgroup of a cooperative tile promotes a piece,
the other warpgroup's wgmmas run.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...device.gmem import vector_at
from ...device.invariant import Invariant
from ...epilogue.fragments import TileShare, registers
from ...epilogue.sizes import ROWS, THREADS
from ...formats import MXFP8_WIDE
from ...quantize.scales import power_of_two
from ...schedule.work import WorkTile
from ...tiles import TileConfig
from ..gemm_policy import GemmPolicy
from ..turns import Turns
from .base import AFTER_MMA, MmaTile, Operands
from .gathered_rows import RowIndices
from .gemm import GemmMainloop

MMA_K = 32
PIECE_N = 128
PIECE_REGS = ROWS * PIECE_N // THREADS


class RowScales(Invariant):
    """The scales of a thread's rows of x, in registers: two rows in each slab of 64.

    A row's scales for one k-tile are all equal, so only the first is read. The scales of a k-tile are loaded during the
    previous k-tile; the first scales of a tile are loaded before the epilogue of the previous tile.

    Attributes:
        address: address of the scales of all rows.
        rows: indices of x's rows, if rows come by index.
        first_row: first row of the thread in the tile.
        num_rows: number of the thread's rows.
        pitch: bytes of a row's scales.
        last: index of the last k-tile.
        begins: for each row, the address of its scales.
        next: scales of the next k-tile, which are being loaded.
        count: number of scales that `take` returns.
        halves: 2 if the two halves of a piece's columns have different factors (`factor`), else 1.
        apart: two distances in rows: from a thread's pair of rows to its next pair, and between the two rows of a pair.
    """

    halves = 1
    apart = ROWS, 8

    def __init__(
        self, address: Int64, rows: RowIndices, first_row: Int32, num_rows: int, pitch: Int32, last: Int32
    ):  # fmt: skip
        self.address = address
        self.count = num_rows
        self.rows = rows
        self.first_row = first_row
        self.num_rows = num_rows
        self.pitch = Int64(pitch)
        self.last = last
        self.begins = cute.make_rmem_tensor(num_rows, Int64)
        self.next = cute.make_rmem_tensor(num_rows, Int32)

    @cute.jit
    def begin(self, work: WorkTile):
        """Start loading the first scales of a tile.

        Rows past the group's end read the scales of the group's last row; the end mark (a tile with expert < 0) reads
        row 0's scales. Any scales would do, since results of these rows are never stored.
        """
        first = work.row + self.first_row
        of_pairs, of_rows = self.apart
        for i in cutlass.range_constexpr(self.num_rows):
            row = cutlass.max(cutlass.min(first + i // 2 * of_pairs + i % 2 * of_rows, work.group_end - 1), Int32(0))
            if self.rows.address != 0:
                row = self.rows.clamped(self.rows.index_of(row))
            self.begins[i] = self.address + row * self.pitch
        self._fetch(Int32(0))

    @cute.jit
    def _fetch(self, k_tile: Int32):
        block = cutlass.min(k_tile, self.last) * MXFP8_WIDE.copies
        for i in cutlass.range_constexpr(self.num_rows):
            self.next[i] = Int32(vector_at(Uint8, self.begins[i])[block]) & 0xFF

    @cute.jit
    def take(self, k_tile: Int32) -> cute.Tensor:
        """Return the scales of a k-tile as float32, and start loading the scales of the next k-tile.

        The previous call (for the first k-tile `begin`) started the loads of the scales that this call returns.
        """
        scales = cute.make_rmem_tensor(self.num_rows, Float32)
        for i in cutlass.range_constexpr(self.num_rows):
            scales[i] = power_of_two(self.next[i])
        self._fetch(k_tile + 1)
        return scales

    def factor(self, scales: cute.Tensor, row: int, columns: int, half: int) -> Float32:
        """Return the factor for a k-tile's sums in one row of a piece (64 rows by 128 columns): here the row's scale.

        Args:
            scales: scales that `take` returned.
            row: index of the row among the thread's rows.
            columns: index of the piece along the tile's columns.
            half: which half of the piece's columns, 0 or 1; 0 if `halves` is 1.
        """
        return scales[row]


class Fp8Mainloop(GemmMainloop):
    """Mainloop that multiplies E4M3 rows of x (operand A) by E4M3 weight rows of an expert (B).

    Both operands are contiguous along the contraction. `operands.scales` is the address of the scale bytes of x's rows,
    [rows, K / 32]. During a tile's epilogue, the scales of the next tile's first k-tile are loaded.
    """

    looks_ahead = AFTER_MMA
    scales_type = RowScales

    def __init__(self, tile: TileConfig, parts: int, stages: int, policy: GemmPolicy, load_warp_gathers: bool):
        super().__init__(Float8E4M3FN, tile, parts, False, stages, policy, load_warp_gathers)
        self.pieces = tile.n // PIECE_N

    def tiled_mma(self) -> cute.TiledMma:
        """Make the MMA: wgmmas of 64 x 128; the warpgroups that share a tile are stacked along rows."""
        return sm90_utils.make_trivial_tiled_mma(
            self.dtype, self.dtype, self.a_major, self.b_major, Float32, (self.tile.warpgroups_per_tile, 1, 1),
            (ROWS, PIECE_N),
        )  # fmt: skip

    def accumulators(self) -> cute.Tensor:
        """Allocate a thread's accumulators, slab (64 rows) by slab; within a slab in the order of one wgmma over all
        columns."""
        return cute.make_rmem_tensor(self.tile.slabs * self.pieces * PIECE_REGS, Float32)

    def first_row(self, share: TileShare) -> Int32:
        """Return the index in the tile of a thread's first row of x, the first row that it has accumulators of."""
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % THREADS
        return share.first_slab * ROWS + thread // 32 * 16 + thread % 32 // 4

    def scales(self, operands: Operands, share: TileShare) -> RowScales:
        """Make the object that holds a thread's scales for all of its tiles."""
        first_row = self.first_row(share)
        k = cute.size(operands.a, mode=[1])
        last = cute.ceil_div(k, self.tile.k) - 1
        scales = self.scales_of_rows(operands)
        return self.scales_type(scales, operands.rows, first_row, self.num_rows, MXFP8_WIDE.num_scales(k), last)

    @property
    def num_rows(self) -> int:
        """Number of a thread's rows of x in a tile, two of each slab."""
        return 2 * self.tile.slabs

    def scales_of_rows(self, operands: Operands) -> Int64:
        """Return the address of the scale bytes of x's rows."""
        return operands.scales

    @cute.jit
    def _skip(self, num_k_tiles: Int32, stages: pipeline.PipelineTmaAsync, state: pipeline.PipelineState):
        """Release all stages of a tile without multiplying. Returns the advanced state.

        Each stage is released only once it is full: an earlier arrival could count for the previous round of the ring.
        """
        for _ in cutlass.range(num_k_tiles, unroll=1):
            stages.consumer_wait(state)
            stages.consumer_release(state)
            state.advance()
        return state

    @cute.jit
    def mma(
        self, acc: cute.Tensor, fragments: tuple, scales: RowScales, tile: MmaTile, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, turns: Turns,
    ):  # fmt: skip
        """Compute acc = A B^T for a tile; called by a whole warpgroup. Returns the state after the tile's k-tiles.

        If the warpgroup's share of the tile has no rows of the group, it multiplies nothing.
        """
        has_rows = tile.work.row + tile.share.first_slab * ROWS < tile.work.group_end
        acc.fill(0.0)
        num_k_tiles = scales.last + 1
        if has_rows:
            state = self._multiply(acc, *fragments, scales, num_k_tiles, stages, state)
        else:
            state = self._skip(num_k_tiles, stages, state)
        return state

    @cute.jit
    def _multiply(
        self, acc: cute.Tensor, tCrA: cute.Tensor, tCrB: cute.Tensor, scales: RowScales, num_k_tiles: Int32,
        stages: pipeline.PipelineTmaAsync, state: pipeline.PipelineState,
    ):  # fmt: skip
        """Multiply and promote all k-tiles of a tile, piece (64 rows by 128 columns) by piece.

        To promote is to add a k-tile's sums, times their scales, to float32 accumulators. Returns the advanced state.
        """
        tiled_mma = self.tiled_mma()
        partial = cute.make_rmem_tensor(PIECE_REGS, Float32)
        wgmma_acc = cute.make_tensor(partial.iterator, tiled_mma.partition_shape_C((tiled_mma.shape_mnk[0], PIECE_N)))
        for k_tile in cutlass.range(num_k_tiles, unroll=1):
            stages.consumer_wait(state)
            self.after_wait()
            taken = cute.make_rmem_tensor(scales.count, Float32)
            for piece in cutlass.range_constexpr(self.tile.slabs * self.pieces):
                slab, columns = piece // self.pieces, piece % self.pieces
                self._start_piece(tiled_mma, wgmma_acc, (tCrA, slab, state.index), (tCrB, columns, state.index))
                if const_expr(piece == 0):
                    taken.store(scales.take(k_tile).load())
                warpgroup.wait_group(0)
                self._promote(registers(acc, piece * PIECE_REGS, PIECE_REGS), partial, scales, taken, slab, columns)
            stages.consumer_release(state)
            state.advance()
        return state

    def _start_piece(
        self, tiled_mma: cute.TiledMma, acc: cute.Tensor, a: tuple[cute.Tensor, int, Int32],
        b: tuple[cute.Tensor, int, Int32],
    ) -> None:  # fmt: skip
        """Start the MMAs of one piece (64 rows by 128 columns) of a k-tile; `acc` receives their sum, from zero.

        Args:
            a: descriptors of A, the slab's index, the stage's index.
            b: descriptors of B, the piece's index along columns, the stage's index.
        """
        warpgroup.fence()
        for k_block in range(self.tile.k // MMA_K):
            tiled_mma.set(warpgroup.Field.ACCUMULATE, Boolean(k_block > 0))
            taken = [cute.append_ones(of[None, part, k_block, stage], 2) for of, part, stage in (a, b)]
            cute.gemm(tiled_mma, acc, *taken, acc)
        warpgroup.commit_group()

    @cute.jit
    def _promote(
        self, acc: cute.Tensor, partial: cute.Tensor, scales: RowScales, taken: cute.Tensor,
        slab: cutlass.Constexpr[int], columns: cutlass.Constexpr[int],
    ):  # fmt: skip
        """Promote a piece (64 rows by 128 columns): add its sums, times their factors, to the accumulators.

        The loop finishes one row before the other, so that only every second multiply-add reads the scale from its
        register (`.reuse`). In register order, two elements of one row alternate with two of the other. Then four
        multiply-adds took 6 cycles if ptxas put the scales into different register banks, and 8 cycles if not: 3 to 7 %
        of the whole loop.

        Args:
            acc: the piece's accumulators.
            partial: the piece's sums of one k-tile.
            scales: the thread's RowScales.
            taken: the k-tile's scales, from `scales.take`.
            slab: index of the piece's slab (64 rows of the tile).
            columns: index of the piece along columns.
        """
        regs = PIECE_REGS // 2 // scales.halves
        for row in cutlass.range_constexpr(2):
            for half in cutlass.range_constexpr(scales.halves):
                factor = scales.factor(taken, 2 * slab + row, columns, half)
                for i in cutlass.range_constexpr(half * regs, (half + 1) * regs):
                    at = i // 2 * 4 + row * 2 + i % 2
                    acc[at] += partial[at] * factor
