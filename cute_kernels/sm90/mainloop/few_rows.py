"""The mainloop of 4-bit weights and few rows of x: whole words are decoded, and multiplied by a warp's own MMAs.

A warp's MMA leaves free which places of the contraction a thread multiplies, as long as both operands agree. So thread
t % 4 of a k-tile of 128 has 32 neighbouring elements of a weight row, which are one block and one load of 16 bytes, and
of x the same 32 columns. A wgmma would fix the places: it takes each thread a load for every 2 elements, and 4 scales.

Weight rows, columns of the result and accumulators are those of `DecodingMainloop`.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32

from ...device.select import select
from ...device.warp_mma import WarpMma
from ...formats import SCALE_BLOCK
from ..budget import ROW_BYTES
from ..fragments import TileShare, registers
from ..swapped_rows import ROW_HALVES, SWIZZLE_CHUNK
from ..swizzle import swizzle_of
from ..turns import Turns
from .base import MmaTile, Operands
from .decode import product
from .decoding import DecodingMainloop, WeightScales, thread_of_warpgroup

# Threads with the same rows: each has a block of every row in a k-tile.
QUAD = 4
# A thread's words of a block, of 8 elements each.
WORDS = 4
WORD = SCALE_BLOCK // WORDS
# Rows of x of one MMA.
COLUMNS = 8
# Threads whose columns of x are in the second half of a k-tile read words in another order: else they would ask for the
# banks of those in the first.
TURNED = 2


class BlockScales(WeightScales):
    """A byte for each row and k-tile: that of the thread's own block."""

    def _fetch(self, k_tile: Int32) -> None:
        self._fetch_bytes(k_tile)

    def take(self) -> None:
        self._note()

    @cute.jit
    def spoil(self, acc: cute.Tensor):
        """Make NaN of the rows that had a bad scale in any thread's block."""
        for distance in cutlass.range_constexpr(1, ROW_HALVES + 1):
            self.bad[0] |= cute.arch.shuffle_sync_bfly(self.bad[0], distance)
        self.spoil_bad(acc)


class FewRowsMainloop(DecodingMainloop):
    """As `DecodingMainloop`, by words of 8 elements."""

    def scales(self, operands: Operands, share: TileShare) -> BlockScales:
        return BlockScales(self.scale_grid(operands, share), self.rows, self.layout, self.decoder)

    def fragments(self, sA: cute.Tensor, sB: cute.Tensor, warpgroup: Int32) -> tuple[Int32, Int32]:
        """Where in the first stage a thread's first weights and first columns of x lie."""
        thread = thread_of_warpgroup()
        row, place = thread % 32 // QUAD, thread % QUAD
        chunk = place ^ swizzle_of(row, self.row_bytes)
        weights = self.rows.column(0, warpgroup, thread) * self.row_bytes + chunk * SWIZZLE_CHUNK
        box, first = place // TURNED, place % TURNED * WORDS
        columns = (box * self.tile.m + row) * ROW_BYTES + (first ^ place & TURNED ^ row) * SWIZZLE_CHUNK
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
        for k_tile in cutlass.range(scales.grid.k_tiles, unroll=1):
            scales.take()
            scales.ask(k_tile + 1, tile.next_work)
            stages.consumer_wait(state)
            words = self._read_words(weights + state.index * (self.tile.n * self.row_bytes))
            first_column = columns + state.index * (self.tile.m * self.stage_k * self.dtype.width // 8)
            if cute.arch.vote_any_sync(scales.large[0] != 0):
                self._multiply(acc, words, first_column, scales, True)
            else:
                self._multiply(acc, words, first_column, scales, False)
            cute.arch.sync_warp()
            stages.consumer_release(state)
            state.advance()
        scales.spoil(acc)
        return state

    def _read_words(self, first: Int32) -> cute.Tensor:
        """A thread's words of each of its rows, in its own order."""
        words = cute.make_rmem_tensor((WORDS, self.rows.count), Int32)
        is_turned = cute.arch.lane_idx() % QUAD >= TURNED
        for row in range(self.rows.count):
            raw = _shared_words(first + self.rows.distance(row) * self.row_bytes)
            for word in range(WORDS):
                words[word, row] = select(is_turned, raw[word ^ TURNED], raw[word])
        return words

    def _multiply(
        self, acc: cute.Tensor, words: cute.Tensor, first_column: Int32, scales: BlockScales, large: bool
    ) -> None:
        """acc += a k-tile. `large`: some scale of the warp's is."""
        decoder = self.decoder
        warp_mma = WarpMma(self.dtype)
        multipliers = [decoder.multiplier(scales.words[row], 0) for row in range(self.rows.count)]
        for word in range(WORDS):
            pairs = [decoder.decoded_word(words[word, row], multipliers[row]) for row in range(self.rows.count)]
            if large:
                rests = [decoder.rest_of_multiplier(scales.words[row], 0) for row in range(self.rows.count)]
                pairs = [[product(pair, rest) for pair in row] for row, rest in zip(pairs, rests, strict=True)]
            for column in range(self.tile.m // COLUMNS):
                at = (first_column ^ Int32(word * SWIZZLE_CHUNK)) + column * (COLUMNS * ROW_BYTES)
                x = _shared_words(at)
                for slab in range(self.tile.slabs):
                    upper, lower = pairs[ROW_HALVES * slab : ROW_HALVES * (slab + 1)]
                    sums = registers(acc, slab * self.tile.m // 2 + 4 * column, 4)
                    for k in range(0, WORD // 2, 2):
                        a = [upper[k], lower[k], upper[k + 1], lower[k + 1]]
                        warp_mma.add(sums, a, [x[k], x[k + 1]])


def _shared_words(address: Int32) -> cute.Tensor:
    """16 bytes of shared memory, as 4 words."""
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=SWIZZLE_CHUNK)
    words = cute.make_rmem_tensor(WORDS, Int32)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(WORDS)), words)
    return words
