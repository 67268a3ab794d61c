"""Weight rows of E2M1 are decoded to E4M3 in shared memory, for FP8 MMAs. These MMAs leave no registers for decoding.

Each block of 32 elements has a power-of-two scale, and so has each row. The epilogue multiplies sums by the row's
scale. The decoder multiplies elements by the block's factor: the block's scale divided by the row's, 2^(u - 6). Here u
is an integer, 0 .. 12. An E2M1 number times this factor is an E4M3 number, down to half of 2^-6. So the eight
magnitudes of a block are eight bytes, and one byte permutation looks up four elements.

In E4M3 bytes the exponent begins at bit 3. So adding 8 u to the byte of a normal number multiplies the number by 2^u.

A word has eight neighbouring elements, as in checkpoints. Decoding a word takes 9 instructions. Values that belong to a
block are computed for four blocks of a thread at once, one in each byte of a word.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint8, Uint16

from ..device.chunks import CHUNK_WORDS, chunk_at, load_chunk
from ..device.gmem import CHUNK_BYTES, vector_at
from ..device.invariant import Invariant
from ..device.swizzle import SWIZZLE_BYTES, swizzle_of
from ..epilogue.sizes import THREADS
from ..formats import MXFP4_ROWS
from ..memory.weights import GateRows
from ..schedule.work import WorkTile
from ..specs import BLOCK_ROWS
from .scales import BYTE_SIGNS

GREATEST = MXFP4_ROWS.row_binades
"""The u of a block whose scale is its row's greatest: 2^(GREATEST - 6) times the row's own power of two."""
EXPONENT = 6
"""The decoder multiplies elements of a block by 2^(u - EXPONENT)."""
ROW_BLOCKS = SWIZZLE_BYTES // (2 * CHUNK_BYTES)
"""Number of blocks of a row in a k-tile. The elements of a block are a chunk of 16 bytes."""
BLOCKS, ROWS = 2, 2
"""BLOCKS: a thread has two neighbouring blocks of each of its rows. ROWS: two of its rows share a word."""
# The E4M3 bytes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6, times 2^-6. Adding 8 u to a byte doubles its number u times.
# 0.5 for u = 0 is an exception (HALF_OF_LEAST_NORMAL): half of the least normal number is a subnormal, so its byte is
# not 8 less than the byte of 1.
LOWER, UPPER = 0x0C080000, 0x1C181410
HALF_OF_LEAST_NORMAL = 0x04040404
BOTH_BLOCKS, ALL_U = 0x0101, 0x0F0F0F0F
MAGNITUDES = 0x77777777
# Selectors of prmt for (word << 4, word): signs of the first and of the last four elements, each in all bits of a byte.
FIRST_SIGNS, LAST_SIGNS = 0xD9C8, 0xFBEA


class ScaleAddresses(NamedTuple):
    """Scale bytes (E8M0) of weights. Each block of 32 elements has one, and each row has one.

    Attributes:
        blocks_at: the address of [E, rows, blocks], the scales of blocks.
        rows_at: the address of [E, rows], the scales of rows.
        rows, blocks: rows of an expert, blocks of a row.
        gate: the order of a gated layer's weight rows.
    """

    blocks_at: Int64
    rows_at: Int64
    rows: Int32
    blocks: Int32
    gate: GateRows


class RowsInFp8(Invariant):
    """Decoder of k-tiles (128 columns of a tile's weight rows) from E2M1 to E4M3, in shared memory. 128 threads run it.
    Two threads share a row, two blocks of 32 elements each; a thread has every 64th row.

    A block's factor is 2^(u - 6): its scale divided by its row's (top of this file).

    Scales are loaded two k-tiles ahead. These loads are issued after the fence that ends a k-tile, not before it, since
    a fence waits for all loads.

    Args:
        scales: where the scale bytes of blocks and of rows lie.
        parts, part_n: parts of a tile, and weight rows of each. A gated layer has two parts, its activated half and its
            linear half; other layers have one.
        ahead: number of chunks that a thread reads before it decodes the first.

    Attributes:
        times: indices of a thread's rows of a tile.
        is_aligned: True if one load of 16 bits brings the scales of the thread's two blocks of a row.
        expert: the address of the expert's block scales.
        begins: for each of the thread's rows, the offset of the row's block scales from `expert`.
        bases, eights, halves: a byte for each of the thread's blocks in a k-tile: two blocks of a row, two rows in a
            word. bases: 6 - (the row's scale byte), modulo 16; `turn` adds the block's scale byte to get u. eights:
            8 u. halves: the E4M3 byte of 0.5 times the block's factor; it is 8 u, or 4 if u = 0.
        pending: [2, rows], block scales that are being loaded. If `is_aligned`, element 0 of a row has both scales,
            else each element has one.
    """

    def __init__(self, scales: ScaleAddresses, parts: int, part_n: int, ahead: int):
        self.scales = scales
        self.part_n = part_n
        self.ahead = ahead
        self.rows_at_once = THREADS * BLOCKS // ROW_BLOCKS
        self.times = range(parts * part_n // self.rows_at_once)
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % THREADS
        self.row, self.first_block = thread // BLOCKS, thread % BLOCKS * BLOCKS
        self.is_aligned = Boolean((scales.blocks % BLOCKS == 0) & (scales.blocks_at % BLOCKS == 0))
        self.expert = cute.make_rmem_tensor(1, Int64)
        self.begins = cute.make_rmem_tensor(len(self.times), Int32)
        self.pending = cute.make_rmem_tensor((BLOCKS, len(self.times)), Int32)
        words = len(self.times) // ROWS
        self.bases, self.eights, self.halves = (cute.make_rmem_tensor(words, Int32) for _ in range(3))
        self.narrow_row = SWIZZLE_BYTES // 2

    @cute.jit
    def begin(self, work: WorkTile, k_tile: Int32, following: Int32):
        """Load a tile's scales: the scales of the thread's rows, and the scales of the thread's blocks in the tile's
        first two k-tiles.

        k_tile, following: the indices of these two k-tiles.
        """
        scales, expert = self.scales, Int64(work.expert)
        self.expert[0] = scales.blocks_at + expert * (scales.rows * scales.blocks)
        rows = [cutlass.min(self._weight_row(work, i), scales.rows - 1) for i in self.times]
        for i in cutlass.range_constexpr(len(self.times)):
            self.begins[i] = rows[i] * scales.blocks
        self._start_loads(k_tile)
        # These loads are issued before the loads above are waited for.
        of_rows = vector_at(Uint8, scales.rows_at + expert * scales.rows)
        bases = [(GREATEST - EXPONENT - Int32(of_rows[row]) & 0xF) * BOTH_BLOCKS for row in rows]
        for word in cutlass.range_constexpr(cute.size(self.bases)):
            self.bases[word] = self._joined(bases, word)
        self.turn(following)

    def _weight_row(self, work: WorkTile, i: int) -> Int32:
        """Return the index, among an expert's weight rows, of a thread's i-th row. It may be past the last row."""
        gate = self.scales.gate
        part, first = divmod(i * self.rows_at_once, self.part_n)
        block = (work.n_tile * self.part_n + first + self.row) // BLOCK_ROWS
        return self.row % BLOCK_ROWS * gate.step + block * gate.block + part * gate.half

    def _joined(self, of_rows: list[Int32], word: int) -> Int32:
        """Join the 16-bit numbers of two rows in one word. The rows are the two that share word number `word`.

        of_rows: a 16-bit number for each of the thread's rows: a byte for each block.
        """
        return of_rows[ROWS * word] | of_rows[ROWS * word + 1] << 16

    @cute.jit
    def turn(self, k_tile: Int32):
        """Compute `eights` and `halves`, which `_magnitudes` needs in the next k-tile. They come from block scales that
        are already loaded. Then start to load the block scales of k-tile `k_tile`.

        A block's factor is 2^(u - 6), with u = s - (r - 6). Here s is the scale byte of the block and r that of the
        row. u is less than 16. So the lower halves of bytes suffice, and no carry leaves a byte. Blocks of zeros may
        have any u.
        """
        for word in cutlass.range_constexpr(cute.size(self.eights)):
            scales = self._joined([self.pending[0, i] for i in self.times], word)
            if not self.is_aligned:
                scales |= self._joined([self.pending[1, i] for i in self.times], word) << 8
            u = (scales & ALL_U) + self.bases[word] & ALL_U
            is_zero = Int32(BYTE_SIGNS - 2**32) - u  # in the highest bits of bytes
            self.eights[word] = u << 3
            self.halves[word] = is_zero >> 5 & HALF_OF_LEAST_NORMAL | self.eights[word]
        self._start_loads(k_tile)

    @cute.jit
    def _start_loads(self, k_tile: Int32):
        """Start to load the block scales of a k-tile. Past a row's last block, the row's last scales are loaded: any
        will do, since the elements there are zeros."""
        first, last = k_tile * ROW_BLOCKS + self.first_block, self.scales.blocks - 1
        if self.is_aligned:
            first = cutlass.min(first, last - 1)
            for i in cutlass.range_constexpr(len(self.times)):
                both = vector_at(Uint16, self.expert[0] + Int64(self.begins[i] + first))[0]
                self.pending[0, i] = Int32(both) & 0xFFFF
        else:
            scales = vector_at(Uint8, self.expert[0])
            for block in cutlass.range_constexpr(BLOCKS):
                at = cutlass.min(first + block, last)
                for i in cutlass.range_constexpr(len(self.times)):
                    self.pending[block, i] = Int32(scales[self.begins[i] + at]) & 0xFF

    def decode(self, narrow: Int32, wide: Int32) -> None:
        """Decode a k-tile in shared memory, from E2M1 rows of 64 bytes at address `narrow` to E4M3 rows of 128 bytes at
        address `wide`. Both are swizzled."""
        of_source, of_target = (swizzle_of(self.row, bytes_) for bytes_ in (self.narrow_row, SWIZZLE_BYTES))
        source = narrow + self.row * self.narrow_row + (self.first_block ^ of_source) * CHUNK_BYTES
        target = wide + self.row * SWIZZLE_BYTES + (2 * self.first_block ^ of_target) * CHUNK_BYTES
        places = [divmod(number, BLOCKS) for number in range(len(self.times) * BLOCKS)]

        def load(i: int, block: int) -> cute.Tensor:
            return load_chunk((source ^ Int32(block * CHUNK_BYTES)) + i * (self.rows_at_once * self.narrow_row))

        chunks = list(itertools.starmap(load, places[: self.ahead]))
        for number, (i, block) in enumerate(places):
            lower, upper = self._magnitudes(i, block)
            decoded = [half for j in range(CHUNK_WORDS) for half in _decoded(chunks[number][j], lower, upper)]
            # Loads come before the stores, since the compiler moves no load past a store.
            if number + self.ahead < len(places):
                chunks.append(load(*places[number + self.ahead]))
            for half in range(2):
                at = (target ^ Int32((2 * block + half) * CHUNK_BYTES)) + i * (self.rows_at_once * SWIZZLE_BYTES)
                _store(at, decoded[half * CHUNK_WORDS : (half + 1) * CHUNK_WORDS])

    def _magnitudes(self, i: int, block: int) -> tuple[Int32, Int32]:
        """Return the eight magnitudes of E2M1, multiplied by a block's factor, as E4M3 bytes in two words: the four
        smallest, then the four greatest. These words are the table in which `_decoded` looks elements up.

        i, block: the thread's i-th row, and the block in this row.
        """
        word, row = divmod(i, ROWS)
        byte = BLOCKS * row + block
        # Bytes of (eights, halves); the byte of 0 is the sign of 8 u, in all bits.
        selector = byte << 12 | byte << 8 | 4 + byte << 4 | 8 + byte
        eights, halves = self.eights[word], self.halves[word]
        lower = Int32(cute.arch.prmt(eights, halves, Int32(selector)))
        upper = Int32(cute.arch.prmt(eights, eights, Int32(byte * 0x1111)))
        return lower + LOWER, upper + UPPER


def _decoded(word: Int32, lower: Int32, upper: Int32) -> tuple[Int32, Int32]:
    """Return a word's eight E2M1 elements as E4M3 bytes in two words.

    lower, upper: the eight magnitudes of E2M1 times the block's factor, as E4M3 bytes: the four smallest, then the four
    greatest (`_magnitudes`).
    """
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
