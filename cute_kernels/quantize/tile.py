"""A quantiser's tile of x: its size, its place, its bounds, and the addresses and scale layout of results."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import CacheEvictionPriority, CopyG2ROp

from ..device.warps import WARP
from .scale_stores import BLOCK, QUARTERS, TILE, WORD_BYTES

SECTOR_BYTES = 32
VECTOR_BYTES = 16
WORDS = VECTOR_BYTES // WORD_BYTES
BYTES_IN_FLIGHT = 128 << 10  # on an SM: half of its registers
SMEM_PERCENT = 14  # 32 of 228 KB: CTAs take at most 20 KB; loads in flight need the rest as cache


class Outputs(NamedTuple):
    """Addresses of a quantiser's two results. Each result is E4M3 data [T, K] with E8M0 scales.

    A kernel with axis "row" writes only the first result, a kernel with axis "col" only the second. Each ignores the
    addresses of the result that it does not write.

    Attributes:
        row_data, row_scale: the result whose blocks (elements that share a scale) lie along rows.
        col_data, col_scale: the result whose blocks lie along columns.
    """

    row_data: Int64
    row_scale: Int64
    col_data: Int64
    col_scale: Int64


class ScaleLayout(NamedTuple):
    """Layout of a matrix's scales.

    Attributes:
        wide: 1: blocks of 128 elements; 0: blocks of 32.
        swizzled: 1: scales lie in atoms of 128 x 4; 0: plain, row after row.
    """

    wide: Int32
    swizzled: Int32


class Reach(NamedTuple):
    """Row bounds of a tile. Rows from `end` on count as zeros; rows from `stop` on are not stored.

    The values depend on the spec's axis:

        axis "row"               end and stop are the end of the last group
        axes "col" and "both"    groups begin at multiples of 128 rows. end is the end of the tile's group; stop is T,
                                 or 0 if the tile is after the last group
        without groups           end and stop are T
    """

    end: Int32
    stop: Int32


class Origin(NamedTuple):
    """Rows and columns of x where a thread's elements and its CTA's tile begin.

    Attributes:
        row: the thread's first row.
        column: the first column of the thread's 16 bytes.
        band: the first row of the tile's band of 128 rows.
        row0, col0: the tile's first row and column.
    """

    row: Int32
    column: Int32
    band: Int32
    row0: Int32
    col0: Int32


class Tile(NamedTuple):
    """Size of a CTA's tile. A band is 128 rows; a quarter is 32 rows of a band.

    Attributes:
        run: number of consecutive rows that the tile has in a quarter.
        quarters: number of quarters from which the tile has rows, 4 or 1.
        columns: number of columns.
        rows_per_thread: number of rows of a thread, which holds 16 bytes of each.
    """

    run: int
    quarters: int
    columns: int
    rows_per_thread: int


# A row's scales are a sector in ROWS, half a sector in STRIP.
ROWS = Tile(2, QUARTERS, SECTOR_BYTES * BLOCK, 8)
STRIP = Tile(BLOCK, 1, SECTOR_BYTES // 2 * BLOCK, 16)


def read_once(dtype: type[cutlass.Numeric]) -> cute.CopyAtom:
    """Make the copy atom that loads a vector of 16 bytes without allocating a line in L1."""
    return cute.make_copy_atom(
        CopyG2ROp(), dtype, num_bits_per_copy=8 * VECTOR_BYTES, l1c_evict_priority=CacheEvictionPriority.NO_ALLOCATE
    )


def tile_of(axis: str, vector: int) -> Tile:
    """Return the tile that works for all layouts of scales.

    axis: "row", "col" or "both". vector: number of elements of x in 16 bytes.
    """
    columns = {"row": ROWS.columns, "col": TILE, "both": WARP * vector}[axis]
    return ROWS if axis == "row" else Tile(BLOCK, QUARTERS, columns, STRIP.rows_per_thread)
