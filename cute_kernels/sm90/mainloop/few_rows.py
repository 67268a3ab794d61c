"""The mainloop of 4-bit weights and few rows of x: threads decode whole words, and warp MMAs multiply them.

With a warp's MMA, any assignment of contraction indices to threads is right, as long as both operands use the same one.
So of each k-tile of 128, thread t has 32 neighbouring elements of a weight row, from 32 (t % 4) on, and the same 32
columns of x. The 32 elements are one block of MXFP4 or two of NVFP4, and one load of 16 bytes. A wgmma, in contrast,
fixes the assignment: a thread needs a load for every 8 elements, and all scales of the k-tile.

As in `DecodingMainloop`, weight rows are the rows of an MMA and rows of x are its columns, and threads have the same
weight rows, output columns and accumulators. "Columns of x" are indices of the contraction.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Int32, Uint8, Uint16, const_expr

from ...decoding.decoder import Decoder
from ...device.chunks import load_chunk
from ...device.gmem import vector_at
from ...device.swizzle import SWIZZLE_BYTES, swizzle_of
from ...device.warp_mma import WarpMma
from ...epilogue.fragments import registers
from ...formats import WORD_ELEMENTS
from ...schedule.work import WorkTile
from ..swapped_rows import ROW_HALVES, SWIZZLE_CHUNK, SwappedRows
from ..turns import Turns
from .base import MmaTile
from .decoders import product
from .decoding import DecodingMainloop
from .weight_scales import ScaleGrid, WeightScales, thread_of_warpgroup

# Threads with the same weight rows: each has its own 32 elements of every row in a k-tile.
QUAD = 4
# WORDS: 32-bit words of a thread's 32 elements in a weight row and k-tile; of every 8 neighbouring elements, each of
# the four words has one pair. PAIRS: pairs in a word.
WORDS = 4
ELEMENTS = WORDS * WORD_ELEMENTS
PAIRS = WORD_ELEMENTS // 2
# Rows of x that one MMA multiplies: its columns.
COLUMNS = 8
# Threads 2 and 3 of a quad, whose columns of x lie in the second half of a k-tile, begin with the second half of their
# elements; otherwise they would read x from the same banks as threads 0 and 1. The first pairs of their words hold
# elements of that half (`E2m1.place`).
TURNED = 2


class OwnScales(WeightScales):
    """The scales of a thread's own elements: one or two bytes for each weight row and k-tile.

    The first scales of a tile are loaded before the epilogue of the previous tile.

    Attributes:
        next_block: index, in each weight row, of the first block whose scale is being loaded.
        count: number of a thread's blocks in a weight row and k-tile, 1 (MXFP4) or 2 (NVFP4).
        is_turned: True if the thread begins with the second half of its elements.
    """

    def __init__(self, grid: ScaleGrid, rows: SwappedRows, layout: str, decoder: Decoder):
        super().__init__(grid._replace(words=1), rows, layout, decoder)
        self.count = grid.words
        self.next_block = cute.make_rmem_tensor(1, Int32)
        self.is_turned = cute.arch.lane_idx() % QUAD & TURNED != 0

    def begin(self, work: WorkTile) -> None:
        """Start loading the first scales of a tile."""
        self._aim(work)
        self.next_block[0] = cute.arch.lane_idx() % QUAD * self.count
        if self.k_tiles.splits > 1:
            self.next_block[0] += self.k_tiles.first * (QUAD * self.count)
        self._fetch_next()

    def start_next_loads(self) -> None:
        """Start loading the scales of the warpgroup's next k-tile; after the last k-tile nothing is loaded."""
        self.next_block[0] += QUAD * self.count * self.k_tiles.splits
        self._fetch_next()

    @cute.jit
    def _fetch_next(self):
        block = self.next_block[0]
        first = self.expert[0] + block
        dtype = Uint8 if self.count == 1 else Uint16
        for i in cutlass.range_constexpr(self.rows.count):
            self.next[i] = Int32(0)
            if block < self.grid.blocks:
                self.next[i] = Int32(vector_at(dtype, first + self.begins[i])[0]) & (2**dtype.width - 1)

    def take(self) -> None:
        """Make the loaded bytes (`next`) the current ones (`words`), and set `large` to the greatest of them.

        If the scale type has no large scales, bad scales are noted here. Otherwise the caller calls `note_bad` if
        `has_large`, since every bad scale is large.
        """
        self.large[0] = Int32(0)
        for i in range(self.rows.count):
            self.words[i] = self.next[i]
            self.large[0] = cutlass.max(self.large[0], self.words[i])
        if self.decoder.scales.first_large is None:
            self.note_bad()

    def has_large(self) -> Boolean:
        """Return True if any thread of the warp has a large scale (one whose multiplier exceeds bfloat16's range) in
        this k-tile.

        Bad scales (such as NaN), whose weight rows must give NaN, are always large, so that only a warp with large
        scales has to look for bad ones.
        """
        return cute.arch.vote_any_sync(self.large[0] >= self.decoder.scales.first_large)

    def note_bad(self) -> None:
        """Note which of the thread's weight rows have a bad scale in this k-tile, for `write_nan_rows`."""
        for i in range(self.rows.count):
            self.bad[0] |= self.decoder.scales.bad(self.words[i], i)

    @cute.jit
    def write_nan_rows(self, acc: cute.Tensor):
        """Overwrite the accumulators of weight rows with NaN if any of the four threads that share the row had a bad
        scale for it in the tile; then clear `bad`.
        """
        for distance in cutlass.range_constexpr(1, QUAD // 2 + 1):
            self.bad[0] |= cute.arch.shuffle_sync_bfly(self.bad[0], distance)
        WeightScales.write_nan_rows(self, acc)


class FewRowsMainloop(DecodingMainloop):
    """`DecodingMainloop` for 4-bit weights and few rows of x: it decodes words of 8 elements and multiplies by warp
    MMAs (mma.sync)."""

    scales_type = OwnScales

    def fragments(self, sA: cute.Tensor, sB: cute.Tensor, warpgroup_index: Int32) -> tuple[Int32, Int32]:
        """Return two shared-memory addresses in the first stage: of the 32 elements of a thread's first weight row, and
        of the 8 columns of x that the thread reads first."""
        thread = thread_of_warpgroup()
        row, place = thread % 32 // QUAD, thread % QUAD
        chunk = place ^ swizzle_of(row, self.row_bytes)
        box, first = place // TURNED, place % TURNED * PAIRS
        weights = self.rows.column(0, warpgroup_index, thread) * self.row_bytes + chunk * SWIZZLE_CHUNK
        columns = (box * self.tile.m + row) * SWIZZLE_BYTES + (first ^ place & TURNED ^ row) * SWIZZLE_CHUNK
        return Int32(sA.iterator.toint()) + weights, Int32(sB.iterator.toint()) + columns

    @cute.jit
    def mma(
        self, acc: cute.Tensor, fragments: tuple, scales: OwnScales, tile: MmaTile,
        stages: pipeline.PipelineTmaAsync, state: pipeline.PipelineState, turns: Turns,
    ):  # fmt: skip
        """Compute acc = A B^T for a tile; called by a whole warpgroup. Returns the state after the tile's k-tiles.

        The warps of the warpgroup do not wait for each other.
        """
        weights, columns = fragments
        acc.fill(0.0)
        rows = tile.work.group_end - tile.work.row
        k_tiles, after = scales.k_tiles, state
        if const_expr(k_tiles.splits > 1):
            after, state = state.clone(), k_tiles.state(state)
            after.advance(k_tiles.total)
        for _ in cutlass.range(k_tiles.count, unroll=1):
            scales.take()
            scales.start_next_loads()
            stages.consumer_wait(state)
            words = self._words(weights + state.index * (self.tile.n * self.row_bytes))
            first_column = columns + state.index * (self.tile.m * self.stage_k * self.dtype.width // 8)
            if const_expr(self.decoder.scales.first_large is None):
                self._multiply_small(acc, words, first_column, scales, rows)
            else:
                if scales.has_large():
                    scales.note_bad()
                    self._multiply(acc, words, first_column, scales, self.tile.m, True)
                else:
                    self._multiply_small(acc, words, first_column, scales, rows)
            cute.arch.sync_warp()
            stages.consumer_release(state)
            state.advance(k_tiles.splits)
        scales.begin(tile.next_work)
        scales.write_nan_rows(acc)
        return after if const_expr(k_tiles.splits > 1) else state

    def _words(self, first: Int32) -> list[cute.Tensor]:
        """Read a thread's 32 elements (four words) of each of its weight rows in a k-tile. first: address of the first
        row's words."""
        return [load_chunk(first + self.rows.distance(row) * self.row_bytes) for row in range(self.rows.count)]

    @cute.jit
    def _multiply_small(
        self, acc: cute.Tensor, words: list[cute.Tensor], first_column: Int32, scales: OwnScales, rows: Int32
    ):  # fmt: skip
        """Add the products of a k-tile without large scales to acc.

        Args:
            words: the thread's weights, from `_words`.
            first_column: shared-memory address of the 8 columns of x that the thread reads first, in its first row of
                x.
            rows: number of the group's rows of x from the tile's first row on. If there are few, only the first half
                or quarter of the tile's rows of x is multiplied, but at least COLUMNS rows.
        """
        half, quarter = (max(self.tile.m // parts, COLUMNS) for parts in (2, 4))
        if rows > half:
            self._multiply(acc, words, first_column, scales, self.tile.m, False)
        elif const_expr(quarter == half):
            self._multiply(acc, words, first_column, scales, half, False)
        elif rows > quarter:
            self._multiply(acc, words, first_column, scales, half, False)
        else:
            self._multiply(acc, words, first_column, scales, quarter, False)

    def _multiply(
        self, acc: cute.Tensor, words: list[cute.Tensor], first_column: Int32, scales: OwnScales, columns: int,
        large: bool,
    ) -> None:  # fmt: skip
        """Add the products of a k-tile's weights with the first rows of x, which are the MMA's columns, to acc.

        The multiplier of a large scale (above 2, for MXFP4) exceeds bfloat16's range. Weights with such a scale are
        decoded with the greatest multiplier in range, and a second product with `rest_of_multiplier` makes up for the
        missing factor, which is 1 for other weights.

        Args:
            words: the thread's weights, from `_words`.
            first_column: shared-memory address of the 8 elements that the thread reads first, in its first row of x.
            columns: number of rows of x; a multiple of COLUMNS.
            large: True: the warp has a large scale, so all its weights get the second product. False: no weight needs
                it.
        """
        element, scale = self.decoder
        warp_mma = WarpMma(self.dtype)
        bytes_, count = [scales.words[row] for row in range(self.rows.count)], scales.count
        if large:
            multipliers = [scale.multipliers(b, 0, count) for b in bytes_]
        else:
            multipliers = [scale.small_multipliers(b, count, scales.is_turned) for b in bytes_]
        for pair in range(PAIRS):
            weights = [
                [element.decoded(row[word], pair, of_halves[pair * count // PAIRS]) for word in range(WORDS)]
                for row, of_halves in zip(words, multipliers, strict=True)
            ]
            if large:
                rests = [scale.rest_of_multiplier(byte, 0) for byte in bytes_]
                weights = [[product(two, rest) for two in row] for row, rest in zip(weights, rests, strict=True)]
            for column in range(columns // COLUMNS):
                at = (first_column ^ Int32(pair * SWIZZLE_CHUNK)) + column * (COLUMNS * SWIZZLE_BYTES)
                x = load_chunk(at)
                for slab in range(self.tile.slabs):
                    upper, lower = weights[ROW_HALVES * slab : ROW_HALVES * (slab + 1)]
                    sums = registers(acc, slab * self.tile.m // 2 + 4 * column, 4)
                    for k in range(0, WORDS, 2):
                        a = [upper[k], lower[k], upper[k + 1], lower[k + 1]]
                        warp_mma.add(sums, a, [x[k], x[k + 1]])
