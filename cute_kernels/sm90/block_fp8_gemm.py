"""The grouped GEMM of rows of x and weights that are both in FP8 with float32 block scales.

The mainloop multiplies the sum of each k-tile by the scale of x's row times the scale of the weight block, and then
adds it to float32 accumulators (mainloop/block_fp8.py).
"""

import cutlass.cute as cute
from cutlass import Int32, Int64

from ..epilogue.base import Inputs
from ..formats import FP8_ROWS
from ..memory.block_scales import block_grid
from .grouped_gemm import GroupedFp8Gemm
from .mainloop.block_fp8 import BlockFp8Mainloop, ScaleSources


class GroupedBlockFp8Gemm(GroupedFp8Gemm):
    """FP8 GEMM with float32 scales: one for each 128 columns of a row of x, one for each 128 x 128 block of w."""

    def make_mainloop(self) -> BlockFp8Mainloop:
        shape = self.shape
        return BlockFp8Mainloop(
            self.tile, shape.parts, shape.layout, self.stages, self.policy, shape.has_load_warp
        )  # fmt: skip

    def mainloop_scales(self, x: cute.Tensor, w: cute.Tensor, x_scale: Int64, inputs: Inputs) -> ScaleSources:
        rows, parts, layout = Int32(w.shape[1]), self.shape.parts, self.shape.layout
        blocks = FP8_ROWS.num_scales(Int32(x.shape[1]))
        grid = block_grid(inputs.w_scale, layout, inputs.gate, parts, rows, blocks)
        return ScaleSources(x_scale, grid, inputs.gate, rows // parts)
