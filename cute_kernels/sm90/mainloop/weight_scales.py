"""Scale bytes of weights that MMA warpgroups decode in registers: a thread loads them by words a k-tile ahead."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, const_expr

from ...decoding.decoder import Decoder
from ...decoding.scales import is_bad
from ...device.gmem import vector_at
from ...device.invariant import Invariant
from ...device.select import select
from ...epilogue.fragments import TileShare, registers
from ...epilogue.sizes import THREADS
from ...memory.weights import GateRows, row_of
from ...schedule.work import WorkTile
from ..split_depth import KTiles
from ..swapped_rows import ROW_HALVES, SwappedRows

# Scale bytes in a 32-bit word. A row has one or two words of scales for a k-tile.
SCALES_PER_WORD = 4


class ScaleGrid(NamedTuple):
    """Scale bytes of all experts' weights, [E, rows, blocks].

    Attributes:
        address: address of the scale bytes.
        rows: number of weight rows of an expert.
        blocks: number of scales of a weight row.
        k_tiles: the k-tiles of a weight row that the warpgroup multiplies.
        words: words of scales, four bytes each, that a row has in a k-tile.
        share: which slabs (64 weight rows each) of a tile the warpgroup has.
        gate: order of a gated layer's weight rows.
    """

    address: Int64
    rows: Int32
    blocks: Int32
    k_tiles: KTiles
    words: int
    share: TileShare
    gate: GateRows


class ScalesAhead(Invariant):
    """A thread's scales, loaded a k-tile ahead: during the previous k-tile, and the scales of a tile's first k-tile
    during the last k-tile of the previous tile.

    Attributes:
        k_tiles: the k-tiles of a weight row that the warpgroup multiplies.
    """

    k_tiles: KTiles

    def _aim(self, work: WorkTile) -> None:
        """Find a tile's scales in memory."""
        raise NotImplementedError

    def _fetch(self, k_tile: Int32) -> None:
        """Start loading the scales of k-tile number `k_tile` of the tile that `_aim` has found."""
        raise NotImplementedError

    @cute.jit
    def begin(self, work: WorkTile):
        """Start loading the first scales of a tile."""
        self._aim(work)
        self._fetch(self.k_tiles.number(Int32(0)))

    @cute.jit
    def start_loads(self, i: Int32, next_work: WorkTile):
        """Start loading the scales of the warpgroup's i-th k-tile of the current tile. If i is past the last k-tile,
        load the scales of its first k-tile of tile `next_work`.
        """
        if i == self.k_tiles.count:
            self._aim(next_work)
            i = Int32(0)
        self._fetch(self.k_tiles.number(i))


class WeightScales(ScalesAhead):
    """Scale bytes of a thread's weight rows, in words of four bytes.

    Attributes:
        expert: address of the expert's scales.
        begins: for each row, the offset of its scales from `expert`.
        words: (word, row), the scales of the current k-tile.
        next: (word, row), the scales of the next k-tile, which are being loaded.
        bad: bits that note weight rows with bad scales, for example NaN, in the tile so far. A weight row with a bad
            scale must give NaN (decoding/scales.py).
        large: not 0 if `words` has a large scale, whose multiplier exceeds bfloat16's range, so that weights are
            multiplied twice (`DecodingMainloop._enlarge`).
    """

    def __init__(self, grid: ScaleGrid, rows: SwappedRows, layout: str, decoder: Decoder):
        self.grid = grid
        self.k_tiles = grid.k_tiles
        self.decoder = decoder
        self.rows = rows
        self.layout = layout
        self.expert = cute.make_rmem_tensor(1, Int64)
        self.begins = cute.make_rmem_tensor(rows.count, Int32)
        self.words = cute.make_rmem_tensor((grid.words, rows.count), Int32)
        self.next = cute.make_rmem_tensor((grid.words, rows.count), Int32)
        self.bad = cute.make_rmem_tensor(1, Int32)
        self.bad.fill(0)
        self.large = cute.make_rmem_tensor(1, Int32)

    @cute.jit
    def _aim(self, work: WorkTile):
        """Set `expert` and `begins` for a tile. The end mark (a tile with expert < 0) gets the scales of expert 0."""
        grid = self.grid
        half = grid.rows // self.rows.parts
        thread = thread_of_warpgroup()
        self.expert[0] = grid.address + Int64(cutlass.max(work.expert, Int32(0))) * (grid.rows * grid.blocks)
        for i in cutlass.range_constexpr(self.rows.count):
            # Rows past the last one are zeros and never stored, so any row's scales will do.
            column = work.n_tile * self.rows.part_n + self.rows.column(i, grid.share.first_slab, thread)
            row = row_of(self.layout, grid.gate, cutlass.min(column, half - 1), self.rows.part(i), half)
            self.begins[i] = row * grid.blocks

    def _has_words(self) -> Boolean:
        """Return True if a row's scales of each k-tile are aligned to words."""
        return (self.grid.blocks | Int32(self.grid.address)) % SCALES_PER_WORD == 0

    @cute.jit
    def _fetch(self, k_tile: Int32):
        """Start loading the scales of a k-tile: words, or one byte by each of the four threads with the same rows."""
        if self._has_words():
            first = self.expert[0] + k_tile * (self.grid.words * SCALES_PER_WORD)
            for word in cutlass.range_constexpr(self.grid.words):
                self._fetch_word(first, word, k_tile)
        else:
            self._fetch_bytes(k_tile)

    @cute.jit
    def _fetch_word(self, first: Int64, word: cutlass.Constexpr[int], k_tile: Int32):
        """Start loading word number `word` (four scales, 32 bits) of each weight row's scales in a k-tile into the
        registers `next`.

        Words past a row's last block become 0. The first word of a k-tile is never past the last block, so it is not
        checked.

        Args:
            first: address of the expert's scales plus the k-tile's offset.
            k_tile: number of the k-tile.
        """
        count = self.grid.words * SCALES_PER_WORD
        if const_expr(word > 0):
            for i in cutlass.range_constexpr(self.rows.count):
                self.next[word, i] = Int32(0)
            if k_tile * count + word * SCALES_PER_WORD < self.grid.blocks:
                for i in cutlass.range_constexpr(self.rows.count):
                    self.next[word, i] = vector_at(Int32, first + self.begins[i])[word]
        else:
            for i in cutlass.range_constexpr(self.rows.count):
                self.next[word, i] = vector_at(Int32, first + self.begins[i])[0]

    @cute.jit
    def _fetch_bytes(self, k_tile: Int32):
        """Start loading one byte of each word of each weight row's scales: byte number (lane % 4), while the three
        other threads with the same rows load the other bytes. Bytes past a row's last block become 0."""
        block = k_tile * (self.grid.words * SCALES_PER_WORD) + cute.arch.lane_idx() % SCALES_PER_WORD
        scales = vector_at(Uint8, self.expert[0])
        for word in cutlass.range_constexpr(self.grid.words):
            number = block + word * SCALES_PER_WORD
            for i in cutlass.range_constexpr(self.rows.count):
                self.next[word, i] = Int32(0)
                if number < self.grid.blocks:
                    self.next[word, i] = Int32(scales[self.begins[i] + number]) & 0xFF

    @cute.jit
    def _gather_bytes(self):
        """Combine the bytes in `next` that four threads loaded (`_fetch_bytes`) into words, which all four get."""
        shift = cute.arch.lane_idx() % SCALES_PER_WORD * 8
        for i in cutlass.range_constexpr(cute.size(self.next)):
            word = self.next[i] << shift
            for distance in cutlass.range_constexpr(1, 3):
                word |= cute.arch.shuffle_sync_bfly(word, distance)
            self.next[i] = word

    @cute.jit
    def take(self):
        """Make the loaded scales (`next`) the current ones (`words`), and note bad ones in `bad` and large ones in
        `large`."""
        if not self._has_words():
            self._gather_bytes()
        if const_expr(self.decoder.scales.first_large is not None):
            self.large[0] = Int32(0)
        for i in cutlass.range_constexpr(cute.size(self.words)):
            self.words[i] = self.next[i]
            self.bad[0] |= self.decoder.scales.bad(self.words[i], i // self.grid.words)
            if const_expr(self.decoder.scales.first_large is not None):
                self.large[0] |= self.decoder.scales.large(self.words[i])

    @cute.jit
    def write_nan_rows(self, acc: cute.Tensor):
        """Overwrite the accumulators of weight rows that had a bad scale in the tile with NaN, and clear `bad`."""
        if self.bad[0] != 0:
            slabs = self.rows.count // ROW_HALVES
            count = cute.size(acc) // slabs
            for slab in cutlass.range_constexpr(slabs):
                values = registers(acc, slab * count, count)
                for i in cutlass.range_constexpr(count):
                    row = ROW_HALVES * slab + i // 2 % ROW_HALVES
                    bad = is_bad(self.bad[0], row)
                    values[i] = select(bad, Float32(float("nan")), values[i])
            self.bad[0] = Int32(0)


def thread_of_warpgroup() -> Int32:
    """Return the index of this thread in its warpgroup."""
    thread, _, _ = cute.arch.thread_idx()
    return thread % THREADS
