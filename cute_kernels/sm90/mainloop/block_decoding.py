"""The decoding mainloop for E4M3 weights with a float32 scale for each block of 128 x 128 (FP8 as checkpoints ship it).

An element times its scale is a float32 product that is rounded to bfloat16, which is also what dequantising the
weight to bfloat16 gives. A k-tile is one block deep (128). So in each k-tile, all weight rows that a warpgroup has of a
part of the tile (a half of a gated layer, else the whole tile) share one scale, which every thread loads.

Scales need no checks: a NaN or infinite scale makes its weights, and therefore the results, NaN or infinite by itself.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...device.gmem import vector_at
from ...epilogue.fragments import TileShare
from ...memory.block_scales import SCALE_BYTES, BlockGrid, block_grid, grid_row
from ...memory.weights import GateRows
from ...schedule.work import WorkTile
from ..split_depth import KTiles
from ..swapped_rows import SwappedRows
from .base import Operands
from .decoding import DecodingMainloop
from .weight_scales import ScalesAhead


class PartScales(ScalesAhead):
    """A thread's scales in a k-tile: the bits of one float32 scale for each part of the tile.

    Attributes:
        grid: the scales of all experts in memory.
        half: number of weight rows of a part of an expert's whole weight.
        share: which slabs (64 weight rows each) of a tile the warpgroup has.
        words: (0, row), the scale of each of the thread's rows in the current k-tile, as float32 bits.
        begins: for each part, the address of the grid row that holds its scales.
        taken: scales of the current k-tile, one for each part.
        next: scales of the next k-tile, which are being loaded.
    """

    def __init__(
        self, grid: BlockGrid, k_tiles: KTiles, gate: GateRows, half: Int32, share: TileShare, rows: SwappedRows,
        layout: str,
    ):  # fmt: skip
        self.grid = grid
        self.k_tiles = k_tiles
        self.gate = gate
        self.half = half
        self.share = share
        self.rows = rows
        self.layout = layout
        self.begins = cute.make_rmem_tensor(rows.parts, Int64)
        self.taken = cute.make_rmem_tensor(rows.parts, Int32)
        self.next = cute.make_rmem_tensor(rows.parts, Int32)
        by_row = cute.make_layout((1, (rows.part_count, rows.parts)), stride=(0, (0, 1)))
        self.words = cute.make_tensor(self.taken.iterator, by_row)

    @cute.jit
    def _aim(self, work: WorkTile):
        """Set `begins`, the address of each part's grid row of scales, for a tile.

        Rows of the tile past the last weight row are zeros and never stored, so they may use the last row's scales.
        """
        rows = self.rows
        first = self.grid.expert(work.expert)
        column = cutlass.min(work.n_tile * rows.part_n + rows.first_column(self.share.first_slab), self.half - 1)
        for part in cutlass.range_constexpr(rows.parts):
            row = grid_row(self.grid, self.layout, self.gate, column, part, self.half)
            self.begins[part] = first + row * (self.grid.blocks * SCALE_BYTES)

    @cute.jit
    def _fetch(self, k_tile: Int32):
        for part in cutlass.range_constexpr(self.rows.parts):
            self.next[part] = vector_at(Int32, self.begins[part])[k_tile]

    def take(self) -> None:
        """Make the loaded scales (`next`) the current scales (`taken`), of which `words` is a view by row."""
        for part in range(self.rows.parts):
            self.taken[part] = self.next[part]

    def write_nan_rows(self, acc: cute.Tensor) -> None:
        """Do nothing: a NaN or infinite float32 scale needs no check. With scale bytes, `WeightScales` writes NaN
        here."""


class BlockDecodingMainloop(DecodingMainloop):
    """`DecodingMainloop` for weights with block scales. `operands.scales` is their address (memory/block_scales.py)."""

    def scales(self, operands: Operands, share: TileShare) -> PartScales:
        _, expert_rows, gate = operands.extra
        blocks = self.format.num_scales(cute.size(operands.b, mode=[1]))
        grid = block_grid(operands.scales, self.layout, gate, self.parts, expert_rows, blocks)
        k_tiles = KTiles(self.tile.splits, grid.blocks)
        return PartScales(grid, k_tiles, gate, expert_rows // self.parts, share, self.rows, self.layout)
