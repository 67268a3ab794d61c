"""The kernel that quantises tiles of x to MXFP8. `quantize_mxfp8.py` says how tiles are chosen and what they cost."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64, Uint8, const_expr

from ..device.gmem import vector_at
from ..device.invariant import Invariant
from ..device.naming import name_kernel
from ..device.select import select
from ..device.target import is_for_hopper_alone, let_next_begin
from .e4m3 import to_e4m3
from .scale_stores import BLOCK, BLOCKS, QUARTERS, TILE, ScaleGrid, ScaleStores, Strip
from .scales import Magnitudes, exponent_of, multiplier_of
from .tile import (
    BYTES_IN_FLIGHT,
    SMEM_PERCENT,
    VECTOR_BYTES,
    WORDS,
    Origin,
    Outputs,
    Reach,
    ScaleLayout,
    Tile,
    read_once,
    tile_of,
)


class QuantizeMxfp8(Invariant):
    """Kernel that quantises x (bfloat16, float16 or float32) to E4M3, with an E8M0 scale for each block of 32 or 128
    elements.

    Rows of x start at multiples of 16 bytes and hold a multiple of 32 elements.

    Args:
        axis: "row": blocks lie along rows; "col": blocks lie along columns; "both": the kernel makes a result of each
            kind.
        tile: STRIP, which works only for plain scales of blocks of 32 elements; None: the tile that `tile_of` returns,
            which works for all layouts of scales.
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
        """Launch one CTA for each tile. CTAs of the same rows have neighbouring indices, since they read the same pages
        of memory.

        Args:
            x: [T, K].
            outputs: addresses of the results.
            offs: the address of int32 [num_groups], the ends of groups; 0: no groups.
            layout: block size and order of the scales.
        """
        name_kernel(self.kernel, self.name)
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
        """Load this thread's 16 bytes of each of its rows, [vector, rows_per_thread]; zeros outside of x.

        In bands (128 rows) that lie entirely in x, all loads are issued at once, without a branch.
        """
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
        """Return a view of `vector` elements of a dtype in global memory. The address is aligned to the view's size."""
        align = self.vector * dtype.width // 8
        pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)
        return cute.make_tensor(pointer, cute.make_layout(self.vector))

    @cute.jit
    def _reach(self, x: cute.Tensor, band: Int32, offs: Int64, num_groups: Int32) -> Reach:
        """Return the row bounds (`Reach`) of a band of 128 rows. band: the band's first row.

        Group ends must be sorted. They are clamped to x's rows here.
        """
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
        """Find the scale bytes of this thread's rows: for each row, the byte of the block to which the thread's 16
        bytes belong. The bytes are written to `exponents`.

        Args:
            words: the thread's elements as 32-bit words, [WORDS, rows_per_thread].
            layout: says if blocks have 32 or 128 elements (`ScaleLayout.wide`).
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
        """Find the scale bytes of this thread's columns: for each column, the byte of the block to which the thread's
        elements belong. The bytes are written to `exponents`.

        A slot is here the set of threads that have the same rows. A block of a column spans several slots.

        Args:
            col_maxima: [WORDS, lanes, slots] in shared memory, the greatest magnitudes that each thread found.
            slot: the index of this thread's slot.
            layout: says if blocks have 32 or 128 elements (`ScaleLayout.wide`).
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
        """Write the scale bytes of this thread's rows (`exponents`) to shared memory (`row_scales`).

        A block is BLOCK neighbouring elements of a row, which share a scale. Several threads have elements of a block;
        one of them writes the scale. Blocks past x's last column get scale 0. Such blocks exist because swizzled scales
        are stored in whole atoms of 128 rows x 4 blocks.

        Args:
            origin: where the thread's elements and its tile begin in x.
            slot: the index of the set of threads that have this thread's rows.
        """
        thread, _, _ = cute.arch.thread_idx()
        lanes_per_block = BLOCK // self.vector
        if thread % lanes_per_block == 0:
            block = thread % self.lanes // lanes_per_block
            for i in cutlass.range_constexpr(self.rows_per_thread):
                inside = origin.column < x.shape[1]
                scale = Uint8(select(inside, exponents[i], Int32(0)))
                row_scales[block, slot * self.rows_per_thread + i] = scale

    def _row_exponent(self, exponents: cute.Tensor, row_scales: cute.Tensor, i: int) -> Int32:
        """Return the scale byte of the thread's i-th row.

        The byte comes from registers. If these are scarce (`spares_registers`), it comes from shared memory, where
        `_put_row_scales` wrote it.
        """
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
