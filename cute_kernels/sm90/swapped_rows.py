"""The assignment of a swapped tile's weight rows to threads, in whose accumulators their sums are.

In a swapped tile, weights are the rows of the MMA and rows of x its columns. A slab is 64 MMA rows. Of each slab an MMA
gives thread t of a warpgroup two rows, r = 0 and r = 1: row 16 (t / 32) + (t % 32) / 4 + 8 r.

The decoder chooses which weight row it reads into each MMA row. In a gated layer (a: activated half, u: linear half) it
lets a thread have each weight row of a together with the matching weight row of u:

    warpgroup has two slabs    one slab holds rows of a, the other rows of u
    warpgroup has one slab     r = 0 is a row of a, r = 1 a row of u

Plain Python: `warpgroup` and `thread` may be ints or Int32.
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
    """Return where element `k` of a weight row lies in a stage: (index of its 16-byte chunk, byte in this chunk)."""
    return divmod(weights.num_bytes(k), SWIZZLE_CHUNK)


class SwappedRows:
    """The weight rows of a swapped tile that one thread has: two of each slab (64 MMA rows).

    Methods number a thread's weight rows from 0, rows of part a before rows of part u. In the tile, too, all rows of a
    come before all rows of u. Without a gate there is one part. An output column of the tile is one weight row or, with
    a gate, a weight row of a and the matching one of u. A thread's columns in a chunk of the output are 8 apart.

    Attributes:
        count: number of a thread's weight rows, of all parts.
        parts: 2 for a gated layer (a, u), else 1.
        part_n: number of the tile's weight rows in each part.
        part_count: number of a thread's weight rows in each part.
        thread_columns: number of a thread's output columns in a chunk.
        columns: number of output columns that a warpgroup computes.
        chunk_columns: number of output columns of a chunk, which the epilogue stores at once.
    """

    def __init__(self, tile: TileConfig, parts: int):
        self.count = ROW_HALVES * tile.slabs
        self.parts = parts
        self.part_n = tile.n // parts
        self.part_count = self.count // parts
        self.thread_columns = min(ROW_HALVES, self.part_count)
        self.columns = tile.slabs * ROWS // parts
        self.chunk_columns = min(ROWS, self.columns)

    def part(self, row: int) -> int:
        """Return the part, 0 (a) or 1 (u), of the thread's weight row number `row`."""
        return row // self.part_count

    def row_offset(self, row: int) -> int:
        """Return the distance, in rows of the tile, from the thread's first weight row of a part (a or u) to its weight
        row number `row`, which is in the same part.
        """
        chunk, half = divmod(row % self.part_count, ROW_HALVES)
        return chunk * ROWS + half * 8

    def distance(self, row: int) -> int:
        """Return the distance, in rows of the tile, from the thread's weight row number 0 to its number `row`."""
        return self.part(row) * self.part_n + self.row_offset(row)

    def first_column(self, warpgroup: Any) -> Any:
        """Return the first column of the tile's output that a warpgroup computes."""
        return warpgroup * self.columns

    def column(self, row: int, warpgroup: Any, thread: Any) -> Any:
        """Return the tile's output column of the thread's weight row number `row`.

        This is the row's index among the tile's rows of the same part (a or u).
        """
        in_slab = thread // 32 * (8 * self.thread_columns) + thread % 32 // 4
        return self.first_column(warpgroup) + in_slab + self.row_offset(row)
