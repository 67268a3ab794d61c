"""The mainloop of 4-bit weights and few rows of x: whole words are decoded, and multiplied by a warp's own MMAs.

A warp's MMA leaves free which places of the contraction a thread multiplies, as long as both operands agree. So thread
t % 4 of a k-tile of 128 has 32 neighbouring elements of a weight row, which are one block of MXFP4 or two of NVFP4, and
one load of 16 bytes, and of x the same 32 columns. A wgmma fixes the places: with it a thread takes a load for every 8
elements, and all scales of the k-tile.

Weight rows, columns of the result and accumulators are those of `DecodingMainloop`.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Int32, Uint8, Uint16, const_expr

from ...decoding.decoder import Decoder
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
from .decoding import DecodingMainloop, ScaleGrid, WeightScales, thread_of_warpgroup

# Threads with the same rows: each has a block of every row in a k-tile.
QUAD = 4
# Words of a thread's elements, of which each has a pair of every 8 of them.
WORDS, WORD_BYTES = 4, 4
ELEMENTS = WORDS * WORD_ELEMENTS
PAIRS = WORD_ELEMENTS // 2
# Rows of x of one MMA.
COLUMNS = 8
# Threads whose columns of x are in the second half of a k-tile begin with the second half of their elements: else they
# would ask for the banks of those in the first. The first pairs of their words are from there (`E2m1.place`).
TURNED = 2


class BlockScales(WeightScales):
    """The scales of a thread's own elements, one byte or two, for each row and k-tile. The first ones of a tile are
    asked for before the epilogue of the tile before.

    next_block: the first block of a row whose scale was asked for. count: a thread's blocks. is_turned: whether the
    thread begins with the second half of its elements.
    """

    def __init__(self, grid: ScaleGrid, rows: SwappedRows, layout: str, decoder: Decoder):
        super().__init__(grid._replace(words=1), rows, layout, decoder)
        self.count = grid.words
        self.next_block = cute.make_rmem_tensor(1, Int32)
        self.is_turned = cute.arch.lane_idx() % QUAD & TURNED != 0

    def begin(self, work: WorkTile) -> None:
        """Ask for the first scales of a tile."""
        self._aim(work)
        self.next_block[0] = cute.arch.lane_idx() % QUAD * self.count
        self._fetch_next()

    def ask_next(self) -> None:
        """Ask for the scales of the next k-tile; of the one behind the last there are none."""
        self.next_block[0] += QUAD * self.count
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
        """Make `words` of the bytes that were asked for, and `large` the greatest where bytes may be large: bad ones
        are noted where it is, else now.
        """
        self.large[0] = Int32(0)
        for i in range(self.rows.count):
            self.words[i] = self.next[i]
            self.large[0] = cutlass.max(self.large[0], self.words[i])
        if self.decoder.scales.first_large is None:
            self.note_bad()

    def has_large(self) -> Boolean:
        """Whether any thread of the warp has a large one, as a bad one is."""
        return cute.arch.vote_any_sync(self.large[0] >= self.decoder.scales.first_large)

    def note_bad(self) -> None:
        for i in range(self.rows.count):
            self.bad[0] |= self.decoder.scales.bad(self.words[i], i)

    @cute.jit
    def spoil(self, acc: cute.Tensor):
        """Make NaN of the rows that had a bad scale in any thread's block."""
        for distance in cutlass.range_constexpr(1, ROW_HALVES + 1):
            self.bad[0] |= cute.arch.shuffle_sync_bfly(self.bad[0], distance)
        WeightScales.spoil(self, acc)


class FewRowsMainloop(DecodingMainloop):
    """As `DecodingMainloop`, by words of 8 elements."""

    scales_type = BlockScales

    def fragments(self, sA: cute.Tensor, sB: cute.Tensor, warpgroup: Int32) -> tuple[Int32, Int32]:
        """Where in the first stage a thread's first weights and first columns of x lie."""
        thread = thread_of_warpgroup()
        row, place = thread % 32 // QUAD, thread % QUAD
        chunk = place ^ swizzle_of(row, self.row_bytes)
        box, first = place // TURNED, place % TURNED * PAIRS
        weights = self.rows.column(0, warpgroup, thread) * self.row_bytes + chunk * SWIZZLE_CHUNK
        columns = (box * self.tile.m + row) * SWIZZLE_BYTES + (first ^ place & TURNED ^ row) * SWIZZLE_CHUNK
        return Int32(sA.iterator.toint()) + weights, Int32(sB.iterator.toint()) + columns

    @cute.jit
    def mma(
        self, acc: cute.Tensor, fragments: tuple, scales: BlockScales, tile: MmaTile,
        stages: pipeline.PipelineTmaAsync, state: pipeline.PipelineState, turns: Turns,
    ):  # fmt: skip
        """acc = A B^T over all of K; called by a whole warpgroup, whose warps do not wait for each other. Returns the
        advanced state.
        """
        weights, columns = fragments
        acc.fill(0.0)
        rows = tile.work.group_end - tile.work.row
        for _ in cutlass.range(scales.grid.k_tiles, unroll=1):
            scales.take()
            scales.ask_next()
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
            state.advance()
        scales.begin(tile.next_work)
        scales.spoil(acc)
        return state

    def _words(self, first: Int32) -> list[cute.Tensor]:
        """A thread's block of each of its rows."""
        return [_shared_words(first + self.rows.distance(row) * self.row_bytes) for row in range(self.rows.count)]

    @cute.jit
    def _multiply_small(
        self, acc: cute.Tensor, words: list[cute.Tensor], first_column: Int32, scales: BlockScales, rows: Int32
    ):  # fmt: skip
        """acc += a k-tile without large scales, of as many boxes of x's rows as have some."""
        if rows > COLUMNS:
            self._multiply(acc, words, first_column, scales, self.tile.m, False)
        else:
            self._multiply(acc, words, first_column, scales, COLUMNS, False)

    def _multiply(
        self, acc: cute.Tensor, words: list[cute.Tensor], first_column: Int32, scales: BlockScales, columns: int,
        large: bool,
    ) -> None:  # fmt: skip
        """acc += a k-tile, of the first `columns` rows of x. `large`: some scale of the warp's is."""
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
                x = _shared_words(at)
                for slab in range(self.tile.slabs):
                    upper, lower = weights[ROW_HALVES * slab : ROW_HALVES * (slab + 1)]
                    sums = registers(acc, slab * self.tile.m // 2 + 4 * column, 4)
                    for k in range(0, WORDS, 2):
                        a = [upper[k], lower[k], upper[k + 1], lower[k + 1]]
                        warp_mma.add(sums, a, [x[k], x[k + 1]])


def _shared_words(address: Int32) -> cute.Tensor:
    """16 bytes of shared memory, by one load."""
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=WORDS * WORD_BYTES)
    words = cute.make_rmem_tensor(WORDS, Int32)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(WORDS)), words)
    return words
