"""The FP8 mainloop of 4-bit weights and few rows: decoded weights are the rows of the MMA, and rows of x its columns.

Weights are loaded and decoded as in decoded_fp8.py. There an MMA multiplies 64 rows of x, and CUDA cores promote the
sums of 64 rows, even if a group has few rows. Here an MMA has as many columns as the tile has rows of x (16 or 32), so
decoding bounds the loop, not MMAs. A sum has the same products in the same order as there, hence the same bits.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...epilogue.fragments import TileShare
from ...epilogue.sizes import ROWS, THREADS
from .decoded_fp8 import DecodedFp8Mainloop
from .fp8 import RowScales


class ColumnScales(RowScales):
    """The scales of a thread's rows of x. They are the thread's columns of the MMA: two of every 8."""

    apart = 8, 1


class SwappedFp8Mainloop(DecodedFp8Mainloop):
    """`DecodedFp8Mainloop` whose MMAs have the decoded weights as rows. One warpgroup multiplies all slabs (64 weight
    rows) of a tile."""

    scales_type = ColumnScales

    def tiled_mma(self) -> cute.TiledMma:
        """Make the MMA: wgmmas of 64 weight rows by tile.m rows of x."""
        return sm90_utils.make_trivial_tiled_mma(
            self.dtype, self.dtype, self.b_major, self.a_major, Float32, (1, 1, 1), (ROWS, self.tile.m)
        )

    def fragments(self, sA: cute.Tensor, sB: cute.Tensor, slab: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """Return wgmma descriptors of the decoded weights and of the rows of x."""
        mma = self.tiled_mma()
        thread_mma = mma.get_slice(Int32(0))
        return mma.make_fragment_A(thread_mma.partition_A(sB)), mma.make_fragment_B(thread_mma.partition_B(sA))

    @property
    def slab_regs(self) -> int:
        """Number of a thread's accumulators for one slab: 64 weight rows by tile.m rows of x, over 128 threads."""
        return ROWS * self.tile.m // THREADS

    def accumulators(self) -> cute.Tensor:
        """Allocate a thread's accumulators: `slab_regs` registers for each slab (64 weight rows of the tile), slab 0
        first."""
        return cute.make_rmem_tensor(self.tile.slabs * self.slab_regs, Float32)

    def first_row(self, share: TileShare) -> Int32:
        """Return a thread's first row of x in the tile. Rows of x are the MMA's columns, since operands are swapped."""
        return cute.arch.lane_idx() % 4 * 2

    @property
    def num_rows(self) -> int:
        """Number of a thread's rows of x in a tile, two of every 8."""
        return self.tile.m // 4

    @cute.jit
    def _multiply(
        self, acc: cute.Tensor, weights: cute.Tensor, columns: cute.Tensor, scales: ColumnScales, num_k_tiles: Int32,
        stages: pipeline.PipelineTmaAsync, state: pipeline.PipelineState,
    ):  # fmt: skip
        """Multiply and promote all k-tiles of a tile. Returns the advanced state.

        The MMAs of all slabs of a k-tile are in flight together; a slab is promoted during the MMAs of the next slabs.
        """
        tiled_mma, slabs, regs = self.tiled_mma(), self.tile.slabs, self.slab_regs
        partial = cute.make_rmem_tensor(slabs * regs, Float32)
        shape = tiled_mma.partition_shape_C((ROWS, self.tile.m))
        for k_tile in cutlass.range(num_k_tiles, unroll=1):
            stages.consumer_wait(state)
            self.decoded.wait_full(state.count)
            slot = self.decoded.slot(state.count)
            for slab in cutlass.range_constexpr(slabs):
                sums = cute.make_tensor(partial.iterator + slab * regs, shape)
                self._start_piece(tiled_mma, sums, (weights, slab, slot), (columns, 0, state.index))
            taken = scales.take(k_tile)
            for slab in cutlass.range_constexpr(slabs):
                warpgroup.wait_group(slabs - 1 - slab)
                if const_expr(slab == slabs - 1):
                    self.decoded.release(state.count)
                    stages.consumer_release(state)
                for i in cutlass.range_constexpr(regs):
                    acc[slab * regs + i] += partial[slab * regs + i] * taken[i // 4 * 2 + i % 2]
            state.advance()
        return state
