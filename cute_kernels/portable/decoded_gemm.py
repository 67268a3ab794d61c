"""The portable grouped GEMM of 16-bit rows of x and quantised weights (MXFP8, MXFP4, NVFP4 or FP8 blocks).

Stages hold the weights' bytes as in memory; each warp decodes them in registers, between shared memory and mma.sync.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ..epilogue.activation import ActivationEpilogue
from ..epilogue.base import Epilogue, Inputs, WarpgroupState
from ..formats import MXFP8, OPERANDS, Format
from ..quantize.e4m3 import e4m3_value
from ..quantize.scales import exponent_of, magnitude_of, multiplier_of, power_of_two
from ..schedule.work import WorkTile
from ..specs import GemmSpec, GroupedGluSpec
from .block_narrow import BlockE4m3, BlockE4m3ByFours, block_narrow_sources
from .grouped_gemm import GroupedGemm, Operands
from .mainloop import Mainloop
from .narrow import Narrow, narrow, narrow_sources
from .operands import Along
from .sources import row_sources, weight_sources
from .split import is_split

BLOCK_REGS = 2 * MXFP8.block // 4
"""Results that a thread has in a block of 32 columns and two rows; four threads share such a block."""


class RoundingEpilogue(ActivationEpilogue):
    """Epilogue of a fused FC1 with decoded weights: act = activation(acc + bias) * scale[row].

    Some operand formats require that `act`, in 16 bits, holds only values of MXFP8 (`rounds`). Then each result is
    rounded to the value that it would have after quantisation from float32 to MXFP8, in blocks of 32 columns, and
    dequantisation.
    """

    def __init__(self, dtype: type[cutlass.Numeric], spec: GroupedGluSpec):
        super().__init__(dtype, spec)
        self.rounds = OPERANDS[spec.operands].act.holds is not None

    @cute.jit
    def _activated(
        self, state: WarpgroupState, acc: cute.Tensor, chunk: cutlass.Constexpr[int], cols: cutlass.Constexpr[int],
        scales: cute.Tensor,
    ) -> cute.Tensor:  # fmt: skip
        outputs = ActivationEpilogue._activated(self, state, acc, chunk, cols, scales)
        if const_expr(self.rounds):
            for block in cutlass.range_constexpr(cute.size(outputs) // BLOCK_REGS):
                for row in cutlass.range_constexpr(2):
                    _round(outputs, block * BLOCK_REGS + 2 * row)
        return outputs


def _round(outputs: cute.Tensor, first: int) -> None:
    """Round a thread's eight results in one row of a block (32 columns) to values of MXFP8, in place.

    Three other lanes hold the row's other 24 results in the block; shuffles find the greatest magnitude of all 32.

    Args:
        outputs: the thread's results, float32.
        first: index of the first of the eight registers.
    """
    places = [first + 4 * (i // 2) + i % 2 for i in range(BLOCK_REGS // 2)]
    amax = Int32(0)
    for place in places:
        amax = cutlass.max(amax, magnitude_of(outputs[place]))
    for distance in (1, 2):
        amax = cutlass.max(amax, cute.arch.shuffle_sync_bfly(amax, distance))
    exponent = exponent_of(amax.bitcast(Float32))
    for place in places:
        outputs[place] = e4m3_value(outputs[place] * multiplier_of(exponent)) * power_of_two(exponent)


class DecodedGemm(GroupedGemm):
    """The grouped GEMM of 16-bit rows of x and quantised weights, which it decodes. weights: the weights' format."""

    def __init__(self, spec: GemmSpec, dtype: type[cutlass.Numeric], epilogue: Epilogue, weights: Format):
        super().__init__(spec, dtype, epilogue)
        self.weights = weights

    def make_operands(self) -> tuple[Along, Narrow]:
        few_rows = is_split(self.tile)
        by_blocks = BlockE4m3ByFours if few_rows else BlockE4m3
        make = narrow if self.weights.rows == 1 else by_blocks
        return Along(self.dtype, self.tile.m), make(self.tile.n, self.weights, few_rows)

    @cute.jit
    def launch(
        self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, groups: tuple[Int64, Int32, Int32, Int64],
        inputs: Inputs, num_sms: Int32, position: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        """Launch the kernel on `stream`.

        Args:
            x: [T, K], 16-bit.
            w: quantised weights of all experts.
            y: the result; its first dimension is T.
            groups: address, encoding, count and tickets of schedule.groups.Groups.
            inputs: the epilogue's inputs, which also hold the address of the weights' scales.
            position: ignored, since CTAs draw no tickets (`GroupedGemm.launch`).
        """
        GroupedGemm.launch(
            self, x, w, (y,), groups, Int64(0), Int64(0), inputs, num_sms, position, stream
        )  # fmt: skip

    @cute.jit
    def multiply(self, mainloop: Mainloop, acc: cute.Tensor, operands: Operands, work: WorkTile):
        a = row_sources(operands.rows, work, mainloop.a)
        weights, part_n = operands.weights, self.tile.n // self.parts
        lines = weight_sources(weights, work, mainloop.b, part_n, self.layout)
        sources = const_expr(narrow_sources if self.weights.rows == 1 else block_narrow_sources)
        b = sources(
            lines, weights, operands.w_scale, operands.depth, work, self.weights, self.parts, part_n, self.layout
        )  # fmt: skip
        mainloop.run(acc, a, b, operands.depth)
