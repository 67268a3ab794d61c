"""Weights in a narrow format, which become pairs of bfloat16 numbers on their way from shared memory to mma.sync.

A stage has a chunk's bytes as they lie in memory, and for each weight row and block of a scale the bfloat16 number that
its elements are multiplied by, in both halves of a word. That is fetched a run of stages ahead: a thread asks for the
scale bytes of its row, and writes the numbers when it asks for the next.

mma.sync wants of a lane, for a column, two pairs of every 16 elements, and leaves their order to us if the rows of x
have the same, t = lane % 4. Of E4M3, where a tile has few rows, a lane takes the word of elements 4 t to 4 t + 3, whose
pairs are bytes 0 and 2, 1 and 3, so that a pair is a shift and a mask away. Where it has many, registers do not suffice
for x's rows in that order (sm_100 spilled 216 bytes), and the pairs are elements 2 t + (0, 1) and 8 + 2 t + (0, 1). Of
E2M1 it is word t of 32 elements, which has pairs for two steps (`python/glulam/formats/words.py`); every other two of
such 32 have these steps the other way round.

E4M3 is decoded in integer arithmetic, which every GPU from Ampere on has: moved to where bfloat16 has exponent and
significand a number is 2^-120 times itself, also where it is a subnormal.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, Uint8, Uint16

from ..decoding.elements import E2m1, E4m3, Element
from ..decoding.lanes import EXPONENT_BIAS, EXPONENT_ONE, LANES_OF_16, NAN
from ..decoding.scales import BYTE_LANES, SCALES, byte_of, is_bad
from ..device.gmem import vector_at
from ..device.invariant import Invariant
from ..device.select import select
from ..epilogue.sizes import THREADS
from ..formats import E2M1, E4M3, Format
from ..memory.weights import row_of
from ..schedule.work import WorkTile
from .mainloop import DEPTH, MMA_K
from .operands import Along, Lines
from .sources import Weights

# Bytes of a word.
BYTES = 4
RUN_OF_FEW = 2
"""k-tiles between barriers where a tile has few rows: two are 3 % faster than one, since a warp finds more to do while
it waits for what it decodes."""
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


class ScaleBytes(Invariant):
    """Scale bytes of a thread's row that were asked for: a number for each of `blocks` of each k-tile of a run."""

    def __init__(self, run: int, blocks: int):
        self.blocks = blocks
        self.bytes = cute.make_rmem_tensor((run, blocks), Int32)
        self.bytes.fill(0)

    def byte(self, place: int, block: int) -> Int32:
        return self.bytes[place, block]

    @cute.jit
    def ask(self, sources: NarrowLines, place: cutlass.Constexpr[int], tile: Int32):
        """Past the last block: byte 0, since a stale NaN scale would turn padding zeros into NaN."""
        for block in cutlass.range_constexpr(self.blocks):
            number = tile * self.blocks + block
            self.bytes[place, block] = Int32(0)
            if number < sources.blocks:
                self.bytes[place, block] = Int32(vector_at(Uint8, sources.scales)[number]) & 0xFF


class ScaleWords(Invariant):
    """Scales of four blocks, a word; where rows of scales are whole words, one load."""

    def __init__(self, run: int, blocks: int):
        assert blocks == BYTES
        self.words = cute.make_rmem_tensor(run, Int32)
        self.words.fill(0)

    def byte(self, place: int, block: int) -> Int32:
        return byte_of(self.words[place], block)

    @cute.jit
    def ask(self, sources: NarrowLines, place: cutlass.Constexpr[int], tile: Int32):
        number = tile * BYTES
        self.words[place] = Int32(0)
        if (sources.blocks | Int32(sources.scales)) % BYTES == 0:
            if number < sources.blocks:
                self.words[place] = vector_at(Int32, sources.scales)[tile]
        else:
            for block in cutlass.range_constexpr(BYTES):
                if number + block < sources.blocks:
                    self.words[place] |= (Int32(vector_at(Uint8, sources.scales)[number + block]) & 0xFF) << 8 * block


class Narrow(Along):
    """`lines` weight rows of a format, a thread's own scales those of row number thread. `few_rows`: of the tile.

    A class for each element completes it. shift: the power of two that makes numbers of elements in bfloat16's places.
    """

    element: type[Element]
    shift: int

    def __init__(self, lines: int, weights: Format, few_rows: bool):
        super().__init__(BFloat16, lines, weights.bits)
        assert lines == THREADS
        self.scales = SCALES[weights.scale](self.element(), product)
        self.steps_per_block, self.blocks = weights.block // MMA_K, max(DEPTH // weights.block, 1)
        self.line_area = self.stage_bytes
        # Columns lane / 4 + 8 i of a block follow each other, and 8 such lanes ask banks of their own for two of them.
        pitch = lines // 8 + 2
        self.multipliers = cute.make_layout(((8, lines // 8), self.blocks), stride=((pitch, 1), 8 * pitch))
        self.stage_bytes += 8 * pitch * self.blocks * 4
        self.run = RUN_OF_FEW if few_rows else 1
        self.pending = self.make_pending(weights)

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
            for block in cutlass.range_constexpr(self.blocks):
                where = self._place(block, tile - self.run + place)
                held[thread, where] = self.scales.value(self.pending.byte(place, block))
        for place in cutlass.range_constexpr(self.run):
            self.pending.ask(sources, place, tile + place)

    def _place(self, block: int, tile: Int32) -> Int32 | int:
        """When in a k-tile the steps of a block come."""
        return block

    def make_pending(self, weights: Format) -> Any:
        """Make what holds the scales that were asked for."""
        return (ScaleWords if weights.scale_words(DEPTH) else ScaleBytes)(self.run, self.blocks)

    def _scaled(self, pair: Int32, multiplier: Int32) -> Int32:
        """Two elements times the value of their scale."""
        return product(pair, multiplier)

    def columns(self, stage: Int32, pair: int, k: Int32 | int) -> list[Int32]:
        """16 columns and 16 of the depth, its halves first."""
        multipliers, words = cute.make_rmem_tensor(2, Int32), []
        of_lane = self._multipliers(stage)[((self.lane // 4, None), k // self.steps_per_block)]
        cute.autovec_copy(cute.local_tile(of_lane, (2,), (pair,)), multipliers)
        first = self.smem + stage * self.stage_bytes
        for half in range(2):
            column = self.lane // 4 + pair * 16 + half * 8
            two = self._two_words(first, column, k, pair * 2 + half)
            words += [self._scaled(product(word, Int32(self.shift)), multipliers[half]) for word in two]
        return words

    def _two_words(self, first: Int32, column: Int32, k: Int32 | int, number: int) -> list[Int32]:
        """The lane's four elements of a column, its column of that number, moved to bfloat16's places."""
        raise NotImplementedError

    def _load(self, dtype: Any, at: Int32) -> Int32:
        pointer = cute.make_ptr(dtype, at, cute.AddressSpace.smem, assumed_align=dtype.width // 8)
        return Int32(cute.make_tensor(pointer, cute.make_layout(1))[0]) & (0xFFFF if dtype is Uint16 else -1)


class NarrowE4m3(Narrow):
    """Pairs of neighbouring elements."""

    element, shift = E4m3, (EXPONENT_BIAS + 120) * EXPONENT_ONE

    def _two_words(self, first: Int32, column: Int32, k: Int32 | int, number: int) -> list[Int32]:
        at = first + self.at(column, Int32(k)) + self.lane % 4 * 2
        return [e4m3_pair(self._load(Uint16, at + 8 * half)) for half in range(2)]


class NarrowE4m3ByFours(NarrowE4m3):
    """Four neighbouring elements a lane, for tiles of few rows. NaNs among them are noted by column."""

    notes_nans = True

    def __init__(self, lines: int, weights: Format, few_rows: bool):
        super().__init__(lines, weights, few_rows)
        self.noted = cute.make_rmem_tensor(lines // 8, Int32)
        self.noted.fill(0)

    def rows_of(self, x: Along, stage: Int32, first: Int32 | int, tile: Int32, k: Int32 | int) -> Any:
        return x.rows_by_fours(stage, first, k)

    def nans(self, pair: int) -> list[Int32]:
        """For what `columns` gave of a pair since the last time: NaN in columns that had one, in others 0."""
        words = []
        for half in range(2):
            words += [select(is_bad(self.noted[pair * 2 + half], 0), Int32(NAN), Int32(0)), Int32(0)]
            self.noted[pair * 2 + half] = Int32(0)
        return words

    def _two_words(self, first: Int32, column: Int32, k: Int32 | int, number: int) -> list[Int32]:
        word = self._load(Int32, first + self.at(column, Int32(k)) + self.lane % 4 * 4)
        self.noted[number] |= nan_bytes(word)
        return e4m3_pairs(word)


class NarrowE2m1(Narrow):
    """Words of eight elements, of which a step takes half."""

    element, shift = E2m1, (EXPONENT_BIAS - E2m1.read_exponent) * EXPONENT_ONE

    def rows_of(self, x: Along, stage: Int32, first: Int32 | int, tile: Int32, k: Int32 | int) -> Any:
        return x.rows(stage, first, k ^ tile % 2)

    def _place(self, block: int, tile: Int32) -> Int32 | int:
        return block ^ tile % 2 if self.steps_per_block == 1 else block

    def _two_words(self, first: Int32, column: Int32, k: Int32 | int, number: int) -> list[Int32]:
        word = self._load(Int32, first + self.at(column, Int32(k // 2)) + self.lane % 4 * 4)
        spread = E2m1().spread
        pairs = [spread(word, pair) for pair in range(4)]
        if isinstance(k, int):
            return pairs[k % 2 * 2 : k % 2 * 2 + 2]
        return [select(k % 2 == 0, pairs[half], pairs[2 + half]) for half in range(2)]


ELEMENTS: dict[str, type[Element]] = {E4M3: E4m3, E2M1: E2m1}


def narrow(lines: int, weights: Format, few_rows: bool) -> Narrow:
    """Weight rows of a format, in the order of elements that suits the tile."""
    kinds = {E4M3: NarrowE4m3ByFours if few_rows else NarrowE4m3, E2M1: NarrowE2m1}
    return kinds[weights.element](lines, weights, few_rows)


@cute.jit
def narrow_sources(
    lines: Lines, weights: Weights, w_scale: Int64, depth: Int32, work: WorkTile,
    weight_format: cutlass.Constexpr[Format], parts: cutlass.Constexpr[int], part_n: cutlass.Constexpr[int],
    layout: cutlass.Constexpr[str],
) -> NarrowLines:  # fmt: skip
    """Make a thread's copies and scales, [E, rows, blocks of depth]; past an expert's last row, the last row's."""
    thread, _, _ = cute.arch.thread_idx()
    column = cutlass.min(work.n_tile * part_n + thread % part_n, weights.count - 1)
    row = row_of(layout, weights.gate, column, thread // part_n, weights.count)
    blocks = weight_format.num_scales(depth)
    scales = w_scale + (Int64(work.expert) * (parts * weights.count) + row) * blocks
    return NarrowLines(lines.parts, lines.distances, scales, blocks)
