"""The FP8 mainloop with float32 scales: one for 128 elements of a row of x, one for a 128 x 128 block of weights.

It is `Fp8Mainloop`, except that the sum of a k-tile is multiplied by the scale of x's row times the weights' scale. A
thread multiplies the two scales once for each pair of a row and a weight scale. This is little beside the 64
multiply-adds of a piece (64 rows by 128 columns).

In every gate layout 64 columns of a half share a weight scale (memory/block_scales.py). So a tile of 256 weight rows
has two weight scales in a k-tile, which all its threads load:

    no gate        a scale for each 128 columns
    concat         one for the activated half, one for the linear half
    interleaved    one for the first 64 columns of both halves, one for the last 64
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...device.gmem import vector_at
from ...device.select import select
from ...epilogue.fragments import TileShare
from ...memory.block_scales import BLOCK, SCALE_BYTES, BlockGrid, grid_row, in_concat
from ...memory.weights import GateRows
from ...schedule.work import WorkTile
from ...tiles import TileConfig
from ..gemm_policy import GemmPolicy
from .base import Operands
from .fp8 import Fp8Mainloop, RowScales
from .gathered_rows import RowIndices

HALF_BLOCK = BLOCK // 2


class ScaleSources(NamedTuple):
    """Addresses of the float32 scales: of x's rows, and of the weights' 128 x 128 blocks.

    Attributes:
        rows: address of the row scales, float32 [rows, ceil(K / 128)], one for each 128 columns of a row.
        weights: the grid of weight scales.
        gate: order of a gated layer's weight rows.
        half: number of weight rows of each part (each half of a gated layer, else all rows).
    """

    rows: Int64
    weights: BlockGrid
    gate: GateRows
    half: Int32


class RowAndSquareScales(RowScales):
    """The scales of a thread's rows of x, followed by the weight scales of its tile, as float32 in registers.

    Both kinds are loaded a k-tile ahead, as in `RowScales`.

    Attributes:
        count: number of scales of both kinds.
        weights: number of weight scales of a tile.
        weight_begins: for each weight scale, the address of the grid row (scales of 128 weight rows) that holds it.
        halves: 2 if the two halves of a piece's columns may have different weight scales, as in an interleaved layout;
            else 1.
    """

    def __init__(
        self, sources: ScaleSources, rows: RowIndices, first_row: Int32, num_rows: int, part_n: int, parts: int,
        weights: int, layout: str,
    ):  # fmt: skip
        blocks = sources.weights.blocks
        super().__init__(sources.rows, rows, first_row, num_rows, blocks * SCALE_BYTES, blocks - 1)
        self.sources = sources
        self.part_n = part_n
        self.parts = parts
        self.weights = weights
        self.layout = layout
        self.count = num_rows + weights
        self.halves = 2 if parts == 2 and layout != "concat" else 1
        self.weight_begins = cute.make_rmem_tensor(weights, Int64)
        self.next = cute.make_rmem_tensor(self.count, Float32)

    @cute.jit
    def begin(self, work: WorkTile):
        """Start loading the first scales of a tile."""
        grid = self.sources.weights
        first = grid.expert(work.expert)
        for i in cutlass.range_constexpr(self.weights):
            self.weight_begins[i] = first + self._grid_row(work, i) * (grid.blocks * SCALE_BYTES)
        RowScales.begin(self, work)

    def _grid_row(self, work: WorkTile, i: int) -> Int32:
        """Return the index of the grid row (scales of 128 weight rows) that holds the tile's weight scale number i.

        Weights past the last column are zeros, so a block that begins there may use the last column's scale.
        """
        sources, layout = self.sources, self.layout
        column, part = work.n_tile * self.part_n, 0
        if self.parts == 1:
            column += i * BLOCK
        elif isinstance(is_concat := in_concat(layout, sources.gate), bool):
            column, part = (column, i) if is_concat else (column + i * HALF_BLOCK, 0)
        else:
            column += select(is_concat, Int32(0), Int32(i * HALF_BLOCK))
            part = select(is_concat, Int32(i), Int32(0))
        column = cutlass.min(column, sources.half - 1)
        return grid_row(sources.weights, layout, sources.gate, column, part, sources.half)

    @cute.jit
    def _fetch(self, k_tile: Int32):
        block = cutlass.min(k_tile, self.last)
        for i in cutlass.range_constexpr(self.num_rows):
            self.next[i] = vector_at(Float32, self.begins[i])[block]
        for i in cutlass.range_constexpr(self.weights):
            self.next[self.num_rows + i] = vector_at(Float32, self.weight_begins[i])[block]

    @cute.jit
    def take(self, k_tile: Int32) -> cute.Tensor:
        """Return the scales of a k-tile (rows, then weights), and start loading the scales of the next k-tile.

        The previous call (for the first k-tile `begin`) started the loads of the scales that this call returns.
        """
        scales = cute.make_rmem_tensor(self.count, Float32)
        scales.store(self.next.load())
        self._fetch(k_tile + 1)
        return scales

    def factor(self, scales: cute.Tensor, row: int, columns: int, half: int) -> Float32:
        """Return the row's scale times the weight scale, by which a k-tile's sums in one half of a row of a piece (64
        rows by 128 columns) are multiplied.

        Args:
            scales: scales that `take` returned.
            row: index of the row among the thread's rows.
            columns: index of the piece along the tile's columns.
            half: which half of the piece's columns, 0 or 1; 0 if `halves` is 1.
        """
        return scales[row] * self._weight_scale(scales, columns, half)

    def _weight_scale(self, scales: cute.Tensor, columns: int, half: int) -> Float32:
        of_columns = scales[self.num_rows + columns]
        if self.halves == 1 or columns == half:
            return of_columns
        of_half, is_concat = scales[self.num_rows + half], in_concat(self.layout, self.sources.gate)
        return of_half if is_concat is False else select(is_concat, of_columns, of_half)


class BlockFp8Mainloop(Fp8Mainloop):
    """`Fp8Mainloop` for float32 scales of x's rows and of weight blocks. `operands.scales` is a ScaleSources.

    layout: the weights' gate layout, a key of specs.LAYOUT_FORMS.
    """

    def __init__(
        self, tile: TileConfig, parts: int, layout: str, stages: int, policy: GemmPolicy, load_warp_gathers: bool
    ):  # fmt: skip
        super().__init__(tile, parts, stages, policy, load_warp_gathers)
        self.layout = layout

    def scales(self, operands: Operands, share: TileShare) -> RowAndSquareScales:
        """Make the object that holds a thread's scales for all of its tiles."""
        of_tile = self.part_n, self.parts, self.pieces, self.layout
        sources: Any = operands.scales
        return RowAndSquareScales(sources, operands.rows, self.first_row(share), 2 * self.tile.slabs, *of_tile)
