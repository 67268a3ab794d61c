"""Weights of 8 or 4 bits, decoded to pairs of bfloat16 numbers between shared memory and mma.sync.

A stage holds the weights' bytes as they lie in memory and, for each weight row and scale block, a multiplier: the
bfloat16 number by which the block's elements are multiplied, in both halves of a word. Multipliers are computed one run
(the k-tiles between two barriers) ahead: a thread loads the scale bytes of one weight row for a run, and writes their
multipliers to shared memory when it loads the scale bytes of the next run.

A step of the mainloop is 16 elements of the contraction. mma.sync takes four of these from a lane for each column, as
two pairs. Any order of the 16 elements is right if the rows of x are in the same order. With t = lane % 4, a lane takes

    E4M3, few rows of x     elements 4t .. 4t + 3, a word. Pairs are bytes 0, 2 and bytes 1, 3: a shift and a mask each.
    E4M3, many rows of x    elements 2t + (0, 1) and 8 + 2t + (0, 1). The order for few rows needs more registers for
                            x's rows than there are (sm_100 spilled 216 bytes).
    E2M1                    word t of 32 elements, which holds the pairs of two steps
                            (`python/glulam/formats/words.py`). In every second k-tile (two blocks of 32 elements) the
                            two steps are exchanged.

E4M3 is decoded in integer arithmetic, which every GPU since Ampere has. If an element's bits are moved to the places of
bfloat16's exponent and significand, the result is 2^-120 times the element, also for subnormals.
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

BYTES = 4
"""Bytes of a word."""
RUN_OF_FEW = 2
"""Number of k-tiles of a run if the tile has few rows of x. Two are 3 % faster than one, since a warp has more work
while it waits for the words that it decodes."""
FIRST_OF_PAIR, PAIR_SIGNS, PAIR_MAGNITUDES = 0x4140, 0x00800080, 0x007F007F
"""Constants of `e4m3_pair`: a selector of `prmt` that moves two bytes to the two halves of a word, and masks of the
sign and magnitude bits of these bytes."""
SIGNS, MAGNITUDES = 0x80008000 - 2**32, 0x07F007F0
"""Constants of `e4m3_pairs`: masks of the sign and magnitude bits of two E4M3 numbers whose bits were moved to the
places of bfloat16's exponent and significand."""


def product(pair: Int32, multiplier: Int32) -> Int32:
    """Multiply two pairs of bfloat16 numbers element by element; a 32-bit word holds a pair.

    The instruction is an FMA that adds -0, since sm_80 has no bfloat16 multiplication.
    """
    ptx = """{
        .reg .b32 factor, zero;
        mov.b32 factor, {$r1};
        mov.b32 zero, 0x80008000;
        fma.rn.bf16x2 {$w0}, {$r0}, factor, zero;
        }"""
    return Int32(cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[pair, multiplier]))


def e4m3_pair(two: Int32) -> Int32:
    """Return the two E4M3 bytes in the lower half of `two` as two bfloat16 numbers, 2^-120 times their value.

    NaN (0x7F) stays NaN.
    """
    bytes_apart = Int32(cute.arch.prmt(two, Int32(0), Int32(FIRST_OF_PAIR)))
    magnitudes = bytes_apart & PAIR_MAGNITUDES
    is_nan = (magnitudes + LANES_OF_16) & PAIR_SIGNS
    return (magnitudes << 4) | (bytes_apart & PAIR_SIGNS) << 8 | is_nan * 0xFF


def e4m3_pairs(word: Int32) -> list[Int32]:
    """Return the four E4M3 bytes of a word as bfloat16 numbers, 2^-120 times their value, in two words. The first word
    has byte 0 in its lower half and byte 2 in its upper half; the second has bytes 1 and 3.

    A NaN is read as 480, so it gives the number 480 * 2^-120.
    """
    moved = (word << 4, word << 8), (word >> 4, word)
    return [(magnitudes & MAGNITUDES) | (signs & SIGNS) for magnitudes, signs in moved]


def nan_bytes(word: Int32) -> Int32:
    """Return a word in which the sign bit of some byte is set if, and only if, one of the four E4M3 numbers in `word`
    is NaN. All other bits are arbitrary.

    An E4M3 byte is NaN if all bits except the sign bit are 1. Adding 1 to a byte changes its sign bit exactly if the
    byte is NaN, and only such a byte can carry into the next byte.
    """
    return (word + BYTE_LANES) ^ word


class NarrowLines(NamedTuple):
    """Global-memory addresses from which a thread copies weights and loads scales.

    Attributes:
        parts: a base address for each part of the weight rows that the thread copies (`operands.Lines`).
        distances: for each of these rows its distance from the base address of its part, in units of 16 bytes.
        scales: the address of the scales that the thread loads, which belong to one weight row.
        blocks: number of scales of a weight row.
    """

    parts: tuple[Int64, ...]
    distances: cute.Tensor
    scales: Int64
    blocks: Int32


class ScaleBytes(Invariant):
    """Registers for the scale bytes that a thread is loading: `blocks` bytes for each k-tile of a run (mainloop.py)."""

    def __init__(self, run: int, blocks: int):
        self.blocks = blocks
        self.bytes = cute.make_rmem_tensor((run, blocks), Int32)
        self.bytes.fill(0)

    def byte(self, place: int, block: int) -> Int32:
        """Return the scale byte of block `block` in k-tile `place` of the current run, the k-tiles between two barriers
        (mainloop.py).
        """
        return self.bytes[place, block]

    @cute.jit
    def start_loads(self, sources: NarrowLines, place: cutlass.Constexpr[int], tile: Int32):
        """Start to load the scale bytes of one k-tile into registers.

        Past the last block, use byte 0, since a stale NaN scale would turn padding zeros into NaN.

        Args:
            sources: the address of the scales of the thread's weight row, and their number.
            place: index of the k-tile in its run.
            tile: index of the k-tile in the contraction.
        """
        for block in cutlass.range_constexpr(self.blocks):
            number = tile * self.blocks + block
            self.bytes[place, block] = Int32(0)
            if number < sources.blocks:
                self.bytes[place, block] = Int32(vector_at(Uint8, sources.scales)[number]) & 0xFF


class ScaleWords(Invariant):
    """Registers for the scale bytes that a thread is loading if a k-tile has four blocks: a word for each k-tile of a
    run (mainloop.py).

    The four bytes take one load if the scales of a weight row fill whole words, otherwise four loads.
    """

    def __init__(self, run: int, blocks: int):
        assert blocks == BYTES
        self.words = cute.make_rmem_tensor(run, Int32)
        self.words.fill(0)

    def byte(self, place: int, block: int) -> Int32:
        """Return the scale byte of block `block` in k-tile `place` of the current run, the k-tiles between two barriers
        (mainloop.py).
        """
        return byte_of(self.words[place], block)

    @cute.jit
    def start_loads(self, sources: NarrowLines, place: cutlass.Constexpr[int], tile: Int32):
        """Start to load the scale bytes of one k-tile into a register. Bytes past the last block are 0.

        Args:
            sources: the address of the scales of the thread's weight row, and their number.
            place: index of the k-tile in its run.
            tile: index of the k-tile in the contraction.
        """
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
    """An operand of weight rows whose elements have 8 or 4 bits. Subclasses decode one element type each.

    Each of 128 threads loads the scales of one weight row.

    Args:
        lines: number of weight rows of a tile; it must be 128.
        weights: the weights' format.
        few_rows: True if the tile has few rows of x.

    Attributes:
        element: class of the element type.
        shift: a bfloat16 number, in both halves of a word. Elements whose bits were moved to bfloat16's places are
            multiplied by this power of two to get their value.
        pending: registers for the scales that are being loaded.
    """

    element: type[Element]
    shift: int

    def __init__(self, lines: int, weights: Format, few_rows: bool):
        super().__init__(BFloat16, lines, weights.bits)
        assert lines == THREADS
        self.scales = SCALES[weights.scale](self.element(), product)
        self.steps_per_block, self.blocks = weights.block // MMA_K, max(DEPTH // weights.block, 1)
        self.line_area = self.stage_bytes
        # Multipliers of columns lane / 4 + 8 i of a block are neighbours, so 8 lanes that read two of them each use
        # different banks.
        pitch = lines // 8 + 2
        self.multipliers = cute.make_layout(((8, lines // 8), self.blocks), stride=((pitch, 1), 8 * pitch))
        self.stage_bytes += 8 * pitch * self.blocks * 4
        self.run = RUN_OF_FEW if few_rows else 1
        self.pending = self.make_pending(weights)

    def _multipliers(self, stage: Int32) -> cute.Tensor:
        """Return a stage's multipliers (see the top of this file) in shared memory, as (weight row, block)."""
        at = self.smem + stage * self.stage_bytes + self.line_area
        pointer = cute.make_ptr(Int32, at, cute.AddressSpace.smem, assumed_align=8)
        return cute.make_tensor(pointer, self.multipliers)

    @cute.jit
    def advance(self, sources: NarrowLines, tile: Int32, before: Int32):
        """Write the multipliers of the previous run (k-tiles between two barriers) to its stages, and start to load the
        scales of the next run.

        Args:
            sources: the address of the scales of the thread's weight row, and their number.
            tile: first k-tile of the next run.
            before: first stage of the previous run.
        """
        thread, _, _ = cute.arch.thread_idx()
        for place in cutlass.range_constexpr(self.run):
            held = self._multipliers(before + place)
            for block in cutlass.range_constexpr(self.blocks):
                where = self._place(block, tile - self.run + place)
                held[thread, where] = self.scales.value(self.pending.byte(place, block))
        for place in cutlass.range_constexpr(self.run):
            self.pending.start_loads(sources, place, tile + place)

    def _place(self, block: int, tile: Int32) -> Int32 | int:
        """Return the index of a scale block's multiplier among the multipliers of its weight row in a stage.

        A weight row has one multiplier (see the top of this file) for each scale block of the k-tile. Multipliers lie
        in the order in which the k-tile's steps use them.

        Args:
            block: number of the scale block in the k-tile.
            tile: number of the k-tile.
        """
        return block

    def make_pending(self, weights: Format) -> Any:
        """Make the registers for the scales that a thread is loading (`pending`): `ScaleWords` if the four scales of a
        k-tile of this format fill a word, else `ScaleBytes`."""
        return (ScaleWords if weights.scale_words(DEPTH) else ScaleBytes)(self.run, self.blocks)

    def _scaled(self, pair: Int32, multiplier: Int32) -> Int32:
        """Multiply two elements (a pair of bfloat16 numbers in a word) by their block's multiplier, which is in both
        halves of a word."""
        return product(pair, multiplier)

    def columns(self, stage: Int32, pair: int, k: Int32 | int) -> list[Int32]:
        """Read and decode 16 columns, from column 16 * `pair` on, in step `k` (16 elements of the depth).

        Return the lane's four words of mma.sync's operand b: both halves of the step for the first 8 columns, then for
        the last 8.

        stage: the stage's index.
        """
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
        """Read a lane's four elements of a column, and move their bits to bfloat16's places. Return two words.

        A word has two bfloat16 numbers. A column of the result is a weight row in the stage.

        Args:
            first: the stage's address in shared memory.
            column: the column's index in the tile.
            k: the index of a step; a step is 16 elements of the k-tile's depth.
            number: the column's index among the columns of this lane.
        """
        raise NotImplementedError

    def _load(self, dtype: Any, at: Int32) -> Int32:
        """Load a number of `dtype` at an address in shared memory, as Int32."""
        pointer = cute.make_ptr(dtype, at, cute.AddressSpace.smem, assumed_align=dtype.width // 8)
        return Int32(cute.make_tensor(pointer, cute.make_layout(1))[0]) & (0xFFFF if dtype is Uint16 else -1)


class NarrowE4m3(Narrow):
    """E4M3 weights for tiles of many rows of x. A lane reads pairs of neighbouring elements."""

    element, shift = E4m3, (EXPONENT_BIAS + 120) * EXPONENT_ONE

    def _two_words(self, first: Int32, column: Int32, k: Int32 | int, number: int) -> list[Int32]:
        at = first + self.at(column, Int32(k)) + self.lane % 4 * 2
        return [e4m3_pair(self._load(Uint16, at + 8 * half)) for half in range(2)]


class NarrowE4m3ByFours(NarrowE4m3):
    """E4M3 weights for tiles of few rows of x. A lane reads four neighbouring elements.

    A weight row is a column of the MMA's operand b, and of the result. NaN is decoded as the number 480. So the method
    `columns`, which decodes, notes each column in which it meets a NaN, and the method `nans` returns an operand b that
    makes these columns of the result NaN.
    """

    notes_nans = True

    def __init__(self, lines: int, weights: Format, few_rows: bool):
        super().__init__(lines, weights, few_rows)
        self.noted = cute.make_rmem_tensor(lines // 8, Int32)
        self.noted.fill(0)

    def rows_of(self, x: Along, stage: Int32, first: Int32 | int, tile: Int32, k: Int32 | int) -> Any:
        return x.rows_by_fours(stage, first, k)

    def nans(self, pair: int) -> list[Int32]:
        """Return words of mma.sync's operand b, as `columns` does, for the 16 columns from 16 * `pair` on.

        They hold NaN for each column in which `columns` met a NaN since the last call of `nans`, and 0 for all other
        columns.
        """
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
    """E2M1 weights. A lane reads words of eight elements, and each step takes half a word."""

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
"""Element types by `Format.element`."""


def narrow(lines: int, weights: Format, few_rows: bool) -> Narrow:
    """Make the operand of `lines` weight rows for a format's element type.

    Args:
        weights: the weights' format.
        few_rows: True if the tile has few rows of x. E4M3 elements are then read in another order (see the top of this
            file).
    """
    kinds = {E4M3: NarrowE4m3ByFours if few_rows else NarrowE4m3, E2M1: NarrowE2m1}
    return kinds[weights.element](lines, weights, few_rows)


@cute.jit
def narrow_sources(
    lines: Lines, weights: Weights, w_scale: Int64, depth: Int32, work: WorkTile,
    weight_format: cutlass.Constexpr[Format], parts: cutlass.Constexpr[int], part_n: cutlass.Constexpr[int],
    layout: cutlass.Constexpr[str],
) -> NarrowLines:  # fmt: skip
    """Return the addresses from which a thread copies weights and loads scales.

    Threads past an expert's last weight row read the scales of the last weight row again.

    Args:
        lines: the addresses of the thread's weight rows.
        weights: the experts' weight rows.
        w_scale: the address of the scales, which lie as [E, weight rows, blocks of depth].
        depth: elements of a weight row.
        work: the output tile.
        weight_format: the format of the weights.
        parts, part_n: number of parts of the tile's columns (2 with a gate: a and u, else 1), and columns of each part.
        layout: the order of weight rows, a key of specs.LAYOUT_FORMS.
    """
    thread, _, _ = cute.arch.thread_idx()
    column = cutlass.min(work.n_tile * part_n + thread % part_n, weights.count - 1)
    row = row_of(layout, weights.gate, column, thread // part_n, weights.count)
    blocks = weight_format.num_scales(depth)
    scales = w_scale + (Int64(work.expert) * (parts * weights.count) + row) * blocks
    return NarrowLines(lines.parts, lines.distances, scales, blocks)
