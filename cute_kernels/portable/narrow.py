"""Weights in MXFP8 or MXFP4, which become pairs of bfloat16 numbers on their way from shared memory to mma.sync.

A stage has a chunk's bytes as they lie in memory, and for each weight row and block of 32 what its elements are
multiplied by, 2^(e - 127) in both halves of a word. That is fetched a run of stages ahead: a thread asks for the scale
bytes of its row, and writes them when it asks for the next.

mma.sync wants of a lane, for a column, two pairs of every 16 elements, and leaves their order to us if the rows of x
have the same, t = lane % 4. Of E4M3, where a tile has few rows, a lane takes the word of elements 4 t to 4 t + 3, whose
pairs are bytes 0 and 2, 1 and 3, so that a pair is a shift and a mask away. Where it has many, registers do not suffice
for x's rows in that order (sm_100 spilled 216 bytes), and the pairs are elements 2 t + (0, 1) and 8 + 2 t + (0, 1). Of
E2M1 it is word t of a block, which has pairs for two steps (`python/glulam/mxfp4/words.py`); every other two blocks
have these steps the other way round.

E4M3 is decoded in integer arithmetic, which every GPU from Ampere on has: moved to where bfloat16 has exponent and
significand a number is 2^-120 times itself, also where it is a subnormal.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, Uint8, Uint16

from ..decoding.decoder import BYTE_LANES, EXPONENT_BIAS, EXPONENT_ONE, LANES_OF_16, is_bad, power_of
from ..decoding.elements import E2m1, E4m3
from ..device.gmem import vector_at
from ..device.select import select
from ..epilogue.sizes import THREADS
from ..formats import E2M1, SCALE_BLOCK, Format
from ..memory.weights import row_of
from ..schedule.work import WorkTile
from .mainloop import DEPTH
from .operands import Along, Lines
from .sources import Weights

BLOCKS = DEPTH // SCALE_BLOCK
RUN_OF_FEW = 2
"""k-tiles between barriers where a tile has few rows: two are 3 % faster than one, since a warp finds more to do while
it waits for what it decodes."""
NAN = 0x7FC0 * LANES_OF_16
# What makes numbers of elements that were moved to bfloat16's places: 2^120 of E4M3, 2^126 of E2M1.
E4M3_SHIFT, E2M1_SHIFT = (EXPONENT_BIAS + 120) * EXPONENT_ONE, (EXPONENT_BIAS + 126) * EXPONENT_ONE
FIRST_OF_PAIR, PAIR_SIGNS, PAIR_MAGNITUDES = 0x4140, 0x00800080, 0x007F007F
"""How two bytes get two halves of a word, and what is what there."""
SIGNS, MAGNITUDES = 0x80008000 - 2**32, 0x07F007F0
"""Of two E4M3 numbers in bfloat16's places."""


def product(pair: Int32, multiplier: Int32) -> Int32:
    """Of two bfloat16 numbers each, by adding -0: sm_80 has no multiplication alone."""
    ptx = """{
        .reg .b32 factor, zero;
        mov.b32 factor, {$r1};
        mov.b32 zero, 0x80008000;
        fma.rn.bf16x2 {$w0}, {$r0}, factor, zero;
        }"""
    return Int32(cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[pair, multiplier]))


def e4m3_pair(two: Int32) -> Int32:
    """Two bytes as bfloat16 numbers, 2^-120 times what they are. 0x7F, NaN, becomes one."""
    bytes_apart = Int32(cute.arch.prmt(two, Int32(0), Int32(FIRST_OF_PAIR)))
    magnitudes = bytes_apart & PAIR_MAGNITUDES
    is_nan = (magnitudes + LANES_OF_16) & PAIR_SIGNS
    return (magnitudes << 4) | (bytes_apart & PAIR_SIGNS) << 8 | is_nan * 0xFF


def e4m3_pairs(word: Int32) -> list[Int32]:
    """The same of bytes 0 and 2 and of bytes 1 and 3, where NaN becomes 480."""
    moved = (word << 4, word << 8), (word >> 4, word)
    return [(magnitudes & MAGNITUDES) | (signs & SIGNS) for magnitudes, signs in moved]


def nan_bytes(word: Int32) -> Int32:
    """Four E4M3 numbers, of which one is NaN: then a sign bit of a byte is 1, and else none. Of other bits anything.

    A 1 that is added to a byte changes its sign where all other bits are 1, and only such a byte carries into the next.
    """
    return (word + BYTE_LANES) ^ word


class NarrowLines(NamedTuple):
    """Where a thread's weight rows begin, and the scale bytes of the row whose they are to fetch, one a block."""

    parts: tuple[Int64, ...]
    distances: cute.Tensor
    scales: Int64
    blocks: Int32


class Narrow(Along):
    """`lines` weight rows of a format, a thread's own scales those of row number thread. `few_rows`: of the tile."""

    def __init__(self, lines: int, weights: Format, few_rows: bool):
        super().__init__(BFloat16, lines, weights.bits)
        assert lines == THREADS
        self.is_e2m1 = weights.element == E2M1
        self.by_fours = few_rows and not self.is_e2m1
        self.first_bad = (E2m1 if self.is_e2m1 else E4m3).first_bad
        self.line_area = self.stage_bytes
        # Columns lane / 4 + 8 i of a block follow each other, and 8 such lanes ask banks of their own for two of them.
        pitch = lines // 8 + 2
        self.multipliers = cute.make_layout(((8, lines // 8), BLOCKS), stride=((pitch, 1), 8 * pitch))
        self.stage_bytes += 8 * pitch * BLOCKS * 4
        self.run = RUN_OF_FEW if few_rows else 1
        self.pending = cute.make_rmem_tensor((self.run, BLOCKS), Int32)
        self.pending.fill(0)
        self.notes_nans = self.by_fours
        self.noted = cute.make_rmem_tensor(lines // 8, Int32)
        self.noted.fill(0)

    def _multipliers(self, stage: Int32) -> cute.Tensor:
        """Of a stage, (row, block)."""
        at = self.smem + stage * self.stage_bytes + self.line_area
        pointer = cute.make_ptr(Int32, at, cute.AddressSpace.smem, assumed_align=8)
        return cute.make_tensor(pointer, self.multipliers)

    @cute.jit
    def advance(self, sources: NarrowLines, tile: Int32, before: Int32):
        """Write the multipliers of the run before, whose stages begin at `before`, and ask for those of this one."""
        thread, _, _ = cute.arch.thread_idx()
        for place in cutlass.range_constexpr(self.run):
            held = self._multipliers(before + place)
            for block in cutlass.range_constexpr(BLOCKS):
                byte = self.pending[place, block]
                held[thread, block] = select(byte >= self.first_bad, Int32(NAN), power_of(byte))
        for place in cutlass.range_constexpr(self.run):
            for block in cutlass.range_constexpr(BLOCKS):
                number = (tile + place) * BLOCKS + block
                # Of no block, whose zeros another row's NaN would make NaN.
                self.pending[place, block] = Int32(0)
                if number < sources.blocks:
                    self.pending[place, block] = Int32(vector_at(Uint8, sources.scales)[number]) & 0xFF

    def rows_of(self, x: Along, stage: Int32, first: Int32 | int, tile: Int32, k: Int32 | int) -> Any:
        if self.by_fours:
            return x.rows_by_fours(stage, first, k)
        return x.rows(stage, first, k ^ tile % 2 if self.is_e2m1 else k)

    def columns(self, stage: Int32, pair: int, k: Int32 | int) -> list[Int32]:
        """16 columns and 16 of the depth, its halves first."""
        multipliers, words = cute.make_rmem_tensor(2, Int32), []
        of_lane = self._multipliers(stage)[((self.lane // 4, None), k // 2)]
        cute.autovec_copy(cute.local_tile(of_lane, (2,), (pair,)), multipliers)
        first = self.smem + stage * self.stage_bytes
        for half in range(2):
            column = self.lane // 4 + pair * 16 + half * 8
            two = self._two_words(first, column, k, pair * 2 + half)
            words += [product(product(word, Int32(self._shift)), multipliers[half]) for word in two]
        return words

    def nans(self, pair: int) -> list[Int32]:
        """For what `columns` gave of a pair since the last time: NaN in columns that had one, in others 0."""
        words = []
        for half in range(2):
            words += [select(is_bad(self.noted[pair * 2 + half], 0), Int32(NAN), Int32(0)), Int32(0)]
            self.noted[pair * 2 + half] = Int32(0)
        return words

    @property
    def _shift(self) -> int:
        return E2M1_SHIFT if self.is_e2m1 else E4M3_SHIFT

    def _two_words(self, first: Int32, column: Int32, k: Int32 | int, number: int) -> list[Int32]:
        """The lane's four elements of a column, its column of that number, moved to bfloat16's places."""
        quad = self.lane % 4
        if self.by_fours:
            word = self._load(Int32, first + self.at(column, Int32(k)) + quad * 4)
            self.noted[number] |= nan_bytes(word)
            return e4m3_pairs(word)
        if not self.is_e2m1:
            at = first + self.at(column, Int32(k)) + quad * 2
            return [e4m3_pair(self._load(Uint16, at + 8 * half)) for half in range(2)]
        word = self._load(Int32, first + self.at(column, Int32(k // 2)) + quad * 4)
        spread = E2m1().spread
        pairs = [spread(word, pair) for pair in range(4)]
        if isinstance(k, int):
            return pairs[k % 2 * 2 : k % 2 * 2 + 2]
        return [select(k % 2 == 0, pairs[half], pairs[2 + half]) for half in range(2)]

    def _load(self, dtype: Any, at: Int32) -> Int32:
        pointer = cute.make_ptr(dtype, at, cute.AddressSpace.smem, assumed_align=dtype.width // 8)
        return Int32(cute.make_tensor(pointer, cute.make_layout(1))[0]) & (0xFFFF if dtype is Uint16 else -1)


@cute.jit
def narrow_sources(
    lines: Lines, weights: Weights, w_scale: Int64, depth: Int32, work: WorkTile, parts: cutlass.Constexpr[int],
    part_n: cutlass.Constexpr[int], layout: cutlass.Constexpr[str],
) -> NarrowLines:  # fmt: skip
    """Of a thread's copies and scales [E, rows, depth / 32]; behind an expert's last row those of that one."""
    thread, _, _ = cute.arch.thread_idx()
    column = cutlass.min(work.n_tile * part_n + thread % part_n, weights.count - 1)
    row = row_of(layout, weights.gate, column, thread // part_n, weights.count)
    blocks = depth // SCALE_BLOCK
    scales = w_scale + (Int64(work.expert) * (parts * weights.count) + row) * blocks
    return NarrowLines(lines.parts, lines.distances, scales, blocks)
