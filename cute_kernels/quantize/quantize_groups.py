"""MXFP8 quantisation by groups: rows [T, K] to E4M3, with a scale (a power of two) for each 32 rows of a column.

A group's first block begins at the group's first row, wherever the group begins; its last block may be shorter. So an
expert's numbers depend only on its own rows.

Scales lie in bands of 128 rows (memory/scale_bands.py), and are 0 after a group's last row. A place is the room that
memory has for one band's scales of 128 columns; there are more places than bands. A CTA handles one place. It quantises
the band at this place as the quantiser by columns does (quantize_mxfp8.py), or ends at once if no group has a band
there. Rows of x may be read by index.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils
from cutlass import Int32, Int64, Uint8

from ..device.gmem import vector_at
from ..device.naming import name_kernel
from ..device.select import select
from ..device.target import let_next_begin
from ..device.warps import WARP, last_lane
from ..memory.scale_bands import BAND_ROWS, first_place, num_places
from ..schedule.groups import Groups, clamp, group_rows
from ..specs import QuantizeMxfp8Spec
from ..tracing import DTYPES, Traced, traced
from .mxfp8 import QuantizeMxfp8
from .scale_stores import BLOCK, BLOCKS, ScaleGrid
from .tile import SMEM_PERCENT, WORDS, Origin, Outputs, Reach, ScaleLayout, read_once


class Band(NamedTuple):
    """A band: up to 128 rows of one group, whose scales lie in one place (memory/scale_bands.py). Both numbers are 0 if
    there is no band.

    Attributes:
        row: the band's first row.
        end: the row after the last row of the band's group.
    """

    row: Int32
    end: Int32


class QuantizeGroups(QuantizeMxfp8):
    """Kernel that quantises x to E4M3 with an E8M0 scale for each 32 rows of a column, group by group.

    A group's first block begins at the group's first row. `QuantizeMxfp8` says which x the kernel takes.
    """

    def __init__(self, name: str, dtype: type[cutlass.Numeric]):
        super().__init__(name, dtype, "col")

    @cute.jit
    def launch_groups(
        self, x: cute.Tensor, data: cute.Tensor, scale: Int64, rows: Int64, groups: Groups, stream: cuda.CUstream
    ):  # fmt: skip
        """Launch a CTA for each pair of a place that a band may have and a range of 128 columns.

        rows: the address of int32 [T], the index of the row of x for each row of the result; 0: rows of x lie in order.
        """
        name_kernel(self.kernel_of_groups, self.name)
        tiles = num_places(groups.rows, groups.count) * self._tiles_along_k(x)
        self.kernel_of_groups(x, data, scale, rows, groups).launch(
            grid=(tiles, 1, 1), block=(self.threads, 1, 1),
            min_blocks_per_mp=self.min_blocks, preferred_smem_carveout=SMEM_PERCENT, stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel_of_groups(self, x: cute.Tensor, data: cute.Tensor, scale: Int64, rows: Int64, groups: Groups):
        let_next_begin()
        thread, _, _ = cute.arch.thread_idx()
        tile, _, _ = cute.arch.block_idx()
        tiles_along_k = self._tiles_along_k(x)
        place = tile // tiles_along_k
        col0 = tile % tiles_along_k * self.columns
        band = self._find(groups, place)
        if band.row < band.end:
            row = band.row + thread // self.lanes * self.rows_per_thread
            origin = Origin(row, col0 + thread % self.lanes * self.vector, band.row, place * BAND_ROWS, col0)
            values = self._load_rows(x, rows, band.end, origin)
            self._quantize_band(x, data, scale, values, band.end, origin, num_places(groups.rows, groups.count))

    @cute.jit
    def _find(self, groups: Groups, place: Int32) -> Band:
        """Return the band at a place (`scale_bands.first_place`). All threads call this. Each lane of a warp tests one
        group at a time."""
        row, end, before = Int32(0), Int32(0), Int32(0)
        for base in cutlass.range(0, groups.count, WARP, unroll=1):
            present, first, last = group_rows(groups, base, before)
            before = last_lane(last)
            at = first + (place - first_place(first, base + cute.arch.lane_idx())) * BAND_ROWS
            is_here = present & (at >= first) & (at < last)
            row = cutlass.max(row, Int32(cute.arch.warp_redux_sync(select(is_here, at, Int32(0)), "max")))
            end = cutlass.max(end, Int32(cute.arch.warp_redux_sync(select(is_here, last, Int32(0)), "max")))
        return Band(row, end)

    @cute.jit
    def _load_rows(self, x: cute.Tensor, rows: Int64, end: Int32, origin: Origin) -> cute.Tensor:
        """Load the thread's vector of each of its rows of x, [vector, rows_per_thread]. All loads are issued at once.

        Args:
            rows: the address of int32 [T], the index of the row of x for each row of the result; 0: rows lie in order.
            end: the row after the group's last row. Rows from `end` on are zeros (the group's last row is read for
                them, and then replaced).
            origin: where the thread's elements begin in the result.
        """
        values = cute.make_rmem_tensor((self.vector, self.rows_per_thread), self.dtype)
        values.fill(0.0)
        sources = cute.make_rmem_tensor(self.rows_per_thread, Int32)
        for i in cutlass.range_constexpr(self.rows_per_thread):
            sources[i] = cutlass.min(origin.row + i, end - 1)
        if rows != 0:
            for i in cutlass.range_constexpr(self.rows_per_thread):
                sources[i] = clamp(vector_at(Int32, rows)[sources[i]], Int32(0), Int32(x.shape[0] - 1))
        atom, row_bytes = read_once(self.dtype), x.stride[0] * (self.dtype.width // 8)
        first = x.iterator.toint() + Int64(origin.column) * (self.dtype.width // 8)
        if origin.column < x.shape[1]:
            for i in cutlass.range_constexpr(self.rows_per_thread):
                at = first + Int64(sources[i]) * row_bytes
                cute.copy(atom, self._vector_at(self.dtype, at), values[None, i])
        words = cute.recast_tensor(values, Int32)
        for i in cutlass.range_constexpr(self.rows_per_thread):
            for j in cutlass.range_constexpr(WORDS):
                words[j, i] = select(origin.row + i < end, words[j, i], Int32(0))
        return values

    @cute.jit
    def _quantize_band(
        self, x: cute.Tensor, data: cute.Tensor, scale: Int64, values: cute.Tensor, end: Int32, origin: Origin,
        places: Int32,
    ):  # fmt: skip
        """Quantise a band, and store its elements and its atoms of 128 x 4 scales.

        Args:
            data, scale: the result's elements [T, K], and the address of its scales.
            values: the thread's elements (`_load_rows`).
            end: the row after the group's last row.
            origin: where the thread's elements begin in the result. Its `row0` is instead the place of the band in the
                scales' memory, times 128.
            places: number of places for bands in the scales' memory.
        """
        thread, _, _ = cute.arch.thread_idx()
        slot = thread // self.lanes
        smem = cutlass.utils.SmemAllocator()
        scales = smem.allocate_tensor(Uint8, cute.make_layout((BLOCKS, self.columns)), 16)
        maxima = smem.allocate_tensor(Int32, cute.make_layout((WORDS, self.lanes, self.slots)), 16)
        exponents = cute.make_rmem_tensor(self.vector, Int32)
        self._put_column_maxima(cute.recast_tensor(values, Int32), maxima, slot)
        cute.arch.sync_threads()
        self._column_exponents(maxima, slot, ScaleLayout(Int32(0), Int32(1)), exponents)
        self._put_column_scales(data, exponents, scales, origin, slot)
        outputs = Outputs(Int64(0), Int64(0), data.iterator.toint(), scale)
        self._store_data(data, outputs, values, exponents, scales, exponents, Reach(end, end), origin)
        cute.arch.sync_threads()
        width = Int32(x.shape[1])
        block0, blocks = origin.row0 // BLOCK, places * BLOCKS
        self.stores.atoms(scales, ScaleGrid(scale, origin.col0, width, width, block0, blocks))


class Quantize:
    """Host function that launches `QuantizeGroups`. `signatures._quantize_groups` describes its arguments: tensors,
    then addresses and numbers."""

    def __init__(self, spec: QuantizeMxfp8Spec):
        self.quantize = QuantizeGroups(spec.name, DTYPES[spec.dtype])

    @cute.jit
    def __call__(
        self, x: cute.Tensor, data: cute.Tensor, scale: Int64, rows: Int64, groups: Int64, group_form: Int32,
        num_groups: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if data.shape[0] > 0:
            of_call = Groups(groups, group_form, num_groups, Int64(0), Int32(data.shape[0]))
            self.quantize.launch_groups(x, data, scale, rows, of_call, stream)


def trace(spec: QuantizeMxfp8Spec) -> Traced:
    return traced(spec, Quantize(spec))
