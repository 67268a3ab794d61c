"""Assignment of a swapped tile's weight rows, which are the rows of the MMA, to threads. Plain Python: `warpgroup` and
`thread` may be ints or Int32.

An MMA gives thread t of a warpgroup the rows 16 (t / 32) + (t % 32) / 4 + 8 r of each slab of 64 MMA rows, r = 0, 1.
The decoder chooses which weight rows it reads into these MMA rows. In a gated layer, with a the activated and u the
linear half, it chooses them so that a thread has weight rows of a and the matching weight rows of u. If the warpgroup
has two slabs, one holds rows of a and the other rows of u. If it has one slab, r = 0 is a row of a and r = 1 a row of
u.
"""

from __future__ import annotations

from typing import Any

from ..epilogue.sizes import ROWS
from ..formats import Format
from ..tiles import TileConfig

# Bytes that a swizzle moves as one unit.
SWIZZLE_CHUNK = 16

# Rows of a slab that a thread has, 8 rows apart.
ROW_HALVES = 2


def chunk_of_k(weights: Format, k: int) -> tuple[int, int]:
    """Return (chunk, byte) of element `k` in a weight row of a stage: the index of its 16-byte chunk, and its byte in
    the chunk.
    """
    return divmod(weights.num_bytes(k), SWIZZLE_CHUNK)


class SwappedRows:
    """The weight rows of a tile that a thread has: two of each slab. They are numbered from 0, rows of part a before
    rows of part u.

    In the tile the weight rows of a part lie together. A thread's columns in a chunk of the output are 8 apart.

    Attributes:
        count: weight rows of a thread in all.
        parts: 2 for a gated layer (a, u), else 1.
        splits: number of warpgroups that share the depth of the same weight rows.
        part_n: weight rows of a part in the tile.
        part_count: weight rows of a part that a thread has.
        thread_columns: output columns of a thread in a chunk.
        columns: output columns that a warpgroup computes.
        chunk_columns: output columns of a chunk, which the epilogue stores at a time.
    """

    def __init__(self, tile: TileConfig, parts: int):
        self.count = ROW_HALVES * tile.slabs
        self.parts = parts
        self.splits = tile.splits
        self.part_n = tile.n // parts
        self.part_count = self.count // parts
        self.thread_columns = min(ROW_HALVES, self.part_count)
        self.columns = tile.slabs * ROWS // parts
        self.chunk_columns = min(ROWS, self.columns)

    def part(self, row: int) -> int:
        """Return the part, 0 (a) or 1 (u), of the thread's weight row number `row`."""
        return row // self.part_count

    def row_offset(self, row: int) -> int:
        """Return how many rows of the tile lie between the thread's first row of a part (a or u) and its row number
        `row`.
        """
        chunk, half = divmod(row % self.part_count, ROW_HALVES)
        return chunk * ROWS + half * 8

    def distance(self, row: int) -> int:
        """Return how many rows of the tile lie between the thread's row number 0 and its row number `row`."""
        return self.part(row) * self.part_n + self.row_offset(row)

    def first_column(self, warpgroup: Any) -> Any:
        """Return the first column of the tile's output that a warpgroup computes."""
        return warpgroup * self.columns

    def column(self, row: int, warpgroup: Any, thread: Any) -> Any:
        """Return the output column of the thread's weight row number `row`: the row's index in its part of the tile."""
        in_slab = thread // 32 * (8 * self.thread_columns) + thread % 32 // 4
        return self.first_column(warpgroup) + in_slab + self.row_offset(row)
