"""Which weight rows of a swapped tile a thread has. Plain Python: `warpgroup` and `thread` are numbers of any kind.

The decoder reads rows of its own choice into the rows of an MMA. A slab of 64 gives thread t of its warpgroup the rows
16 (t / 32) + (t % 32) / 4 + 8 r, r = 0, 1. Gated, a thread has rows of a and the rows of u that belong to them: of two
slabs one is a's and one u's; of one slab, r = 0 is a's and r = 1 is u's.
"""

from __future__ import annotations

from typing import Any

from ..epilogue.sizes import ROWS
from ..formats import Format
from ..tiles import TileConfig

# What a swizzle moves.
SWIZZLE_CHUNK = 16

# Rows of a slab that a thread has.
ROW_HALVES = 2


def chunk_of_k(weights: Format, k: int) -> tuple[int, int]:
    """In which 16-byte chunk of a row of a stage its element `k` is, and at which byte of it."""
    return divmod(weights.num_bytes(k), SWIZZLE_CHUNK)


class SwappedRows:
    """Which weight rows of a tile a thread has, by their number: two of each slab, `count` in all, those of a first.

    The tile has the rows of each part (a, u) together. A warpgroup makes `columns` columns of the output, in chunks of
    `chunk_columns`, of which a thread has `thread_columns`, 8 apart.
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
        return row // self.part_count

    def row_offset(self, row: int) -> int:
        """Of a row from its thread's first row in the same part."""
        chunk, half = divmod(row % self.part_count, ROW_HALVES)
        return chunk * ROWS + half * 8

    def distance(self, row: int) -> int:
        """Of a row from its thread's first row, in rows of the tile."""
        return self.part(row) * self.part_n + self.row_offset(row)

    def first_column(self, warpgroup: Any) -> Any:
        """The first column that a warpgroup makes, of its tile's."""
        return warpgroup * self.columns

    def column(self, row: int, warpgroup: Any, thread: Any) -> Any:
        """The column that a row makes: its place in its part of the tile."""
        in_slab = thread // 32 * (8 * self.thread_columns) + thread % 32 // 4
        return self.first_column(warpgroup) + in_slab + self.row_offset(row)
