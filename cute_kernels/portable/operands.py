"""Operands in shared memory, how they get there and how a warp reads them.

Along: lines of an operand that lie along the contraction, 64 elements of each a stage, in chunks of 16 bytes. Across:
64 lines of the contraction a stage, 64 elements of each in a block of 8 KB, which ldmatrix transposes. Lines of 128
bytes have their chunks at chunk ^ line % 8, narrower ones share 128 bytes and so more lines a number, so that 8 chunks
that are read at once are in banks of their own.

A copy of 16 bytes that has nothing to bring, behind the contraction or a matrix, brings zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from ..device.gmem import CHUNK_BYTES, bytes_if, copy_chunk, offset_by, vector_at
from ..device.invariant import Invariant
from ..device.select import select
from ..device.warp_mma import read_matrices
from ..device.warps import WARP
from ..epilogue.sizes import THREADS
from ..schedule.groups import clamp
from .mainloop import DEPTH

LINE_BYTES = 128
CHUNKS = LINE_BYTES // CHUNK_BYTES
STEP = THREADS // CHUNKS
"""Lines between two of a thread's copies, where lines are of 128 bytes."""
BLOCK = 64
BLOCK_BYTES = DEPTH * LINE_BYTES


def chunk_at(line: Int32, chunk: Int32) -> Int32:
    """Where a chunk of a line of 128 bytes lies, in bytes from the first line."""
    return line * LINE_BYTES + (chunk ^ line % CHUNKS) * CHUNK_BYTES


class Lines(NamedTuple):
    """Where a thread's lines begin: `parts` of the tile, which follow each other, have an address each, and from there
    on a line is as many times 16 bytes away: 32 bits, for registers are few."""

    parts: tuple[Int64, ...]
    distances: cute.Tensor


class Operand(Invariant):
    """What a mainloop asks of either besides `copy`. run: k-tiles between barriers. notes_nans: whether `nans` tells of
    NaNs that `columns` does not. decodes: whether `decode` makes what `columns` reads of each stage, between barriers;
    decoded_bytes: shared memory for that, before the stages."""

    run, notes_nans = 1, False
    decodes, decoded_bytes = False, 0

    def decode(self, stage: Int32) -> None:
        """Decode a stage that has arrived."""

    def advance(self, sources: Any, tile: Int32, before: Int32) -> None:
        """At each run of k-tiles from `tile` on, be it none. `before`: the first stage that was filled before."""

    def rows_of(self, x: Any, stage: Int32, first: Int32 | int, tile: Int32, k: Int32 | int) -> Any:
        """16 rows of the other operand, for step k of a k-tile: 16 of its depth, in this one's order."""
        return x.rows(stage, first, k)


class Along(Operand):
    """`lines` of an operand that lie along the contraction, of `bits` an element."""

    def __init__(self, dtype: type[cutlass.Numeric], lines: int, bits: int = 16):
        self.dtype, self.lines, self.bits = dtype, lines, bits
        self.line_bytes = DEPTH * bits // 8
        self.chunks = self.line_bytes // CHUNK_BYTES
        self.stage_bytes = lines * self.line_bytes
        self.step = THREADS // self.chunks
        self.copies = -(-lines // self.step)
        self.smem = Int32(0)
        thread, _, _ = cute.arch.thread_idx()
        self.line, self.chunk = thread // self.chunks, thread % self.chunks
        self.lane = thread % WARP

    def at(self, line: Int32, chunk: Int32) -> Int32:
        """Where a chunk lies, in bytes from the first line."""
        shared = LINE_BYTES // self.line_bytes
        return line * self.line_bytes + (chunk ^ line // shared % self.chunks) * CHUNK_BYTES

    def copy(self, sources: Lines, stage: Int32, k: Int32, depth: Int32) -> None:
        """The contraction's elements from k on, of lines that begin at `sources`."""
        has_columns = k + self.chunk * (CHUNK_BYTES * 8 // self.bits) < depth
        if self.lines < self.step:
            has_columns = has_columns & (self.line < self.lines)
        num_bytes = bytes_if(has_columns)
        offset = select(has_columns, k * self.bits // 8 + self.chunk * CHUNK_BYTES, Int32(0))
        firsts = [part + offset for part in sources.parts]
        target = self.smem + stage * self.stage_bytes
        for i in range(self.copies):
            source = offset_by(firsts[i * len(firsts) // self.copies], sources.distances[i])
            copy_chunk(target + self.at(self.line, self.chunk) + i * self.step * self.line_bytes, source, num_bytes)

    def matrices(self, stage: Int32, line: Int32, chunk: Int32) -> cute.Tensor:
        """Four matrices of 8 lines of 16 bytes, of which this lane names one."""
        at = self.smem + stage * self.stage_bytes + self.at(line, chunk)
        pointer = cute.make_ptr(self.dtype, at, cute.AddressSpace.smem, assumed_align=CHUNK_BYTES)
        return read_matrices(pointer, self.dtype, 4, False)

    def rows(self, stage: Int32, first: Int32 | int, k: Int32 | int) -> cute.Tensor:
        """16 rows of two chunks, rows first."""
        return self.matrices(stage, self.lane % 16 + first, self.lane // 16 + 2 * k)

    def rows_by_fours(self, stage: Int32, first: Int32 | int, k: Int32 | int) -> Any:
        """The same in another order of the 16: a lane has elements 4 t, 4 t + 2 and 4 t + 1, 4 t + 3, t = lane % 4."""
        words, quad = cute.make_rmem_tensor(4, Int32), self.lane % 4
        for half in range(2):
            at = self.smem + stage * self.stage_bytes
            at += self.at(self.lane // 4 + first + 8 * half, quad // 2 + 2 * k) + quad % 2 * 8
            pointer = cute.make_ptr(Int32, at, cute.AddressSpace.smem, assumed_align=8)
            four = cute.make_rmem_tensor(2, Int32)
            cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(2)), four)
            for place, bytes_ in enumerate((0x5410, 0x7632)):
                words[half + 2 * place] = Int32(cute.arch.prmt(four[0], four[1], Int32(bytes_)))
        return words

    def columns(self, stage: Int32, pair: int, k: Int32 | int) -> Any:
        """16 columns of two chunks, chunks first."""
        line = self.lane // 16 * 8 + self.lane % 8 + pair * 16
        return self.matrices(stage, line, self.lane // 8 % 2 + 2 * k)


class Contraction(NamedTuple):
    """Lines of the contraction, `pitch` times 16 bytes apart, of which the tile's begin at line `first`.

    blocks: where a thread's chunk of each block of 64 elements begins in line 0, and whether the matrix has it.
    indices: the address of int32, which of `count` lines each is; 0: they are in order.
    """

    blocks: tuple[tuple[Int64, Boolean], ...]
    pitch: Int32
    first: Int32
    indices: Int64
    count: Int32


class Across(Operand):
    """Lines of the contraction, of which an operand has `width` elements, 16-bit."""

    def __init__(self, dtype: type[cutlass.Numeric], width: int):
        self.dtype, self.num_blocks = dtype, width // BLOCK
        self.stage_bytes = self.num_blocks * BLOCK_BYTES
        self.smem = Int32(0)
        thread, _, _ = cute.arch.thread_idx()
        self.line, self.chunk = thread // CHUNKS, thread % CHUNKS
        self.lane = thread % WARP

    @cute.jit
    def copy(self, sources: Contraction, stage: Int32, k: Int32, depth: Int32):
        target = self.smem + stage * self.stage_bytes + chunk_at(self.line, self.chunk)
        for i in cutlass.range_constexpr(DEPTH // STEP):
            line = k + self.line + i * STEP
            distance = self._distance(sources, line, depth)
            for number in cutlass.range_constexpr(self.num_blocks):
                begin, is_inside = sources.blocks[number]
                copy_chunk(
                    target + number * BLOCK_BYTES + i * STEP * LINE_BYTES, offset_by(begin, distance),
                    bytes_if(is_inside & (line < depth)),
                )  # fmt: skip

    @cute.jit
    def _distance(self, sources: Contraction, line: Int32, depth: Int32) -> Int32:
        """Of a line of the contraction from line 0 of memory; behind the last, of line 0."""
        row = select(line < depth, sources.first + line, Int32(0))
        if const_expr(not isinstance(sources.indices, int)):
            if (sources.indices != 0) & (line < depth):
                row = clamp(vector_at(Int32, sources.indices)[row], Int32(0), sources.count - 1)
        return row * sources.pitch

    def _matrices(self, stage: Int32, first: Int32 | int, line: Int32, chunk: Int32) -> cute.Tensor:
        """Four matrices of 8 lines of 8 elements, transposed, of the block that has element `first`."""
        at = self.smem + stage * self.stage_bytes + first // BLOCK * BLOCK_BYTES
        at += chunk_at(line, first % BLOCK // 8 + chunk)
        pointer = cute.make_ptr(self.dtype, at, cute.AddressSpace.smem, assumed_align=CHUNK_BYTES)
        return read_matrices(pointer, self.dtype, 4, True)

    def rows(self, stage: Int32, first: Int32 | int, k: Int32 | int) -> cute.Tensor:
        """16 rows and 16 lines, rows first."""
        line = self.lane // 16 * 8 + self.lane % 8 + 16 * k
        return self._matrices(stage, first, line, self.lane // 8 % 2)

    def columns(self, stage: Int32, pair: int, k: Int32 | int) -> Any:
        """16 columns and 16 lines, lines first."""
        line = self.lane // 8 % 2 * 8 + self.lane % 8 + 16 * k
        return self._matrices(stage, pair * 16, line, self.lane // 16)
