"""The grouped GEMM for every GPU since Ampere: y[row] = epilogue(x[row] @ w[e]^T) for every row of every group e."""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from ..device.gmem import CHUNK_BYTES
from ..epilogue.base import Epilogue, Inputs
from ..memory.weights import weight_rows, weight_view
from ..schedule.groups import Groups
from ..schedule.work import TileGrid, WorkTile
from ..specs import GemmSpec
from .mainloop import Mainloop
from .operands import Across, Along, Lines
from .persistent import TileKernel
from .sources import Rows, Weights, row_sources, rows_of, transposed_sources, weight_sources
from .store import make_store


class Operands(NamedTuple):
    """Inputs of a GEMM's mainloop.

    Attributes:
        rows: the rows of x.
        weights: experts' weights.
        depth: elements of the contraction; with x in halves, of each half.
        w_scale: the address of the scales of weights that are decoded: [E, weight rows, blocks of depth], or with
            blocks of 128 x 128 as in memory/block_scales.py.
    """

    rows: Rows
    weights: Weights
    depth: Int32
    w_scale: Int64


class GroupedGemm(TileKernel):
    """The portable grouped GEMM: y[row] = epilogue(x[row] @ w[e]^T) with w [E, N, K].

    Args:
        transposed: True: w is [E, K, N], and y[row] = epilogue(x[row] @ w[e]).
        in_halves: True: y[row] = epilogue(x[row, :K / 2] @ w[e] + x[row, K / 2 :] @ w_up[e]), with two transposed
            weights w and w_up. The second half is contracted after the first.
    """

    def __init__(
        self, spec: GemmSpec, dtype: type[cutlass.Numeric], epilogue: Epilogue, transposed: bool = False,
        in_halves: bool = False,
    ):  # fmt: skip
        super().__init__(spec.name, dtype, spec.tile, epilogue)
        self.transposed, self.in_halves = transposed, in_halves
        self.parts, self.layout = epilogue.shape.parts, epilogue.shape.layout

    def make_operands(self) -> tuple[Along, Any]:
        return Along(self.dtype, self.tile.m), (Across if self.transposed else Along)(self.dtype, self.tile.n)

    @cute.jit
    def launch(
        self, x: cute.Tensor, w: cute.Tensor, outputs: tuple, groups: tuple[Int64, Int32, Int32, Int64], w_table: Int64,
        rows: Int64, inputs: Inputs, num_sms: Int32, position: Int32, stream: cuda.CUstream, w_up: Int64 | None = None,
    ):  # fmt: skip
        """Launch the kernel on `stream`.

        Args:
            x: [T, K], or the tensor that `rows` selects rows from.
            w: weights of all experts, [E, N, K], or [E, K, N] if transposed.
            outputs: the tensors that the epilogue stores.
            groups: address, encoding, count and tickets of schedule.groups.Groups.
            w_table: the address of int64 [E], the offset of each expert's weights (memory.weights.ExpertAddress); 0: w
                is packed.
            rows: the address of int32 [T], the index of the row of x for each row of the result; 0: rows of x lie in
                order.
            inputs: the epilogue's inputs.
            position: ignored, since each CTA's tiles are fixed (no tickets), and no launch starts before the previous
                kernel ends.
            w_up: the address of a second weight tensor like w: the linear half of a gated layer or, with `in_halves`,
                the weight of the second half of x's columns. 0 or None: w has all weights.
        """
        view, expert = weight_view(w, w_table, self.parts, self.layout, self.transposed, inputs.gate, w_up)
        n = Int32(w.shape[2]) if const_expr(self.transposed) else weight_rows(w, w_up)
        pitch = Int32(w.shape[2]) // (CHUNK_BYTES * 8 // w.element_type.width)
        weights = Weights(view.iterator.toint(), expert, pitch, n // self.parts, inputs.gate)
        depth = Int32(x.shape[1]) // (2 if self.in_halves else 1)
        stores = tuple(make_store(view) for view in self.epilogue.store_views(outputs, inputs))
        grid = TileGrid(Int32(0), cute.ceil_div(n, self.tile.n))
        sizes = Groups(*groups, outputs[0].shape[0])
        operands = Operands(rows_of(x, rows), weights, depth, Int64(inputs.w_scale))
        inputs = self.epilogue.kernel_inputs(inputs)
        self.start(operands, stores, inputs, sizes, grid, num_sms, stream)

    @cute.jit
    def multiply(self, mainloop: Mainloop, acc: cute.Tensor, operands: Operands, work: WorkTile):
        a = row_sources(operands.rows, work, mainloop.a)
        if const_expr(self.in_halves):
            # One mainloop in a loop over both halves: with two mainloops ptxas spills up to 40 bytes of accumulators.
            for half in cutlass.range(2, unroll=1):
                b = transposed_sources(operands.weights, work, mainloop.b, self.parts, half)
                first = a.parts[0] + half * operands.depth * (self.dtype.width // 8)
                mainloop.run(acc, Lines((first,), a.distances), b, operands.depth)
        elif const_expr(self.transposed):
            b = transposed_sources(operands.weights, work, mainloop.b, self.parts)
            mainloop.run(acc, a, b, operands.depth)
        else:
            b = weight_sources(operands.weights, work, mainloop.b, self.tile.n // self.parts, self.layout)
            mainloop.run(acc, a, b, operands.depth)
