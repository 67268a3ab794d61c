"""Layout of the float32 scales of weights' blocks of 128 x 128: [E, grid rows, ceil(K / 128)].

A grid row holds the scales of 128 weight rows: weight row r has its scales in grid row r / 128. In layout "concat",
each half (I weight rows) of a gated layer has its own grid, one after the other: row i of half h has its scales in grid
row h ceil(I / 128) + i / 128. If I is a multiple of 128, both rules give the same grid. Otherwise, the second rule
keeps the rows of the two halves in different blocks.

So in every layout, rows i to i + 63 of a half have the same grid row if i is a multiple of 64. In interleaved layouts,
these rows are 64 of the 128 weight rows of one block.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from ..device.select import select
from ..formats import FP8_BLOCK
from ..specs import LAYOUTS
from .weights import GateRows, row_of

BLOCK = FP8_BLOCK.block
SCALE_BYTES = 4


class BlockGrid(NamedTuple):
    """The float32 scales of all experts' weights: one scale for each block of 128 weight rows by 128 columns.

    Attributes:
        address: the address of the first expert's scales.
        rows: number of grid rows of an expert. A grid row holds the scales of 128 weight rows.
        half: number of grid rows of one half in layout "concat".
        blocks: number of scales of a grid row.
    """

    address: Int64
    rows: Int32
    half: Int32
    blocks: Int32

    def expert(self, expert: Int32) -> Int64:
        """Return the address of an expert's scales. For the end mark (a tile with expert < 0), return the address of
        the first expert's."""
        return self.address + Int64(cutlass.max(expert, Int32(0))) * (self.rows * self.blocks * SCALE_BYTES)


def in_concat(layout: str, gate: GateRows) -> Boolean | bool:
    """Return True if each half of the weight rows has its own grid of scales. This is so in layout "concat", where all
    rows of the activated half come before all rows of the linear half.

    layout: a key of specs.LAYOUT_FORMS. If it has several layouts, `gate` says at run time which.
    """
    return layout == "concat" if layout in LAYOUTS else gate.layout == LAYOUTS["concat"]


def block_grid(
    address: Int64, layout: str, gate: GateRows, parts: int, weight_rows: Int32, blocks: Int32
) -> BlockGrid:  # fmt: skip
    """Make the grid of the scales of all experts.

    Args:
        address: the address of the first expert's scales.
        layout: a key of specs.LAYOUT_FORMS: one order of weight rows, or several.
        gate: the order of weight rows, read if `layout` has several.
        parts: 2 for a gated layer, else 1.
        weight_rows: rows of an expert's weight, of all parts.
        blocks: scales of a grid row.
    """
    half = cute.ceil_div(weight_rows // parts, BLOCK)
    rows = _chosen(in_concat(layout, gate), parts * half, cute.ceil_div(weight_rows, BLOCK))
    return BlockGrid(address, rows, half, blocks)


def grid_row(grid: BlockGrid, layout: str, gate: GateRows, column: Int32, part: int, half: Int32) -> Int32:
    """Return the grid row that has the scales of an output column. A grid row holds the scales of 128 weight rows.

    Args:
        layout: a key of specs.LAYOUT_FORMS: one order of weight rows, or several.
        gate: the order of weight rows, read if `layout` has several.
        column: the column's index in its part.
        part: 0 (a, the activated half of a gated layer, or all columns without a gate) or 1 (u, the linear half).
        half: columns of each part.
    """
    own = part * grid.half + column // BLOCK
    return _chosen(in_concat(layout, gate), own, row_of(layout, gate, column, part, half) // BLOCK)


def _chosen(condition: Boolean | bool, if_true: Int32, if_false: Int32) -> Int32:
    """Return `if_true` or `if_false`, by a condition that is known at compile time or at run time."""
    if isinstance(condition, bool):
        return if_true if condition else if_false
    return select(condition, if_true, if_false)
