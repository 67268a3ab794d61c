"""Weight rows of E2M1 decoded to E4M3 in shared memory, for FP8 MMAs, which leave no registers for decoding.

Each block of 32 elements has a power-of-two scale, and so has each row. The epilogue multiplies sums by the row's
scale. The elements are multiplied by the block's scale relative to the row's, 2^(u - 6) with u = 0 .. 12: an E2M1
number times this factor is an E4M3 number, down to half of 2^-6. So the eight magnitudes of a block are eight bytes,
and a byte permutation looks up four elements at a time.

A word has eight neighbouring elements, as in checkpoints. Decoding a word takes 9 instructions.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8

from ..device.chunks import CHUNK_WORDS, chunk_at, load_chunk
from ..device.gmem import CHUNK_BYTES, vector_at
from ..device.invariant import Invariant
from ..device.select import select
from ..device.swizzle import SWIZZLE_BYTES, swizzle_of
from ..epilogue.sizes import THREADS
from ..formats import MXFP4_ROWS
from ..memory.weights import GateRows
from ..schedule.work import WorkTile
from ..specs import BLOCK_ROWS
from .scales import BYTE_SIGNS, byte_of

GREATEST = MXFP4_ROWS.row_binades
"""u of a block that has its row's greatest scale, which is 2^(GREATEST - 6) times the row's own power of two."""
EXPONENT = 6
"""Elements of a block are multiplied by 2^(u - EXPONENT)."""
# The E4M3 bytes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6, times 2^-6, for u = 0. The byte of 0.5 is an exception
# (HALF_OF_LEAST_NORMAL): half of the least normal number is a subnormal, whose byte is not that of 1 with an exponent
# one less.
LOWER, UPPER = 0x0C080000, 0x1C181410
HALF_OF_LEAST_NORMAL = 0x0400
# Added to the bytes of four magnitudes: the first doubles all of them, the second all except the lowest, which is 0.
BINADE, BINADE_BUT_OF_ZERO = 0x08080808, 0x08080800
MAGNITUDES = 0x77777777
BYTES_A_WORD = 4
# Selectors of prmt for (word << 4, word): signs of the first and of the last four elements, each in all bits of a byte.
FIRST_SIGNS, LAST_SIGNS = 0xD9C8, 0xFBEA


class BlockScales(NamedTuple):
    """Scale bytes (E8M0) of weights.

    Attributes:
        blocks_at: the address of [E, rows, blocks], a scale for each block of 32 elements.
        rows_at: the address of [E, rows], a power of two for each row.
        rows, blocks: rows of an expert, blocks of a row.
        gate: the order of a gated layer's weight rows.
    """

    blocks_at: Int64
    rows_at: Int64
    rows: Int32
    blocks: Int32
    gate: GateRows


class RowsInFp8(Invariant):
    """Decoder of k-tiles (128 columns of a tile's weight rows) by 128 threads: four threads to a row, one block of 32
    elements to each.

    The scales of the k-tile after the next one are loaded after the fence that ends a k-tile, not before, since a fence
    waits for all loads.

    Args:
        parts, part_n: parts of a tile (2 with a gate) and weight rows of each.
        ahead: chunks that a thread reads before it decodes the first.

    Attributes:
        times: indices of a thread's rows of a tile; the rows are THREADS / 4 apart.
        first: the thread's first weight row of a tile.
        expert: the address of the expert's block scales.
        bases: each row's own scale byte, four in a word.
        pending: block scales that are being loaded, one for each row.
        shifts: u of each row's block in the next k-tile, four in a word.
    """

    def __init__(self, scales: BlockScales, parts: int, part_n: int, ahead: int):
        self.scales = scales
        self.part_n = part_n
        self.ahead = ahead
        self.blocks_a_row = SWIZZLE_BYTES // (2 * CHUNK_BYTES)
        self.rows_at_once = THREADS // self.blocks_a_row
        assert self.rows_at_once == BLOCK_ROWS, "a thread's rows are as far apart as blocks of a gate's layouts"
        self.times = range(parts * part_n // self.rows_at_once)
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % THREADS
        self.row, self.block = thread // self.blocks_a_row, thread % self.blocks_a_row
        self.expert = cute.make_rmem_tensor(1, Int64)
        self.first = cute.make_rmem_tensor(1, Int32)
        self.bases = cute.make_rmem_tensor(len(self.times) // BYTES_A_WORD, Int32)
        self.pending = cute.make_rmem_tensor(len(self.times), Int32)
        self.shifts = cute.make_rmem_tensor(len(self.times) // BYTES_A_WORD, Int32)
        self.narrow_row = SWIZZLE_BYTES // 2

    @cute.jit
    def begin(self, work: WorkTile, k_tile: Int32, following: Int32):
        """Load a tile's scales: the scales of the thread's rows, and its block scales in the tile's first two k-tiles.

        k_tile, following: the indices of these two k-tiles.
        """
        scales, gate, expert = self.scales, self.scales.gate, Int64(work.expert)
        self.expert[0] = scales.blocks_at + expert * (scales.rows * scales.blocks)
        self.first[0] = self.row * gate.step + work.n_tile * (self.part_n // BLOCK_ROWS) * gate.block
        self._start_loads(k_tile)
        # These loads are issued before the loads above are waited for.
        of_rows = vector_at(Uint8, scales.rows_at + expert * scales.rows)
        fetched = cute.make_rmem_tensor(len(self.times), Int32)
        for i in cutlass.range_constexpr(len(self.times)):
            fetched[i] = Int32(of_rows[cutlass.min(self._row(i), scales.rows - 1)]) & 0xFF
        for word in cutlass.range_constexpr(cute.size(self.bases)):
            self.bases[word] = self._packed([fetched[i] for i in self._of_word(word)])
        self.turn(following)

    @cute.jit
    def turn(self, k_tile: Int32):
        """Compute the shifts of the next k-tile from the block scales that were loaded, and start to load the
        block scales of k-tile `k_tile`."""
        for word in cutlass.range_constexpr(cute.size(self.shifts)):
            self.shifts[word] = self._packed([self._shift(i) for i in self._of_word(word)])
        self._start_loads(k_tile)

    def _row(self, i: int) -> Int32:
        """Return the index, in the expert, of a thread's i-th weight row; it may be past the last row."""
        part, in_part = divmod(i * self.rows_at_once, self.part_n)
        return self.first[0] + in_part // BLOCK_ROWS * self.scales.gate.block + part * self.scales.gate.half

    def _shift(self, i: int) -> Int32:
        """Return u of the block in the thread's i-th row: the block's scale is 2^(u - 6) times the row's."""
        word, place = divmod(i, BYTES_A_WORD)
        below = (self.pending[i] & 0xFF) - byte_of(self.bases[word], place)
        return cutlass.max(below + (GREATEST - EXPONENT), Int32(0))

    @cute.jit
    def _start_loads(self, k_tile: Int32):
        """Start to load the block scales of a k-tile. Past a row's last block and past the last row any scale will do,
        since the elements there are zeros.
        """
        rows, blocks = self.scales.rows, self.scales.blocks
        block = cutlass.min(k_tile * self.blocks_a_row + self.block, blocks - 1)
        scales = vector_at(Uint8, self.expert[0])
        for i in cutlass.range_constexpr(len(self.times)):
            self.pending[i] = Int32(scales[cutlass.min(self._row(i) * blocks + block, rows * blocks - 1)])

    def _of_word(self, word: int) -> range:
        """Return the indices of the thread's rows whose bytes lie in word number `word` of `bases` or `shifts`."""
        return range(word * BYTES_A_WORD, (word + 1) * BYTES_A_WORD)

    def _packed(self, numbers: list[Int32]) -> Int32:
        """Pack up to four numbers of one byte each into one word."""
        first, *others = numbers
        for place, number in enumerate(others, 1):
            first |= number << 8 * place
        return first

    def decode(self, narrow: Int32, wide: Int32) -> None:
        """Decode a k-tile in shared memory from address `narrow` (E2M1 rows of 64 bytes) to address `wide` (E4M3 rows
        of 128 bytes). Both are swizzled."""
        source = narrow + self.row * self.narrow_row
        source += (self.block ^ swizzle_of(self.row, self.narrow_row)) * CHUNK_BYTES
        target = wide + self.row * SWIZZLE_BYTES + (2 * self.block ^ self.row % 8) * CHUNK_BYTES
        chunks = [load_chunk(source + i * (self.rows_at_once * self.narrow_row)) for i in self.times[: self.ahead]]
        for i in self.times:
            word, place = divmod(i, BYTES_A_WORD)
            lower, upper = _magnitudes(byte_of(self.shifts[word], place))
            decoded = [half for j in range(CHUNK_WORDS) for half in _decoded(chunks[i][j], lower, upper)]
            # Loads come before the stores, since the compiler moves no load past a store.
            if (following := i + self.ahead) < len(self.times):
                chunks.append(load_chunk(source + following * (self.rows_at_once * self.narrow_row)))
            at = target + i * (self.rows_at_once * SWIZZLE_BYTES)
            _store(at, decoded[:CHUNK_WORDS])
            _store(at ^ Int32(CHUNK_BYTES), decoded[CHUNK_WORDS:])


def _magnitudes(shift: Int32) -> tuple[Int32, Int32]:
    """Return the eight magnitudes of E2M1, times 2^(shift - 6), as E4M3 bytes in two words: the four smallest, then the
    four greatest."""
    lower = shift * BINADE_BUT_OF_ZERO + LOWER
    return select(shift == 0, Int32(LOWER + HALF_OF_LEAST_NORMAL), lower), shift * BINADE + UPPER


def _decoded(word: Int32, lower: Int32, upper: Int32) -> tuple[Int32, Int32]:
    """Return a word's eight elements as E4M3 bytes in two words. lower, upper: the result of `_magnitudes`."""
    indices, moved = word & MAGNITUDES, word << 4
    halves = []
    for number, signs in enumerate((FIRST_SIGNS, LAST_SIGNS)):
        magnitudes = Int32(cute.arch.prmt(lower, upper, indices >> 16 * number))
        negative = Int32(cute.arch.prmt(moved, word, Int32(signs))) & Int32(BYTE_SIGNS - 2**32)
        halves.append(magnitudes | negative)
    return halves[0], halves[1]


def _store(address: Int32, words: list[Int32]) -> None:
    """Store four words at an address in shared memory."""
    registers = cute.make_rmem_tensor(CHUNK_WORDS, Int32)
    for i, word in enumerate(words):
        registers[i] = word
    cute.autovec_copy(registers, chunk_at(address))
