"""The mainloop of weight gradients, dw = dy^T x, contracted over the rows of a group."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode

from ...device.select import select
from ...memory.ragged import clipped, ragged_rows
from ...memory.row_boxes import acquire
from ...memory.weights import EVICT_LAST
from ...schedule.work import WorkTile
from ...tiles import TileConfig
from .base import MMA_K, Loop, Mainloop, Operands, Source
from .gathered_rows import GatherAcrossRows, RowIndices, row_indices


class WgradMainloop(Mainloop):
    """Mainloop that multiplies columns of dy (operand A) by columns of x (B), contracted over a group's rows.

    The rows of one operand may come by index. Rows past the group's end must not contribute, so both loads clip there
    and fill with zeros (`ragged_rows`). Zeros in one operand alone would not suffice, since the other may hold NaN.

    The last k-tile is multiplied only as deep as it has rows, rounded up to a wgmma's depth. Depth that is multiplied
    beyond the number of rows, with Dirichlet(0.5) routing:

                              Mixtral    Qwen3-30B    DeepSeek-V3 EP8    gpt-oss-120b
        wgmma's depth         1 %        3 %          2 %                6 %
        with whole k-tiles    3 %        14 %         8 %                27 %

    keeps_operands: True: operands are the last to leave L2, because stores of results would push them out. This saves 5
        to 15 % of the time of Qwen3-30B's 32-bit gradients and 1 to 6 % of gpt-oss-120b's. For 16-bit gradients, which
        have half as many bytes, it would save -1 to 2 % (once 6 %).
    """

    may_be_empty = True

    def __init__(
        self, dtype: type[cutlass.Numeric], tile: TileConfig, stages: int, keeps_operands: bool
    ):  # fmt: skip
        super().__init__(dtype, tile, OperandMajorMode.MN, OperandMajorMode.MN, stages)
        self.keeps_operands = keeps_operands
        self.rows_of_a = GatherAcrossRows(tile.m, tile.k, dtype)
        self.rows_of_b = GatherAcrossRows(tile.n, tile.k, dtype)

    def operands(self, dy: cute.Tensor, x: cute.Tensor, dy_rows: Int64, x_rows: Int64) -> Operands:
        """Host side: make the TMA descriptors of dy and x, as ragged views (column, row, wrap, end). By the coordinates
        of `wrap` and `end`, TMA clips rows where a group ends (memory/ragged.py).

        dy_rows, x_rows: addresses of the indices of dy's and of x's rows; 0: rows lie in order. One or both are 0. Rows
        that come by index are copied by warps, not by TMA.
        """
        atom_a, a = self._tma(self._columns(dy), self.a_major, self.tile.m, self.tile.cluster_n)
        atom_b, b = self._tma(self._columns(x), self.b_major, self.tile.n, self.tile.cluster_m)
        rows = RowIndices(
            *(select(dy_rows != 0, *of) for of in zip(row_indices(dy_rows, dy), row_indices(x_rows, x), strict=True))
        )
        return Operands(atom_a, a, atom_b, b, (Boolean(dy_rows == 0), Boolean(x_rows == 0)), rows)

    def _columns(self, tensor: cute.Tensor) -> cute.Tensor:
        """Return the view (column, row, wrap, end) of a tensor [T, columns]. It can be clipped at any row
        (memory/ragged.py).
        """
        ragged = ragged_rows(tensor)
        return cute.make_tensor(ragged.iterator, cute.select(ragged.layout, mode=[1, 0, 2, 3]))

    def _rows(self, columns: cute.Tensor, work: WorkTile) -> cute.Tensor:
        """Return the group's rows, from `work.row` to the group's last row. columns: a view that `_columns` made."""
        return clipped(columns, work.row, work.group_end, row_mode=1)

    def num_k_tiles(self, operands: Operands, work: WorkTile) -> Int32:
        return cute.ceil_div(work.group_end - work.row, self.tile.k)

    def loops(self, work: WorkTile, num_k_tiles: Int32) -> list[Loop]:
        slabs, k = self.tile.slabs, self.tile.k
        rows = work.group_end - work.row
        rest = cute.ceil_div(rows % k, MMA_K) * MMA_K
        whole = num_k_tiles - select((rest > 0) & (rest < k), Int32(1), Int32(0))
        parts = [(depth, select(rest == depth, Int32(1), Int32(0))) for depth in range(MMA_K, k, MMA_K)]
        return [Loop(whole, slabs, k), *(Loop(count, slabs, depth, whole) for depth, count in parts)]

    @cute.jit
    def load(
        self, operands: Operands, sA: cute.Tensor, sB: cute.Tensor, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile, ahead: Int32,
    ):  # fmt: skip
        tile = self.tile
        a = Source(operands.atom_a, self._rows(operands.a, work), tile.cluster_n)
        b = Source(operands.atom_b, self._rows(operands.b, work), tile.cluster_m)
        tAsA, tAgA = a.partition(sA, cute.local_tile(a.tensor, (tile.m, tile.k), (None, None)))
        tBsB, tBgB = b.partition(sB, cute.local_tile(b.tensor, (tile.n, tile.k), (None, None)))
        policy = Int64(EVICT_LAST) if const_expr(self.keeps_operands) else None
        loads_a, loads_b = operands.extra
        columns = select(loads_a, Int32(tile.m), Int32(0)) + select(loads_b, Int32(tile.n), Int32(0))
        num_bytes = columns * (tile.k * self.dtype.width // 8)
        for k_tile in cutlass.range(self.num_k_tiles(operands, work), unroll=1):
            acquire(stages, state, num_bytes)
            barrier = stages.producer_get_barrier(state)
            if loads_a:
                a.copy(tAgA[None, work.m_tile, k_tile], tAsA[None, state.index], barrier, policy)
            if loads_b:
                b.copy(tBgB[None, work.n_tile, k_tile], tBsB[None, state.index], barrier, policy)
            state.advance()
        return state

    @cute.jit
    def gather(
        self, operands: Operands, sA: cute.Tensor, sB: cute.Tensor, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile, rank: Int32,
    ):  # fmt: skip
        to = (rank, stages, state, work, self.num_k_tiles(operands, work))
        loads_a, _ = operands.extra
        if loads_a:
            state = self.rows_of_b.fill(operands.rows, sB, *to, work.n_tile * self.tile.n)
        else:
            state = self.rows_of_a.fill(operands.rows, sA, *to, work.m_tile * self.tile.m)
        return state
