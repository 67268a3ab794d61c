"""The mainloop of a GEMM with LoRA adapters of rank r: x w^T + low b^T, with low [T, r].

The second product's k-tiles follow the first product's.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, const_expr

from ...memory.weights import ExpertAddress
from ...schedule.work import WorkTile
from .base import Operands, Source
from .gathered_rows import NO_ROWS, arrive
from .gemm import GemmMainloop, Product


class AdaptedMainloop(GemmMainloop):
    """Mainloop that contracts x with w, then low [T, r] with b, into the same accumulators.

    low and b are a second pair of operands with TMA descriptors of their own; b is stored like w. If r is at most 64,
    the second product takes one k-tile, whose columns past r are zeros.

        warp               in each k-tile of the second product
        TMA warp           loads low and b, without multicast and with the default L2 policy
        gathering warps    if x's rows come by index: arrive at once, without a copy

    The gathering warps arrive because a stage's barrier counts them in every k-tile of a launch. They do not copy rows
    of low, because code for a second gather made the kernel spill 476 bytes.
    """

    def with_low(self, operands: Operands, low: cute.Tensor, b: cute.Tensor, address: ExpertAddress) -> Operands:
        """Host side: return `operands` with the operands of the second product, low and b, appended to its `extra`.

        Args:
            operands: the operands of the first product, x and w.
            low: [T, r], x (in backward a gradient) times one of the two matrices of each expert's adapter.
            b: the adapters' other matrices, as the view (n, k, lo, hi) that `weight_view` makes: n counts columns of
                the result, k the r columns of low, and (lo, hi) is an expert's offset.
            address: the offsets of the experts' matrices in b.
        """
        atom_a, a = self._tma(low, self.a_major, self.tile.box_rows, 1)
        atom_b, b = self._tma(b, self.b_major, self.part_n, 1)
        return operands._replace(extra=(*operands.extra, Operands(atom_a, a, atom_b, b, (address,), NO_ROWS)))

    def num_stages(self, operands: Operands, work: WorkTile) -> Int32:
        """Return the number of stages of the first product x w^T alone.

        The base class's `load_ahead` and `load` call this method, and they load only the first product.
        """
        return super().num_k_tiles(operands, work)

    def num_k_tiles(self, operands: Operands, work: WorkTile) -> Int32:
        return super().num_k_tiles(operands, work) + super().num_k_tiles(operands.extra[-1], work)

    @cute.jit
    def load(
        self, operands: Operands, sA: cute.Tensor, sB: cute.Tensor, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile, ahead: Int32,
    ):  # fmt: skip
        state = super().load(operands, sA, sB, stages, state, work, ahead)
        low, gathers = operands.extra[-1], None
        if const_expr(self.load_warp_gathers):
            gathers = operands.rows.address != 0
        of = Product(Source(low.atom_a, low.a, 1), Source(low.atom_b, low.b, 1), low.extra[0], low.rows)
        boxes = self._boxes(of, work)
        weights, x = self._loads(of, sA, sB, work, Int32(0), boxes, None)
        return self._load_in_order(weights, x, boxes, stages, state, super().num_k_tiles(low, work), gathers)

    @cute.jit
    def gather(
        self, operands: Operands, sA: cute.Tensor, sB: cute.Tensor, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile, rank: Int32,
    ):  # fmt: skip
        state = self._gather(operands, sA, stages, state, work, rank, super().num_k_tiles(operands, work))
        for _ in cutlass.range(super().num_k_tiles(operands.extra[-1], work), unroll=1):
            stages.sync_object_empty.wait(state.index, state.phase)
            arrive(stages, state)
            state.advance()
        return state
