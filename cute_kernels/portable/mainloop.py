"""The mainloop without wgmma and TMA: cp.async fills stages, ldmatrix and mma.sync empty them.

Four warps share a tile of 128 x 128. Of each slab of 64 rows a warp has 16, over all columns: a thread's accumulators
are those that a warpgroup's wgmma would give it (sm90/fragments.py), so that the same epilogues serve both.

A stage holds 64 of the contraction: lines of 128 bytes, whose chunks of 16 bytes lie at chunk ^ line % 8. Every thread
copies the same chunk of every 16th line of either operand, and there is one barrier a stage. Two CTAs share an SM: one
multiplies while the other stores or waits for its first stage.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..device.invariant import Invariant
from ..device.select import select
from ..device.warp_mma import WarpMma, read_matrices
from ..device.warps import WARP
from ..sm90.mainloop.gathered_rows import offset_by

THREADS = 128
SLAB = 64
DEPTH = 64
STAGES = 3
CTAS_PER_SM = 2
CHUNK_BYTES, LINE_BYTES = 16, 128
CHUNKS = LINE_BYTES // CHUNK_BYTES
STEP = THREADS // CHUNKS
"""Lines between two of a thread's copies."""
MMA_K = 16


def copy_chunk(target: Int32, source: Int64, num_bytes: Int32) -> None:
    """Start to copy `num_bytes` of 16 bytes into shared memory, and zeros for the rest."""
    cute.arch.inline_ptx(
        f"cp.async.cg.shared.global.L2::128B [{{$r0}}], [{{$r1}}], {CHUNK_BYTES}, {{$r2}};",
        read_only_args=[target, source, num_bytes],
    )


def chunk_at(line: Int32, chunk: Int32) -> Int32:
    """Where a chunk of a line lies, in bytes from the first line."""
    return line * LINE_BYTES + (chunk ^ line % CHUNKS) * CHUNK_BYTES


class Sources(NamedTuple):
    """Where a thread's lines begin: `parts` of the tile, which follow each other, have an address each, and from there
    on a line is as many times 16 bytes away: 32 bits, for registers are few."""

    parts: tuple[Int64, ...]
    distances: cute.Tensor


class Operand(Invariant):
    """An operand's part of the stages, `lines` of each from `smem` on, and this thread's place in it."""

    def __init__(self, dtype: type[cutlass.Numeric], lines: int, smem: Int32):
        self.dtype = dtype
        self.smem = smem
        self.stage_bytes = lines * LINE_BYTES
        self.copies = lines // STEP
        thread, _, _ = cute.arch.thread_idx()
        self.line, self.chunk = thread // CHUNKS, thread % CHUNKS

    def copy(self, sources: Sources, stage: Int32, k: Int32, depth: Int32) -> None:
        """The contraction's elements from k on, of lines that begin at `sources`; behind the last come zeros."""
        has_columns = k + self.chunk * (CHUNK_BYTES * 8 // self.dtype.width) < depth
        num_bytes = select(has_columns, Int32(CHUNK_BYTES), Int32(0))
        offset = select(has_columns, k * (self.dtype.width // 8) + self.chunk * CHUNK_BYTES, Int32(0))
        firsts = [part + offset for part in sources.parts]
        target = self.smem + stage * self.stage_bytes + chunk_at(self.line, self.chunk)
        for i in range(self.copies):
            source = offset_by(firsts[i * len(firsts) // self.copies], sources.distances[i])
            copy_chunk(target + i * STEP * LINE_BYTES, source, num_bytes)

    def read(self, stage: Int32, line: Int32, chunk: Int32) -> cute.Tensor:
        """Four matrices of 8 x 8, of which this lane names a line."""
        at = self.smem + stage * self.stage_bytes + chunk_at(line, chunk)
        pointer = cute.make_ptr(self.dtype, at, cute.AddressSpace.smem, assumed_align=CHUNK_BYTES)
        return read_matrices(pointer, self.dtype, 4, False)


class Mainloop(Invariant):
    """acc = A B^T of a tile of m x n. `smem`: where `num_bytes` for the stages begin.

    `a`, `b`: the operands' places in shared memory; `run` takes where their lines begin in global memory.
    """

    def __init__(self, dtype: type[cutlass.Numeric], m: int, n: int, smem: Int32):
        self.slabs, self.n = m // SLAB, n
        self.a, self.b = Operand(dtype, m, smem), Operand(dtype, n, smem + m * LINE_BYTES * STAGES)
        self.warp_mma = WarpMma(dtype)
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % WARP
        # Of A four matrices are 16 rows of two chunks, rows first; of B 16 columns of two chunks, chunks first.
        self.a_line, self.a_chunk = thread // WARP * 16 + lane % 16, lane // 16
        self.b_line, self.b_chunk = lane // 16 * 8 + lane % 8, lane // 8 % 2

    @staticmethod
    def num_bytes(m: int, n: int) -> int:
        return (m + n) * LINE_BYTES * STAGES

    @cute.jit
    def run(self, acc: cute.Tensor, a: Sources, b: Sources, depth: Int32):
        """By the whole CTA, which finds the stages free when it is done."""
        acc.fill(0.0)
        num_tiles = cute.ceil_div(depth, DEPTH)
        for first in cutlass.range_constexpr(STAGES - 1):
            self._fill(a, b, Int32(first), Int32(first), num_tiles, depth)
        stage = Int32(0)
        for tile in cutlass.range(num_tiles, unroll=1):
            cute.arch.cp_async_wait_group(STAGES - 2)
            cute.arch.sync_threads()
            emptied = select(stage == 0, Int32(STAGES - 1), stage - 1)
            self._fill(a, b, emptied, tile + (STAGES - 1), num_tiles, depth)
            self._multiply(acc, stage)
            stage = select(stage == STAGES - 1, Int32(0), stage + 1)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

    @cute.jit
    def _fill(self, a: Sources, b: Sources, stage: Int32, tile: Int32, num_tiles: Int32, depth: Int32):
        """A stage with a k-tile, if there is that. Each is a group of copies, be it empty."""
        if tile < num_tiles:
            self.a.copy(a, stage, tile * DEPTH, depth)
            self.b.copy(b, stage, tile * DEPTH, depth)
        cute.arch.cp_async_commit_group()

    def _multiply(self, acc: cute.Tensor, stage: Int32) -> None:
        for k in range(DEPTH // MMA_K):
            rows = [self.a.read(stage, self.a_line + slab * SLAB, self.a_chunk + 2 * k) for slab in range(self.slabs)]
            for pair in range(self.n // 16):
                columns = self.b.read(stage, self.b_line + pair * 16, self.b_chunk + 2 * k)
                for slab, half in ((slab, half) for slab in range(self.slabs) for half in range(2)):
                    first = slab * (self.n // 2) + (2 * pair + half) * 4
                    sums = cute.make_tensor(acc.iterator + first, cute.make_layout(4))
                    words = [rows[slab][i] for i in range(4)]
                    self.warp_mma.add(sums, words, [columns[2 * half], columns[2 * half + 1]])
