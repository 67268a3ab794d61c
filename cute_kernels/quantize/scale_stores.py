"""Stores of a tile's scales from shared to global memory: plain, or swizzled in atoms of 128 x 4 (docs/mxfp8.md).

The scales of a matrix are a matrix [outer, inner] themselves:

    blocks along rows                  outer: the row; inner: the block's index in the row
    blocks along columns, plain        outer: the index of the block of 32 rows; inner: the column
    blocks along columns, swizzled     outer: the column; inner: the block's index in the column
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8

from ..device.gmem import vector_at
from ..device.invariant import Invariant
from ..formats import MXFP8

TILE = 128
BLOCK = MXFP8.block
BLOCKS = TILE // BLOCK
QUARTERS = 4
QUARTER = TILE // QUARTERS
WORD_BYTES = 4


class ScaleGrid(NamedTuple):
    """Swizzled scales [outer_count, block_count] in global memory, and the place of a tile in them.

    Attributes:
        address: the address of the first scale.
        outer0, block0: position of the tile's first scale.
        outer_count, block_count: the sizes.
        stop: scales with an outer index from `stop` up to `outer_count` are not stored. The padding of atoms, after
            `outer_count`, is stored.
    """

    address: Int64
    outer0: Int32
    outer_count: Int32
    stop: Int32
    block0: Int32
    block_count: Int32


class Strip(NamedTuple):
    """Plain (row-major) scales [outer_count, inner_count] in global memory, and the place of a tile in them.

    Attributes:
        address: the address of the first scale.
        outer0, inner0: position of the tile's first scale.
        outer_count, inner_count: the sizes; scales of the tile past them are not stored.
    """

    address: Int64
    outer0: Int32
    outer_count: Int32
    inner0: Int32
    inner_count: Int32


class ScaleStores(Invariant):
    """Methods that store a tile's scales from shared to global memory. All threads of a CTA call them.

    Args:
        rows: number of rows of the tile. They come from all four quarters (32 rows each) of a band of 128 rows, or from
            one quarter.
        run: number of consecutive rows that the tile has in a quarter.
        threads: number of threads of the CTA.
    """

    def __init__(self, rows: int, run: int, threads: int):
        self.rows = rows
        self.run = run
        self.threads = threads

    def below(self, row: int | Int32) -> int | Int32:
        """Return how many rows of the matrix the tile's row number `row` lies below the tile's first row."""
        return row // self.run * QUARTER + row % self.run

    @cute.jit
    def strip(self, scales: cute.Tensor, strip: Strip):
        """Store plain scales one byte at a time. For any width of the matrix, a warp's bytes are neighbours in memory.

        Args:
            scales: the tile's scales in shared memory, as a tensor (inner, outer).
            strip: the scales in global memory, and the tile's place in them.
        """
        thread, _, _ = cute.arch.thread_idx()
        width = cute.size(scales, mode=[0])
        for n in cutlass.range_constexpr(cute.ceil_div(cute.size(scales), self.threads)):
            index = thread + n * self.threads
            outer = strip.outer0 + self.below(index // width)
            inner = strip.inner0 + index % width
            if (inner < strip.inner_count) & (outer < strip.outer_count):
                at = strip.address + Int64(outer) * strip.inner_count + inner
                vector_at(Uint8, at)[0] = scales[index % width, index // width]

    @cute.jit
    def words(self, scales: cute.Tensor, strip: Strip):
        """Store plain scales, four bytes at a time if a row of scales has a multiple of 4 bytes, otherwise by `strip`.

        Args:
            scales: the tile's scales in shared memory, as a tensor (inner, outer).
            strip: the scales in global memory, and the tile's place in them.
        """
        if strip.inner_count % WORD_BYTES == 0:
            thread, _, _ = cute.arch.thread_idx()
            width = cute.size(scales, mode=[0]) // WORD_BYTES
            count = cute.size(scales) // WORD_BYTES
            for n in cutlass.range_constexpr(cute.ceil_div(count, self.threads)):
                index = thread + n * self.threads
                outer = strip.outer0 + self.below(index // width)
                inner = strip.inner0 + index % width * WORD_BYTES
                if (index < count) & (inner < strip.inner_count) & (outer < strip.outer_count):
                    at = strip.address + Int64(outer) * strip.inner_count + inner
                    mine = cute.recast_tensor(scales[None, index // width], Int32)
                    vector_at(Int32, at)[0] = mine[index % width]
        else:
            self.strip(scales, strip)

    @cute.jit
    def atoms(self, scales: cute.Tensor, grid: ScaleGrid):
        """Store swizzled scales. A thread stores four scales of one row or column as one word. Neighbouring threads
        store neighbouring words of the atom.

        Args:
            scales: the tile's scales in shared memory, as a tensor (blocks, outer).
            grid: the scales in global memory, and the tile's place in them.
        """
        thread, _, _ = cute.arch.thread_idx()
        atoms = cute.ceil_div(grid.block_count, BLOCKS)
        atom = grid.block0 // BLOCKS + thread // self.rows
        word = thread % self.rows
        outer = grid.outer0 + word % QUARTERS * QUARTER + word // QUARTERS
        inside = (outer < grid.stop) | (outer >= grid.outer_count)
        if (thread < cute.size(scales) // BLOCKS) & (atom < atoms) & inside:
            first = (Int64(grid.outer0 // TILE) * atoms + atom) * (TILE * BLOCKS)
            at = grid.address + first + grid.outer0 % TILE * (QUARTERS * BLOCKS) + word * BLOCKS
            mine = scales[None, word % QUARTERS * self.run + word // QUARTERS]
            vector_at(Int32, at)[0] = cute.recast_tensor(mine, Int32)[thread // self.rows]
