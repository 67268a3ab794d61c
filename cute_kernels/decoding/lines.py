"""Weight rows decoded into shared memory, for GEMMs that contract over these rows: dx = dy w.

MMA registers hold neighbours along the contraction. Here these belong to different weight rows, while a word of narrow
elements holds neighbours of one row. So a k-tile (64 weight rows) of 128 columns is decoded to 16-bit numbers in shared
memory, and MMAs read it transposed from there, like 16-bit weights.

A chunk is 16 bytes of a weight row: 16 elements of 8 bits or 32 of 4. Each of 128 threads has two or four chunks of
every k-tile, and a word of scales for each chunk. The thread copies its chunks and scales to a slot in shared memory,
some k-tiles ahead. No other thread reads them, so the thread waits only for its own copies. Threads of a quarter warp
write decoded numbers to different banks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint8, Uint16

from ..device.chunks import CHUNK_WORDS, chunk_at, load_chunk
from ..device.gmem import CHUNK_BYTES, bytes_if, copy_chunk, offset_by, vector_at
from ..device.invariant import Invariant
from ..device.select import select
from ..epilogue.sizes import THREADS
from ..formats import BITS, Format
from ..memory.block_scales import BLOCK as SCALE_ROWS
from .decoder import Decoder

DEPTH = 64
"""Weight rows of a k-tile."""
BLOCK = 64
"""Columns of a block of a decoded k-tile in shared memory. A row of a block is a line of 128 bytes."""
LINE_BYTES = 128
BLOCK_BYTES = DEPTH * LINE_BYTES
WORD_BYTES = 4
VECTOR = 8
"""16-bit numbers that a thread stores at once."""
SCALE_DTYPES = {1: Uint8, 2: Uint16, 4: Int32}


class Experts(NamedTuple):
    """Quantised weights [E, rows, columns] in global memory.

    Attributes:
        address: the address of the first expert's weights.
        units: distance from expert to expert, in units of 16 bytes.
        pitch: distance from row to row, in units of 16 bytes.
        rows, columns: sizes of an expert's weight, in elements.
        scales: the address of the scales, [E, scale_rows, scale_pitch] bytes.
        scale_pitch: bytes of a row of scales.
        scale_rows: rows of scales of an expert.
    """

    address: Int64
    units: Int64
    pitch: Int32
    rows: Int32
    columns: Int32
    scales: Int64
    scale_pitch: Int32
    scale_rows: Int32


class LineSources(NamedTuple):
    """Addresses of a thread's chunks (16 bytes of a weight row) in one tile, and of the chunks' scales.

    Attributes:
        chunks: for each block of 64 columns, the address of the thread's chunk of weight row 0, and True if the chunk's
            columns exist in w.
        scales: for each block of 64 columns, the address of the scales of this chunk.
        pitch: distance from weight row to weight row, in units of 16 bytes.
        rows: number of weight rows of an expert.
        scale_pitch: bytes of a row of scales.
    """

    chunks: tuple[tuple[Int64, Boolean], ...]
    scales: tuple[Int64, ...]
    pitch: Int32
    rows: Int32
    scale_pitch: Int32


def experts_of(w: cute.Tensor, scales: Int64, weights: Format, columns: Int32) -> Experts:
    """Return the addresses and sizes of quantised weights. This runs on the host.

    Args:
        w: [E, rows, words or bytes of a row].
        scales: the address of the weights' scales, which are contiguous.
        weights: the weights' format.
        columns: elements of a row.
    """
    element_bytes = w.element_type.width // 8
    units = Int64(w.stride[0]) * element_bytes // CHUNK_BYTES
    pitch = Int32(w.shape[2]) * element_bytes // CHUNK_BYTES
    rows = Int32(w.shape[1])
    scale_pitch = weights.num_scales(columns) * (BITS[weights.scale] // 8)
    scale_rows = rows if weights.rows == 1 else cute.ceil_div(rows, SCALE_ROWS)
    return Experts(w.iterator.toint(), units, pitch, rows, columns, scales, scale_pitch, scale_rows)


class DecodedLines(Invariant):
    """Decoder of k-tiles of 64 weight rows by `width` columns. 128 threads run it. Each architecture completes it by a
    method `pair`. A chunk is 16 bytes of a weight row. A slot is the shared memory for a k-tile's chunks and scales.

    Attributes:
        slot_bytes: bytes of a slot.
        lines_at_once: number of weight rows that the 128 threads cover with one chunk each, in every block of 64
            columns.
        times: indices of the groups of `lines_at_once` weight rows in a k-tile.
        blocks: number of blocks of 64 columns.
        count: chunks of a thread in a k-tile.
        pending: the scales that the thread is loading.
    """

    def __init__(self, weights: Format, decoder: Decoder, width: int):
        self.format = weights
        self.decoder = decoder
        chunk_elements = CHUNK_BYTES * 8 // weights.bits
        self.vectors = chunk_elements // VECTOR
        self.lanes_a_line = BLOCK // chunk_elements
        self.lines_at_once = THREADS // self.lanes_a_line
        self.times = range(DEPTH // self.lines_at_once)
        self.blocks = width // BLOCK
        self.count = len(self.times) * self.blocks
        self.scale_block = min(weights.block, chunk_elements)
        scale_bytes = chunk_elements // self.scale_block * BITS[weights.scale] // 8
        self.scale_dtype = SCALE_DTYPES[scale_bytes]
        self.chunk_bytes = self.count * THREADS * CHUNK_BYTES
        self.slot_bytes = self.chunk_bytes + self.count * THREADS * WORD_BYTES
        self.pending = cute.make_rmem_tensor(self.count, Int32)
        self.pending.fill(0)
        thread, _, _ = cute.arch.thread_idx()
        self.thread = thread % THREADS
        self.line = self.thread // self.lanes_a_line
        self.lane = self.thread % self.lanes_a_line

    def pair(self, word: Int32, pair: int, value: Int32) -> Int32:
        """Return two neighbouring elements as 16-bit numbers, times their scale, in one word.

        Args:
            word: elements as the thread read them from shared memory.
            pair: the number of the two elements in the word.
            value: their scale, which `Scales.value` converted.
        """
        raise NotImplementedError

    def sources(self, experts: Experts, expert: Int32, n_tile: Int32) -> LineSources:
        """Return the addresses of this thread's chunks (16 bytes of a weight row), and of their scales, in one tile.

        Args:
            experts: the weights of all experts.
            expert: index of the tile's expert.
            n_tile: index of the tile, `width` columns wide, along the weight's columns.
        """
        first = experts.address + Int64(expert) * experts.units * CHUNK_BYTES
        scales = experts.scales + Int64(expert) * experts.scale_rows * experts.scale_pitch
        chunks, at = [], []
        for block in range(self.blocks):
            column = (n_tile * self.blocks + block) * BLOCK + self.lane * (BLOCK // self.lanes_a_line)
            chunks.append((first + self.format.num_bytes(column), column < experts.columns))
            at.append(scales + column // self.format.block * (BITS[self.format.scale] // 8))
        return LineSources(tuple(chunks), tuple(at), experts.pitch, experts.rows, experts.scale_pitch)

    def copy(self, sources: LineSources, slot: Int32, first_row: Int32) -> None:
        """Start to copy the thread's chunks of 64 weight rows to a slot in shared memory. Chunks outside of w are
        filled with zeros.

        Args:
            sources: the addresses of the chunks, from `sources`.
            slot: the slot's address.
            first_row: the first of the 64 rows.
        """
        target = slot + self.thread * CHUNK_BYTES
        for time in self.times:
            line = first_row + self.line + time * self.lines_at_once
            is_row = line < sources.rows
            distance = select(is_row, line, Int32(0)) * sources.pitch
            for block, (first, has_columns) in enumerate(sources.chunks):
                is_there = is_row & has_columns
                source = offset_by(select(has_columns, first, sources.chunks[0][0]), distance)
                place = (time * self.blocks + block) * THREADS * CHUNK_BYTES
                copy_chunk(target + place, source, bytes_if(is_there))

    @cute.jit
    def start_loads(self, sources: LineSources, first_row: Int32, slot_before: Int32):
        """Start to load this thread's scales of 64 weight rows into registers (`pending`). Before that, write to shared
        memory the scales that the previous call loaded.

        Args:
            sources: the addresses of the scales, from `sources`.
            first_row: the first of the 64 rows.
            slot_before: the address of the slot that has the k-tile of the previous call.
        """
        words = self._scale_words(slot_before)
        for i in cutlass.range_constexpr(self.count):
            words[i * THREADS] = self.pending[i]
        for time in cutlass.range_constexpr(len(self.times)):
            line = first_row + self.line + time * self.lines_at_once
            row = line // self.format.rows
            for block in cutlass.range_constexpr(self.blocks):
                # Outside of w: scale 0, since a stale NaN scale would turn padding zeros into NaN.
                word = Int32(0)
                if (line < sources.rows) & sources.chunks[block][1]:
                    at = sources.scales[block] + row * sources.scale_pitch
                    word = Int32(vector_at(self.scale_dtype, at)[0])
                    if cutlass.const_expr(self.scale_dtype.width < 32):
                        word = word & (2**self.scale_dtype.width - 1)
                self.pending[time * self.blocks + block] = word

    def read(self, slot: Int32, times: Sequence[int]) -> tuple[list[cute.Tensor], list[Int32]]:
        """Return the thread's chunks (16 bytes each, as words) of a slot, and the word of scales of each chunk.

        All reads must be issued before `write`, since the compiler moves no load past a store.

        Args:
            slot: the slot's address.
            times: which groups of `lines_at_once` weight rows to read; `self.times` has all.
        """
        scales = self._scale_words(slot)
        numbers = [time * self.blocks + block for time in times for block in range(self.blocks)]
        chunks = [load_chunk(slot + (number * THREADS + self.thread) * CHUNK_BYTES) for number in numbers]
        return chunks, [scales[number * THREADS] for number in numbers]

    def write(self, chunks: list[cute.Tensor], scales: list[Int32], target: Int32, times: Sequence[int]) -> None:
        """Decode the thread's chunks and write them to a decoded k-tile in shared memory. The k-tile has blocks of 64
        columns, in lines with a 128-byte swizzle.

        Args:
            chunks, scales: the chunks and, for each, its word of scales, as `read` returned them.
            target: the address of the decoded k-tile.
            times: the groups of `lines_at_once` weight rows that `read` read.
        """
        swizzled = (self.lane * self.vectors ^ self.line % 8) * CHUNK_BYTES
        first = target + self.line * LINE_BYTES + swizzled
        for i, time in enumerate(times):
            for block in range(self.blocks):
                number = i * self.blocks + block
                words, values = chunks[number], self._values(scales[number])
                line = first + block * BLOCK_BYTES + time * self.lines_at_once * LINE_BYTES
                for vector in range(self.vectors):
                    value = values[vector * VECTOR // self.scale_block]
                    store = cute.make_rmem_tensor(CHUNK_WORDS, Int32)
                    for pair, word in enumerate(self._vector(words, block, vector, value)):
                        store[pair] = word
                    cute.autovec_copy(store, chunk_at(line ^ Int32(vector * CHUNK_BYTES)))

    def _vector(self, words: cute.Tensor, block: int, vector: int, value: Int32) -> list[Int32]:
        """Decode vector number `vector` of a chunk: eight numbers, in order.

        Args:
            words: the chunk, 16 bytes of a weight row.
            block: index of the block of 64 columns that has the chunk.
            value: the value of the scale that these numbers share.
        """
        element = self.decoder.element
        if element.pairs == 1:  # pairs are in order
            return [self.pair(words[2 * vector + i // 2] >> 16 * (i % 2), 0, value) for i in range(CHUNK_WORDS)]
        # Word t has elements 2 t and 2 t + 1 of each eight, in an order that depends on the block of 32.
        pair = next(p for p in range(element.pairs) if element.place(p, 2 * block) == vector)
        return [self.pair(words[i], pair, value) for i in range(CHUNK_WORDS)]

    def _values(self, word: Int32) -> list[Int32]:
        """Return the values of the scales in a chunk's word of scales."""
        count = max(self.scale_dtype.width // BITS[self.format.scale], 1)
        if count == 1:
            return [self.decoder.scales.value(word)]
        return [self.decoder.scales.value(word >> 8 * i & 0xFF) for i in range(count)]

    def _scale_words(self, slot: Int32) -> cute.Tensor:
        """Return a view of a slot's scale words that starts at this thread's first word. The thread's words are THREADS
        apart."""
        at = slot + self.chunk_bytes + self.thread * WORD_BYTES
        pointer = cute.make_ptr(Int32, at, cute.AddressSpace.smem, assumed_align=WORD_BYTES)
        return cute.make_tensor(pointer, cute.make_layout(self.count * THREADS))
