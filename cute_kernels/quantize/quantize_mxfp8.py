"""MXFP8 quantisation: x [T, K] to E4M3, with a scale (E8M0) for each block of 32 or 128 elements along rows or columns.

A CTA reads a tile once, 16 bytes a load, into registers, where the numbers stay. Only magnitudes are exchanged between
threads: by shuffles along a row, through 2 or 4 KB of shared memory along a column. A band is 128 rows, a quarter 32
rows of it; a tile is some rows of a band, times some columns. By the spec's axis:

    row              2 rows of each quarter of a band, whose swizzled scales share sectors, by 1024 columns; a thread
    has
                     16 bytes of each of 8 rows
    col              128 rows by 128 columns, an atom of scales; a thread has 16 bytes of each of 16 rows, here and
    below both             128 rows by 256 columns (float32: 128)
    both, strips     32 rows by 512 columns; only for plain scales of blocks of 32, which need no whole band

Up to 128 KB of loads are in flight on an SM; 4.3 TB/s at 1 us of latency needs 33 KB. Tiles are wide because of the
rows' plain scales: storing less than a sector (32 bytes) costs as much as storing two sectors. A row has 4 bytes of
scales in 128 columns, 8 in 256, 16 in a strip, and a whole sector in a tile of rows alone.

A call moves T K (width + copies (1 + 1/32)) bytes, each once; width is the bytes of an element of x, 2 or 4, and copies
is 1, or 2 for both axes. That is 3.03 bytes an element for rows of 16-bit numbers, 4.06 for both axes. Instructions do
not bound the time: the kernel needs 9 and 13 an element, and an SM issues 21 and 28 while those bytes pass at 4.3 TB/s.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import CacheEvictionPriority, CopyG2ROp

from ..device.gmem import vector_at
from ..device.invariant import Invariant
from ..device.select import select
from ..device.target import is_for_hopper_alone, let_next_begin
from ..specs import QuantizeMxfp8Spec
from ..tracing import DTYPES, Traced, traced
from .e4m3 import e4m3_values, to_e4m3
from .scale_stores import BLOCK, BLOCKS, QUARTERS, TILE, WORD_BYTES, ScaleGrid, ScaleStores, Strip
from .scales import Magnitudes, exponent_of, multiplier_of, power_of_two

SECTOR_BYTES = 32
VECTOR_BYTES = 16
WORDS = VECTOR_BYTES // WORD_BYTES
WARP = 32
BYTES_IN_FLIGHT = 128 << 10  # on an SM: half of its registers
SMEM_PERCENT = 14  # 32 of 228 KB: CTAs take at most 20 KB; loads in flight need the rest as cache


class Outputs(NamedTuple):
    """Addresses of the results: E4M3 data [T, K] and E8M0 scales, with blocks along rows (row_) and along columns
    (col_). If the kernel's `axis` has no blocks along rows or columns, their addresses are ignored."""

    row_data: Int64
    row_scale: Int64
    col_data: Int64
    col_scale: Int64


class ScaleLayout(NamedTuple):
    """Layout of scales. wide: 1: one scale for 128 elements; 0: for 32. swizzled: 1: scales lie in atoms of 128 x 4; 0:
    plain, row after row."""

    wide: Int32
    swizzled: Int32


class Reach(NamedTuple):
    """Row bounds of a tile: rows from `end` on count as zeros, rows from `stop` on are not stored.

    With axis "row", both are the end of the last group. Otherwise groups begin at multiples of 128 rows; end is the end
    of the tile's group, and stop is T, or 0 if the tile is after the last group. Without groups both are T.
    """

    end: Int32
    stop: Int32


class Origin(NamedTuple):
    """Rows and columns of x where a thread and its tile begin.

    Attributes:
        row: the thread's first row.
        column: the first column of the thread's 16 bytes.
        band: the first row of the tile's band of 128 rows.
        row0, col0: the tile's first row and column.
    """

    row: Int32
    column: Int32
    band: Int32
    row0: Int32
    col0: Int32


class Tile(NamedTuple):
    """Size of a CTA's tile.

    Attributes:
        run: consecutive rows in a quarter (32 rows) of a band of 128.
        quarters: number of quarters that the tile has rows of: 4, or 1.
        columns: number of columns.
        rows_per_thread: rows of which a thread has 16 bytes.
    """

    run: int
    quarters: int
    columns: int
    rows_per_thread: int


# A row's scales are a sector in ROWS, half a sector in STRIP.
ROWS = Tile(2, QUARTERS, SECTOR_BYTES * BLOCK, 8)
STRIP = Tile(BLOCK, 1, SECTOR_BYTES // 2 * BLOCK, 16)


def read_once(dtype: type[cutlass.Numeric]) -> cute.CopyAtom:
    """Make the copy atom that loads a vector of 16 bytes without allocating a line in L1."""
    return cute.make_copy_atom(
        CopyG2ROp(), dtype, num_bits_per_copy=8 * VECTOR_BYTES, l1c_evict_priority=CacheEvictionPriority.NO_ALLOCATE
    )


def tile_of(axis: str, vector: int) -> Tile:
    """Return the tile of an axis that works for all layouts of scales. vector: elements in 16 bytes."""
    columns = {"row": ROWS.columns, "col": TILE, "both": WARP * vector}[axis]
    return ROWS if axis == "row" else Tile(BLOCK, QUARTERS, columns, STRIP.rows_per_thread)


class QuantizeMxfp8(Invariant):
    """Kernel for x in bfloat16, float16 or float32. Rows start at multiples of 16 bytes and hold a multiple of 32
    elements.

    axis: blocks lie along "row", along "col", or "both" copies are made. tile: STRIP, which works only for plain scales
    of 32 elements; None: `tile_of`, which works for all layouts.
    """

    def __init__(self, name: str, dtype: type[cutlass.Numeric], axis: str, tile: Tile | None = None):
        self.name = name
        self.dtype = dtype
        self.by_row = axis != "col"
        self.by_col = axis != "row"
        self.magnitudes = Magnitudes(dtype)
        self.vector = VECTOR_BYTES * 8 // dtype.width
        tile = tile or tile_of(axis, self.vector)
        self.all_layouts = tile.quarters == QUARTERS
        self.run = tile.run
        self.rows = tile.quarters * tile.run
        self.blocks_down = self.rows // BLOCK
        self.columns = tile.columns
        self.rows_per_thread = tile.rows_per_thread
        self.lanes = self.columns // self.vector  # threads along a row
        self.slots = self.rows // self.rows_per_thread
        self.threads = self.lanes * self.slots
        # Converting to FP8 by arithmetic takes so many registers that both axes cannot keep magnitudes and 16 row
        # exponents. So columns compute magnitudes again, and row exponents are read back from shared memory.
        self.spares_registers = axis == "both" and not is_for_hopper_alone()
        self.stores = ScaleStores(self.rows, self.run, self.threads)
        self.min_blocks = BYTES_IN_FLIGHT // (self.threads * self.rows_per_thread * VECTOR_BYTES)

    def _tiles_along_k(self, x: cute.Tensor) -> Int32:
        return cute.ceil_div(x.shape[1], self.columns)

    @cute.jit
    def launch(
        self,
        x: cute.Tensor,
        outputs: Outputs,
        offs: Int64,
        num_groups: Int32,
        layout: ScaleLayout,
        stream: cuda.CUstream,
    ):
        """Launch one CTA for each tile. CTAs of the same rows have neighbouring numbers, since they read the same pages
        of memory. offs: the address of the group ends (`Reach`); 0: no groups."""
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        tiles = cute.ceil_div(x.shape[0], TILE) * (TILE // self.rows) * self._tiles_along_k(x)
        self.kernel(x, outputs, offs, num_groups, layout).launch(
            grid=(tiles, 1, 1), block=(self.threads, 1, 1),
            min_blocks_per_mp=self.min_blocks, preferred_smem_carveout=SMEM_PERCENT, stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, x: cute.Tensor, outputs: Outputs, offs: Int64, num_groups: Int32, layout: ScaleLayout):
        let_next_begin()
        thread, _, _ = cute.arch.thread_idx()
        tile, _, _ = cute.arch.block_idx()
        tiles_along_k = self._tiles_along_k(x)
        line = tile // tiles_along_k
        lines_per_band = TILE // self.rows
        band = line // lines_per_band * TILE
        row0 = band + line % lines_per_band * self.run
        col0 = tile % tiles_along_k * self.columns
        row = row0 + thread // self.lanes * self.rows_per_thread
        origin = Origin(row, col0 + thread % self.lanes * self.vector, band, row0, col0)

        values = self._load(x, origin)
        reach = self._reach(x, band, offs, num_groups)
        if band < reach.stop:
            self._quantize(x, outputs, layout, values, reach, origin)

    @cute.jit
    def _load(self, x: cute.Tensor, origin: Origin) -> cute.Tensor:
        """Load this thread's 16 bytes of each of its rows, [vector, rows_per_thread]; zeros outside of x. In bands that
        lie whole in x, all loads are issued at once, without a branch."""
        values = cute.make_rmem_tensor((self.vector, self.rows_per_thread), self.dtype)
        values.fill(0.0)
        atom = read_once(self.dtype)
        first = x.iterator.toint() + (Int64(origin.row) * x.stride[0] + origin.column) * (self.dtype.width // 8)
        row_bytes = x.stride[0] * (self.dtype.width // 8)
        if origin.column < x.shape[1]:
            if origin.band + TILE <= x.shape[0]:
                for i in cutlass.range_constexpr(self.rows_per_thread):
                    at = first + self.stores.below(i) * row_bytes
                    cute.copy(atom, self._vector_at(self.dtype, at), values[None, i])
            else:
                for i in cutlass.range_constexpr(self.rows_per_thread):
                    if origin.row + self.stores.below(i) < x.shape[0]:
                        at = first + self.stores.below(i) * row_bytes
                        cute.copy(atom, self._vector_at(self.dtype, at), values[None, i])
        return values

    def _vector_at(self, dtype: type[cutlass.Numeric], address: Int64) -> cute.Tensor:
        """Return the `vector` elements of a dtype at an address as a tensor, aligned to its size in bytes."""
        align = self.vector * dtype.width // 8
        pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)
        return cute.make_tensor(pointer, cute.make_layout(self.vector))

    @cute.jit
    def _reach(self, x: cute.Tensor, band: Int32, offs: Int64, num_groups: Int32) -> Reach:
        """Return the row bounds of a band that begins at row `band`, from the sorted group ends, each clamped to x's
        rows."""
        rows = Int32(x.shape[0])
        end = rows
        stop = rows
        if offs != 0:
            ends = vector_at(Int32, offs)
            if const_expr(self.by_col):
                stop = Int32(0)
                lane = cute.arch.lane_idx()
                for base in cutlass.range(0, num_groups, 32):
                    nearest = rows + 1
                    if base + lane < num_groups:
                        candidate = ends[base + lane]
                        if candidate > band:
                            nearest = cutlass.min(candidate, rows)
                    nearest = Int32(cute.arch.warp_redux_sync(nearest, "min"))
                    if nearest <= rows:
                        stop = rows
                        end = cutlass.min(end, nearest)
            else:
                end = cutlass.max(Int32(0), cutlass.min(ends[num_groups - 1], rows))
                stop = end
        return Reach(end, stop)

    @cute.jit
    def _quantize(
        self, x: cute.Tensor, outputs: Outputs, layout: ScaleLayout, values: cute.Tensor, reach: Reach, origin: Origin
    ):
        plain = layout.swizzled == 0
        thread, _, _ = cute.arch.thread_idx()
        slot = thread // self.lanes
        words = cute.recast_tensor(values, Int32)
        if reach.end < origin.band + TILE:
            for i in cutlass.range_constexpr(self.rows_per_thread):
                for j in cutlass.range_constexpr(WORDS):
                    words[j, i] = select(origin.row + self.stores.below(i) < reach.end, words[j, i], Int32(0))

        smem = cutlass.utils.SmemAllocator()
        row_scales = smem.allocate_tensor(Uint8, cute.make_layout((self.columns // BLOCK, self.rows)), 16)
        row_exponents = cute.make_rmem_tensor(self.rows_per_thread, Int32)
        col_exponents = cute.make_rmem_tensor(self.vector, Int32)
        if const_expr(self.by_row):
            self._row_exponents(words, layout, row_exponents)
            self._put_row_scales(x, row_exponents, row_scales, origin, slot)
        if const_expr(self.by_col):
            col_scales = smem.allocate_tensor(Uint8, cute.make_layout((self.blocks_down, self.columns)), 16)
            col_maxima = smem.allocate_tensor(Int32, cute.make_layout((WORDS, self.lanes, self.slots)), 16)
            self._put_column_maxima(words, col_maxima, slot)
            cute.arch.sync_threads()
            self._column_exponents(col_maxima, slot, layout, col_exponents)
            self._put_column_scales(x, col_exponents, col_scales, origin, slot)

        self._store_data(x, outputs, values, row_exponents, row_scales, col_exponents, reach, origin)
        cute.arch.sync_threads()
        if const_expr(self.by_row):
            self._store_row_scales(x, outputs.row_scale, row_scales, reach, origin, plain)
        if const_expr(self.by_col):
            self._store_column_scales(x, outputs.col_scale, col_scales, origin, plain)

    @cute.jit
    def _row_exponents(self, words: cute.Tensor, layout: ScaleLayout, exponents: cute.Tensor):
        """Write to `exponents`, for each of this thread's rows, the scale byte of the block that holds its 16 bytes.

        words: the thread's elements as 32-bit words, [WORDS, rows_per_thread].
        """
        kind = self.magnitudes
        maxima = cute.make_rmem_tensor(self.rows_per_thread, Int32)
        for i in cutlass.range_constexpr(self.rows_per_thread):
            maxima[i] = kind.absolute(words[0, i])
            for j in cutlass.range_constexpr(1, WORDS):
                maxima[i] = kind.max(maxima[i], kind.absolute(words[j, i]))
        self._max_over_lanes(maxima, 1, BLOCK // self.vector)
        if const_expr(self.all_layouts):
            if layout.wide != 0:
                self._max_over_lanes(maxima, BLOCK // self.vector, TILE // self.vector)
        for i in cutlass.range_constexpr(self.rows_per_thread):
            exponents[i] = exponent_of(kind.greatest(maxima[i]))

    def _max_over_lanes(self, maxima: cute.Tensor, first: int, beyond: int) -> None:
        distance = first
        while distance < beyond:
            for i in range(self.rows_per_thread):
                maxima[i] = self.magnitudes.max(maxima[i], cute.arch.shuffle_sync_bfly(maxima[i], distance))
            distance *= 2

    def _put_column_maxima(self, words: cute.Tensor, col_maxima: cute.Tensor, slot: Int32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        kind = self.magnitudes
        maxima = cute.make_rmem_tensor(WORDS, Int32)
        for j in range(WORDS):
            maxima[j] = kind.absolute(words[j, 0])
            for i in range(1, self.rows_per_thread):
                word = words[j, i]
                magnitude = kind.absolute_after(word, maxima[j]) if self.spares_registers else kind.absolute(word)
                maxima[j] = kind.max(maxima[j], magnitude)
        cute.autovec_copy(maxima, col_maxima[None, thread % self.lanes, slot])

    @cute.jit
    def _column_exponents(self, col_maxima: cute.Tensor, slot: Int32, layout: ScaleLayout, exponents: cute.Tensor):
        """Write to `exponents` the scale bytes of this thread's columns.

        col_maxima: [WORDS, lanes, slots] in shared memory, the greatest magnitudes that each thread found. A slot is
            the
        threads that have the same rows; a block of a column spans several slots.
        """
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % self.lanes
        columns = cute.make_rmem_tensor(self.vector, self.dtype)
        maxima = cute.recast_tensor(columns, Int32)
        maxima.fill(0)
        slots_per_block = self.slots // self.blocks_down
        first = slot // slots_per_block * slots_per_block
        for other in cutlass.range_constexpr(slots_per_block):
            self._max_with(maxima, col_maxima[None, lane, first + other])
        if const_expr(self.all_layouts):
            if layout.wide != 0:
                for other in cutlass.range_constexpr(self.slots):
                    self._max_with(maxima, col_maxima[None, lane, other])
        for c in cutlass.range_constexpr(self.vector):
            exponents[c] = exponent_of(columns[c].to(Float32))

    def _max_with(self, maxima: cute.Tensor, others: cute.Tensor) -> None:
        fragment = cute.make_rmem_tensor(WORDS, Int32)
        cute.autovec_copy(others, fragment)
        for j in range(WORDS):
            maxima[j] = self.magnitudes.max(maxima[j], fragment[j])

    @cute.jit
    def _put_row_scales(
        self, x: cute.Tensor, exponents: cute.Tensor, row_scales: cute.Tensor, origin: Origin, slot: Int32
    ):
        """Write the rows' scales to shared memory (`row_scales`); 0 for blocks past the last column, for which an atom
        also has bytes."""
        thread, _, _ = cute.arch.thread_idx()
        lanes_per_block = BLOCK // self.vector
        if thread % lanes_per_block == 0:
            block = thread % self.lanes // lanes_per_block
            for i in cutlass.range_constexpr(self.rows_per_thread):
                inside = origin.column < x.shape[1]
                scale = Uint8(select(inside, exponents[i], Int32(0)))
                row_scales[block, slot * self.rows_per_thread + i] = scale

    def _row_exponent(self, exponents: cute.Tensor, row_scales: cute.Tensor, i: int) -> Int32:
        """Return the scale byte of the thread's i-th row: from registers or, to spare them, from shared memory, where
        `_put_row_scales` wrote it."""
        if not self.spares_registers:
            return exponents[i]
        thread, _, _ = cute.arch.thread_idx()
        block = thread % self.lanes // (BLOCK // self.vector)
        return Int32(row_scales[block, thread // self.lanes * self.rows_per_thread + i]) & 0xFF

    @cute.jit
    def _put_column_scales(
        self, x: cute.Tensor, exponents: cute.Tensor, col_scales: cute.Tensor, origin: Origin, slot: Int32
    ):
        thread, _, _ = cute.arch.thread_idx()
        slots_per_block = self.slots // self.blocks_down
        if slot % slots_per_block == 0:
            for c in cutlass.range_constexpr(self.vector):
                inside = origin.row < x.shape[0]
                column = thread % self.lanes * self.vector + c
                col_scales[slot // slots_per_block, column] = Uint8(select(inside, exponents[c], Int32(0)))

    @cute.jit
    def _store_data(
        self, x: cute.Tensor, outputs: Outputs, values: cute.Tensor, row_exponents: cute.Tensor,
        row_scales: cute.Tensor, col_exponents: cute.Tensor, reach: Reach, origin: Origin,
    ):  # fmt: skip
        by_column = cute.make_rmem_tensor(self.vector, Float32)
        if const_expr(self.by_col):
            for c in cutlass.range_constexpr(self.vector):
                by_column[c] = multiplier_of(col_exponents[c])
        width = Int64(x.shape[1])
        first = Int64(origin.row) * width + origin.column
        if origin.column < x.shape[1]:
            for i in cutlass.range_constexpr(self.rows_per_thread):
                if origin.row + self.stores.below(i) < reach.stop:
                    numbers = values[None, i].load().to(Float32)
                    at = first + self.stores.below(i) * width
                    if const_expr(self.by_row):
                        by_row = multiplier_of(self._row_exponent(row_exponents, row_scales, i))
                        self._store(numbers * by_row, outputs.row_data + at)
                    if const_expr(self.by_col):
                        self._store(numbers * by_column.load(), outputs.col_data + at)

    def _store(self, scaled: cute.TensorSSA, address: Int64) -> None:
        """Store numbers as E4M3, rounded to nearest even and saturated; NaN becomes E4M3's NaN."""
        result = to_e4m3(scaled, self.vector)
        cute.autovec_copy(result, self._vector_at(Float8E4M3FN, address))

    @cute.jit
    def _store_row_scales(
        self, x: cute.Tensor, address: Int64, scales: cute.Tensor, reach: Reach, origin: Origin, plain: Boolean
    ):
        blocks = Int32(x.shape[1] // BLOCK)
        block0 = origin.col0 // BLOCK
        if plain:
            self.stores.words(scales, Strip(address, origin.row0, reach.stop, block0, blocks))
        elif const_expr(self.all_layouts):
            rows = Int32(x.shape[0])
            self.stores.atoms(scales, ScaleGrid(address, origin.row0, rows, reach.stop, block0, blocks))

    @cute.jit
    def _store_column_scales(self, x: cute.Tensor, address: Int64, scales: cute.Tensor, origin: Origin, plain: Boolean):
        width = Int32(x.shape[1])
        blocks = Int32(cute.ceil_div(x.shape[0], BLOCK))
        block0 = origin.row0 // BLOCK
        if plain:
            shape = self.columns, self.blocks_down
            by_column = cute.make_tensor(scales.iterator, cute.make_layout(shape, stride=(self.blocks_down, 1)))
            store = self.stores.words if self.blocks_down == 1 else self.stores.strip
            store(by_column, Strip(address, block0, blocks, origin.col0, width))
        elif const_expr(self.all_layouts):
            for first in cutlass.range_constexpr(0, self.columns, TILE):
                if origin.col0 + first < width:
                    atom = cute.local_tile(scales, (BLOCKS, TILE), (0, first // TILE))
                    self.stores.atoms(atom, ScaleGrid(address, origin.col0 + first, width, width, block0, blocks))


class RoundMxfp8(QuantizeMxfp8):
    """Kernel that rounds x to the values that it would have in MXFP8, in blocks of 32 along rows. The result has x's
    dtype, so the kernel moves 2 T K elements of it.

    `outputs.row_data` is the address of the result [T, K]; other outputs and the layout are ignored.
    """

    def __init__(self, name: str, dtype: type[cutlass.Numeric]):
        super().__init__(name, dtype, "row")

    @cute.jit
    def _quantize(
        self, x: cute.Tensor, outputs: Outputs, layout: ScaleLayout, values: cute.Tensor, reach: Reach, origin: Origin
    ):
        exponents = cute.make_rmem_tensor(self.rows_per_thread, Int32)
        self._row_exponents(cute.recast_tensor(values, Int32), layout, exponents)
        row_bytes = Int64(x.shape[1]) * (self.dtype.width // 8)
        first = outputs.row_data + origin.row * row_bytes + origin.column * (self.dtype.width // 8)
        if origin.column < x.shape[1]:
            for i in cutlass.range_constexpr(self.rows_per_thread):
                if origin.row + self.stores.below(i) < reach.stop:
                    scaled = values[None, i].load().to(Float32) * multiplier_of(exponents[i])
                    rounded = e4m3_values(scaled, self.vector) * power_of_two(exponents[i])
                    result = cute.make_rmem_tensor(self.vector, self.dtype)
                    result.store(rounded.to(self.dtype))
                    cute.autovec_copy(result, self._vector_at(self.dtype, first + self.stores.below(i) * row_bytes))


class Quantize:
    """Host function of the quantiser. With axis "both" it has a second kernel, with wider tiles (STRIP), which it
    launches for plain scales of 32 elements."""

    def __init__(self, spec: QuantizeMxfp8Spec):
        dtype = DTYPES[spec.dtype]
        self.quantize = QuantizeMxfp8(spec.name, dtype, spec.axis)
        self.strips = QuantizeMxfp8(f"{spec.name}_strips", dtype, spec.axis, STRIP)
        self.has_strips = spec.axis == "both"

    @cute.jit
    def __call__(
        self, x: cute.Tensor, row_data: Int64, row_scale: Int64, col_data: Int64, col_scale: Int64, offs: Int64,
        num_groups: Int32, wide: Int32, swizzled: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if x.shape[0] > 0:
            outputs = Outputs(row_data, row_scale, col_data, col_scale)
            arguments = (x, outputs, offs, num_groups, ScaleLayout(wide, swizzled), stream)
            if const_expr(not self.has_strips):
                self.quantize.launch(*arguments)
            elif (wide == 0) & (swizzled == 0):
                self.strips.launch(*arguments)
            else:
                self.quantize.launch(*arguments)


class Round:
    """Host function of `RoundMxfp8`."""

    def __init__(self, spec: QuantizeMxfp8Spec):
        self.round = RoundMxfp8(spec.name, DTYPES[spec.dtype])

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, offs: Int64, num_groups: Int32, stream: cuda.CUstream):
        if x.shape[0] > 0:
            outputs = Outputs(Int64(out.iterator.toint()), Int64(0), Int64(0), Int64(0))
            self.round.launch(x, outputs, offs, num_groups, ScaleLayout(Int32(0), Int32(0)), stream)


def trace(spec: QuantizeMxfp8Spec) -> Traced:
    return traced(spec, (Round if spec.rounded else Quantize)(spec))
