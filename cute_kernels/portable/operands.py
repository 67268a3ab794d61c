"""Operands in shared memory: how they are copied there and how a warp reads them.

A line is a run of contiguous memory, such as a row of a matrix. There are two kinds of operands:

    Along     lines lie along the contraction, for example rows of x. A stage holds 64 elements of each line, in chunks
              of 16 bytes.
    Across    lines lie across the contraction, for example transposed weights. A stage holds 64 lines, in blocks of 64
              elements a line (8 KB), which ldmatrix transposes.

Chunks are swizzled so that 8 chunks that are read at once lie in different banks: chunk c of a line of 128 bytes is at
c ^ line % 8. Lines of less than 128 bytes share 128 bytes, and count together as one line in the swizzle.

A copy of 16 bytes past the end of the contraction or of the matrix writes zeros.

In signatures, `k` is a step, 16 elements of a k-tile's depth. Only in `copy`, `k` is the first element of a k-tile.
`depth` is the number of elements of the whole contraction, `stage` the index of a stage, and `sources` the operand's
addresses in global memory.
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
"""Distance, in lines of 128 bytes, of two consecutive chunks that a thread copies."""
BLOCK = 64
BLOCK_BYTES = DEPTH * LINE_BYTES


def chunk_at(line: Int32, chunk: Int32) -> Int32:
    """Return the swizzled offset of a chunk (16 bytes) of a line of 128 bytes, in bytes from the first line."""
    return line * LINE_BYTES + (chunk ^ line % CHUNKS) * CHUNK_BYTES


class Lines(NamedTuple):
    """Global-memory addresses of the lines that a thread copies.

    Attributes:
        parts: a base address for each part of the operand's lines. With a gate, weights have two parts: the rows of a,
            then the rows of u; otherwise there is one part.
        distances: int32, for each line its distance from the base address of its part, in units of 16 bytes. A 64-bit
            address for each line would take twice the registers.
    """

    parts: tuple[Int64, ...]
    distances: cute.Tensor


class Operand(Invariant):
    """An operand of a mainloop, with defaults for all methods except `copy`, `rows` and `columns`.

    Attributes:
        run: number of k-tiles between two barriers.
        notes_nans: True if `columns` returns NaNs as numbers; `nans` then reports their columns.
        decodes: True if each stage must be decoded, between two barriers, before `columns` can read it.
        decoded_bytes: bytes of shared memory for decoded numbers, which lie before the stages.
    """

    run, notes_nans = 1, False
    decodes, decoded_bytes = False, 0

    def decode(self, stage: Int32) -> None:
        """Decode a stage (a k-tile in shared memory) that has arrived; called if `decodes`. Here do nothing."""

    def advance(self, sources: Any, tile: Int32, before: Int32) -> None:
        """Prepare a run (k-tiles between two barriers), for example load its scales: here do nothing.

        Called for every run, also past the last k-tile.

        Args:
            sources: the operand's addresses in global memory.
            tile: the run's first k-tile.
            before: the first stage of the previous run.
        """

    def rows_of(self, x: Any, stage: Int32, first: Int32 | int, tile: Int32, k: Int32 | int) -> Any:
        """Read 16 rows of the other operand, x, with their elements in the order that this operand's `columns` has.

        Args:
            stage: the stage that holds the k-tile.
            first: the first of the 16 rows.
            tile: index of the k-tile.
            k: step of the k-tile.
        """
        return x.rows(stage, first, k)


class Along(Operand):
    """An operand of `lines` lines along the contraction, with `bits` bits an element."""

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
        """Return the swizzled offset of a chunk (16 bytes) of a line, in bytes from the first line."""
        shared = LINE_BYTES // self.line_bytes
        return line * self.line_bytes + (chunk ^ line // shared % self.chunks) * CHUNK_BYTES

    def copy(self, sources: Lines, stage: Int32, k: Int32, depth: Int32) -> None:
        """Start to copy a k-tile, elements k to k + 63 of each line (a row of the operand), into a stage.

        From element `depth` on, write zeros.
        """
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
        """Read four matrices by ldmatrix, 8 lines of 16 bytes each. Return this lane's word of each matrix.

        line, chunk: where one line of a matrix lies. Each lane passes another line.
        """
        at = self.smem + stage * self.stage_bytes + self.at(line, chunk)
        pointer = cute.make_ptr(self.dtype, at, cute.AddressSpace.smem, assumed_align=CHUNK_BYTES)
        return read_matrices(pointer, self.dtype, 4, False)

    def rows(self, stage: Int32, first: Int32 | int, k: Int32 | int) -> cute.Tensor:
        """Read 16 rows, from row `first` on, in step `k` (two chunks of depth).

        Return four words of mma.sync's operand a: rows 0 .. 7 and rows 8 .. 15 of the first chunk, then of the second.
        """
        return self.matrices(stage, self.lane % 16 + first, self.lane // 16 + 2 * k)

    def rows_by_fours(self, stage: Int32, first: Int32 | int, k: Int32 | int) -> Any:
        """Read 16 rows as `rows` does, but with their elements in the order of `NarrowE4m3ByFours`.

        With t = lane % 4, a lane's first pair is elements 4t and 4t + 2, its second pair elements 4t + 1 and 4t + 3.
        """
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
        """Read 16 columns, from column 16 * `pair` on, in step `k` (two chunks of depth).

        Return four words of mma.sync's operand b: both chunks of columns 0 .. 7, then of columns 8 .. 15.
        """
        line = self.lane // 16 * 8 + self.lane % 8 + pair * 16
        return self.matrices(stage, line, self.lane // 8 % 2 + 2 * k)


class Contraction(NamedTuple):
    """Global-memory addresses of the lines that a thread copies for one tile, if lines lie across the contraction.

    Attributes:
        blocks: for each block of 64 elements of a line, the address of the thread's chunk (16 bytes) in line 0, and
            True if the chunk lies inside the matrix.
        pitch: distance of consecutive lines, in units of 16 bytes.
        first: number of the first line to contract: its place in `indices` or, without indices, in the matrix.
        indices: the address of int32 line indices, which are clamped to 0 .. count - 1; 0: lines lie in order.
        count: number of lines of the matrix.
    """

    blocks: tuple[tuple[Int64, Boolean], ...]
    pitch: Int32
    first: Int32
    indices: Int64
    count: Int32


class Across(Operand):
    """An operand of lines across the contraction, with `width` 16-bit elements a line."""

    def __init__(self, dtype: type[cutlass.Numeric], width: int):
        self.dtype, self.num_blocks = dtype, width // BLOCK
        self.stage_bytes = self.num_blocks * BLOCK_BYTES
        self.smem = Int32(0)
        thread, _, _ = cute.arch.thread_idx()
        self.line, self.chunk = thread // CHUNKS, thread % CHUNKS
        self.lane = thread % WARP

    @cute.jit
    def copy(self, sources: Contraction, stage: Int32, k: Int32, depth: Int32):
        """Start to copy a k-tile, lines k to k + 63 of the contraction, into a stage.

        A line has the `width` elements of one index of the contraction. From line `depth` on, write zeros.
        """
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
        """Return the distance of line `line` of the contraction from line 0 of the matrix, in units of 16 bytes.

        From line `depth` on it is 0.
        """
        row = select(line < depth, sources.first + line, Int32(0))
        if const_expr(not isinstance(sources.indices, int)):
            if (sources.indices != 0) & (line < depth):
                row = clamp(vector_at(Int32, sources.indices)[row], Int32(0), sources.count - 1)
        return row * sources.pitch

    def _matrices(self, stage: Int32, first: Int32 | int, line: Int32, chunk: Int32) -> cute.Tensor:
        """Read four matrices by ldmatrix, transposed, 8 lines of 8 elements each. Return this lane's word of each.

        Args:
            first: element of the lines from which `chunk` counts.
            line, chunk: where one line of a matrix lies. Each lane passes another line.
        """
        at = self.smem + stage * self.stage_bytes + first // BLOCK * BLOCK_BYTES
        at += chunk_at(line, first % BLOCK // 8 + chunk)
        pointer = cute.make_ptr(self.dtype, at, cute.AddressSpace.smem, assumed_align=CHUNK_BYTES)
        return read_matrices(pointer, self.dtype, 4, True)

    def rows(self, stage: Int32, first: Int32 | int, k: Int32 | int) -> cute.Tensor:
        """Read 16 rows, from row `first` on, in step `k` (16 lines). A row of the operand is one element of each line.

        Return four words of mma.sync's operand a: rows 0 .. 7 and 8 .. 15 of the first 8 lines, then of the last 8.
        """
        line = self.lane // 16 * 8 + self.lane % 8 + 16 * k
        return self._matrices(stage, first, line, self.lane // 8 % 2)

    def columns(self, stage: Int32, pair: int, k: Int32 | int) -> Any:
        """Read 16 columns, from column 16 * `pair` on, in step `k` (16 lines).

        Return four words of mma.sync's operand b: the first and the last 8 lines of columns 0 .. 7, then of columns
        8 .. 15.
        """
        line = self.lane // 8 % 2 * 8 + self.lane % 8 + 16 * k
        return self._matrices(stage, pair * 16, line, self.lane // 16)
