"""Epilogues: the work on accumulators between the last MMA and the store.

Terms of this folder (a tile's columns are weight rows):

    part    a range of a tile's columns. A gated layer's tile has two parts of equal size, a (the activated half) and
            u (the linear half); other tiles have one
    slab    64 rows of a tile. A warpgroup has one or more slabs of a tile
    chunk   the columns of a slab that are stored at once
    slot    a buffer in shared memory through which a chunk is stored (slots.py)
    store   an object that stands for an output tensor (slots.py)

Of each slab, a thread has accumulators of two rows, 8 rows apart (fragments.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, const_expr

from .. import activation as act
from ..device.gmem import vector_at
from ..device.invariant import Invariant
from ..formats import DENSE, ROW, Format
from ..memory.weights import NO_GATE, GateRows
from ..quantize.scales import power_of_two
from ..schedule.groups import Groups
from ..schedule.work import WorkTile
from ..tiles import TileConfig
from .fragments import TileShare, registers, slab_of
from .shape import EpilogueShape, KernelEpilogue, SlotShape, Smem, SmemField
from .sizes import SLOTS, THREADS
from .slots import Slots

UPPER_HALF = -(1 << 16)


class OptionalInputs(NamedTuple):
    """Optional inputs of an epilogue, as device addresses; 0: not given.

    Attributes:
        bias: packed biases [E, columns].
        bias_table: int64 [E], the address of each expert's bias; takes precedence over `bias`.
        scale: float32 [T], a scale for each row. FC1 and grouped_dglu multiply act by it; grouped_mm multiplies its
            bias by it.
    """

    bias: Int64
    bias_table: Int64
    scale: Int64


class GlobalScales(NamedTuple):
    """Global scales of weights: float32 factors that multiply all block scales of an expert, or of one part of it (a or
    u).

    Attributes:
        address: the address of the factors.
        count: factors of an expert: 1, or 2 for the two parts of a gated layer; 0: all experts share one factor.
    """

    address: Int64
    count: Int32

    def of(self, expert: Int32, part: Int32 | int) -> Float32:
        """Return the factor of one part of an expert's weights.

        part: 0 for a (the activated half), or for all weight rows without a gate; 1 for u (the linear half).
        """
        return vector_at(Float32, self.address)[expert * self.count + (self.count >> 1) * part]


class Inputs(NamedTuple):
    """Run-time inputs of a GEMM's epilogue.

    Attributes:
        optional: biases and row scales.
        params: the activation and its parameters.
        bias_size: elements of an expert's bias, which is also the number of the expert's weight rows.
        w_scale: the address of the weights' scales; 0: weights have none. If the epilogue applies these scales
            (`Epilogue.scales_columns`), they are bytes [E, bias_size], one for each weight row; otherwise the mainloop
            reads them.
        out_scale: the address to which the scales of a quantised result are written.
        gate: the order of a gated layer's weight rows.
        global_scales: None if the weights' format has none.
    """

    optional: OptionalInputs
    params: act.ActivationParams
    bias_size: Int32
    w_scale: Int64 = Int64(0)
    out_scale: Int64 = Int64(0)
    gate: GateRows = NO_GATE
    global_scales: GlobalScales | None = None


class ColumnSmem(NamedTuple):
    """A warpgroup's shared memory for its tile's columns. A column is a weight row.

    Attributes:
        bias: the columns' biases.
        scales: the scales of the columns' weight rows; None if weight rows have no scale.
    """

    bias: cute.Tensor
    scales: Any = None  # cute.Tensor | None


class Prefetched(NamedTuple):
    """A thread's registers that `Epilogue.begin` starts to load before the mainloop.

    Attributes:
        row_scales: two row scales for each slab.
        column_scales: scale bytes of the columns t, t + THREADS, ... of the tile, which belong to weight rows; t is the
            thread's index in the warpgroup. None if weight rows have no scale.
    """

    row_scales: cute.Tensor
    column_scales: cute.Tensor | None


class WarpgroupState(Invariant):
    """State of one warpgroup's epilogue: its inputs, slots and shared memory.

    A kernel makes the state once; portable kernels make it twice for each tile.

    Attributes:
        lane: the thread's lane in its warp.
        row_in_slab: the first of the thread's two rows in a slab (64 rows); the second is 8 rows further.
    """

    def __init__(self, inputs: Any, slots: Slots, smem: ColumnSmem):
        self.inputs = inputs
        self.optional = inputs.optional
        self.params = inputs.params
        self.bias_size = inputs.bias_size
        self.slots = slots
        self.smem = smem
        self.lane = slots.thread % 32
        self.row_in_slab = slots.thread // 32 * slots.warp_step + self.lane // 4

    def has_bias(self) -> cutlass.Boolean:
        """Return True if the call has biases."""
        return (self.optional.bias | self.optional.bias_table) != 0


class Epilogue(KernelEpilogue):
    """Compile-time part of an epilogue; run-time values are in a `WarpgroupState`.

    A warpgroup calls `begin` before a tile's mainloop and `finish` after it. While MMAs run, `begin` fetches the tile's
    other inputs: two row scales for each thread and slab into registers, and the biases of the tile's columns into the
    warpgroup's shared memory.

    Attributes:
        scales_columns: True if each weight row has a scale, by which the epilogue multiplies its column.
        has_global_scales: True if the weights' format has global scales.
        slabs: slabs (64 rows) of a warpgroup in a tile.
        parts: parts of a tile: 2 for a gated layer (a, the activated half, and u, the linear half), else 1.
        part_n: columns of a part.
        layout: the order of the parts' weight rows in memory, a key of specs.LAYOUT_FORMS.
        cols: columns of a chunk, which fills a slot (a staging buffer in shared memory).
        chunks_per_slab: chunks that are stored for a slab, over all outputs.
    """

    def __init__(
        self, dtype: type[cutlass.Numeric], tile: TileConfig, parts: int = 1, layout: str = "concat",
        weights: Format = DENSE,
    ):  # fmt: skip
        self.tile = tile
        self.scales_columns = weights.block == ROW or bool(weights.row_binades)
        self.has_global_scales = weights.has_global
        self.tile_n = tile.n
        self.slabs = tile.slabs
        self.parts = parts
        self.part_n = tile.n // parts
        self.layout = layout
        self.cols = tile.chunk_columns
        self.dtype = dtype
        self.chunks_per_slab = self.part_n // self.cols

    @property
    def shape(self) -> EpilogueShape:
        """Shared memory and other properties of the epilogue, which the kernel reads."""
        smem: tuple[SmemField, ...] = (SmemField("bias", self.dtype, (self.tile_n,)),)
        if self.scales_columns:
            smem += (SmemField("scales", BFloat16, (self.tile_n,)),)
        slots = SlotShape(
            self.dtype, self.slabs * self.chunks_per_slab, row_bytes=self.cols * self.dtype.width // 8
        )  # fmt: skip
        return EpilogueShape(slots, smem, self.parts, self.layout)

    def store_columns(self, dtype: type[cutlass.Numeric]) -> int:
        """Return how many columns of an output of `dtype` fit into a slot (the shared-memory buffer for one store)."""
        return self.shape.slots.columns(dtype)

    def kernel_inputs(self, inputs: Any) -> Any:
        """Return the inputs as the kernel takes them, e.g. with TMA descriptors instead of tensors. This runs on the
        host."""
        return inputs

    def make_state(self, inputs: Any, groups: Groups, slots: Any, smem: Smem, ring: Any) -> Any:
        """Make the run-time state of one warpgroup's epilogue, an argument of `begin` and `finish`.
        `KernelEpilogue.make_state` describes the arguments."""
        return WarpgroupState(inputs, slots, ColumnSmem(**smem))

    def store_views(self, outputs: tuple, inputs: Any) -> tuple:
        """Return the views of the output tensors from which the stores are made. For example, a [T, 2I] tensor may
        become two halves."""
        return outputs

    def bias_index(self, state: WarpgroupState, column: Int32, part: Int32) -> Int32:
        """Return the index, in its expert's bias, of the element that is added to a column. It is also the index of the
        column's weight row. It is bias_size or more if the column has no weight row.

        Args:
            column: index of the column in its part of the whole output.
            part: 0 (a, the activated half, or all columns without a gate) or 1 (u, the linear half).
        """
        return column

    def finish_slab(
        self, state: Any, acc: cute.Tensor, scales: cute.Tensor, stores: tuple, work: WorkTile, row: Int32,
        first_slot: int,
    ) -> None:  # fmt: skip
        """Turn the accumulators of one slab (64 rows of the tile) into results, and start to store them.

        Args:
            acc: the thread's accumulators of the slab.
            scales: row scales of the thread's two rows.
            stores: for each output tensor, the object that stands for it (a store, slots.py).
            row: the slab's first row.
            first_slot: index of the slot (staging buffer in shared memory) of the slab's first chunk (the columns that
                are stored at once); further chunks take the next slots, around the ring.
        """
        raise NotImplementedError

    @cute.jit
    def finish(
        self, state: WarpgroupState, acc: cute.Tensor, prefetched: Prefetched, stores: tuple, work: WorkTile,
        share: TileShare,
    ):  # fmt: skip
        """Turn a warpgroup's accumulators of a tile into results, slab (64 rows) by slab, and start to store them.

        Args:
            acc: the thread's accumulators of all its slabs.
            prefetched: the thread's row scales and scale bytes of columns, which `begin` loaded.
            stores: for each output tensor, the object that stands for it (a store, slots.py).
            share: which slabs of the tile the warpgroup has.
        """
        scales = prefetched.row_scales
        if const_expr(self.scales_columns):
            self._put_column_scales(state, prefetched.column_scales)
        if const_expr(self.has_global_scales):
            self._scale_parts(state, acc, work)
        for slab in cutlass.range_constexpr(self.slabs):
            row = work.row + (share.first_slab + slab) * self.tile.slab_step
            first_slot = slab * self.chunks_per_slab % SLOTS
            values, two_scales = slab_of(acc, slab, self.slabs), registers(scales, 2 * slab, 2)
            # If warpgroups share a tile, a warpgroup without rows skips the work; no other warpgroup waits for it.
            if const_expr(self.tile.takes_turns):
                self.finish_slab(state, values, two_scales, stores, work, row, first_slot)
            elif row < work.group_end:
                self.finish_slab(state, values, two_scales, stores, work, row, first_slot)

    @cute.jit
    def begin(self, state: WarpgroupState, work: WorkTile, share: TileShare) -> Prefetched:
        """Copy the biases of the tile's columns into shared memory, and load this thread's scales into registers.

        Returns `Prefetched`: two row scales for each slab (1.0 where there are no row scales) and, if each weight row
        has a scale, the scale bytes of this thread's columns, by which `finish` multiplies. A column of the tile
        belongs to a weight row. Thread t of the warpgroup has columns t, t + THREADS, ...
        """
        scales = cute.make_rmem_tensor(2 * self.slabs, Float32)
        scales.fill(1.0)
        if state.optional.scale != 0:
            scale = vector_at(Float32, state.optional.scale)
            for i in cutlass.range_constexpr(2 * self.slabs):
                slab = share.first_slab + i // 2
                row = work.row + slab * self.tile.slab_step + state.row_in_slab + i % 2 * 8
                if row < work.group_end:
                    scales[i] = scale[row]
        if state.has_bias():
            self._fetch_bias(state, work)
        return Prefetched(scales, self._fetch_column_scales(state, work) if const_expr(self.scales_columns) else None)

    @cute.jit
    def _bias_of(self, state: Any, expert: Int32) -> Int64:
        """Return the address of an expert's bias."""
        address = state.optional.bias + Int64(expert) * state.bias_size * (self.dtype.width // 8)
        if state.optional.bias_table != 0:
            address = vector_at(Int64, state.optional.bias_table)[expert]
        return address

    @cute.jit
    def _fetch_bias(self, state: WarpgroupState, work: WorkTile):
        """Copy the biases of the tile's columns into shared memory."""
        bias = vector_at(self.dtype, self._bias_of(state, work.expert))
        for i in cutlass.range_constexpr((self.tile_n + THREADS - 1) // THREADS):
            column, element = self._element(state, work, i)
            if column < self.tile_n:
                # Columns without a weight row get zeros, since they count in the scale of a quantised result.
                if element < state.bias_size:
                    state.smem.bias[column] = bias[element]
                else:
                    state.smem.bias[column] = self.dtype(0)

    @cute.jit
    def _fetch_column_scales(self, state: WarpgroupState, work: WorkTile) -> cute.Tensor:
        """Return the scale bytes that this thread loads, of columns t, t + THREADS, ... of the tile. t is the thread's
        index in the warpgroup. Columns without a weight row have byte 0."""
        scales = vector_at(Uint8, state.inputs.w_scale + Int64(work.expert) * state.bias_size)
        count = (self.tile_n + THREADS - 1) // THREADS
        fetched = cute.make_rmem_tensor(count, Int32)
        for i in cutlass.range_constexpr(count):
            column, element = self._element(state, work, i)
            fetched[i] = Int32(0)
            if (column < self.tile_n) & (element < state.bias_size):
                fetched[i] = Int32(scales[element]) & 0xFF
        return fetched

    @cute.jit
    def _put_column_scales(self, state: WarpgroupState, fetched: cute.Tensor):
        """Write the scales that `_fetch_column_scales` loaded into shared memory, as bfloat16 numbers. Then wait for
        the warpgroup's other threads."""
        for i in cutlass.range_constexpr(cute.size(fetched)):
            column = state.slots.thread + i * THREADS
            if column < self.tile_n:
                state.smem.scales[column] = power_of_two(fetched[i]).to(BFloat16)
        state.slots.sync()

    def _element(self, state: WarpgroupState, work: WorkTile, i: int) -> tuple[Int32, Int32]:
        """Return the i-th column of which this thread fetches the bias and the scale, and the index of the column's
        weight row."""
        column = state.slots.thread + i * THREADS
        part, column_in_part = column // self.part_n, column % self.part_n
        return column, self.bias_index(state, work.n_tile * self.part_n + column_in_part, part)

    @cute.jit
    def _scale_columns(self, state: WarpgroupState, acc: cute.Tensor):
        """Multiply the accumulators of a slab (64 rows), in place, by the scales of the tile's columns. A column has
        the scale of its weight row."""
        if const_expr(self.scales_columns):
            values = registers(acc)
            pairs = cute.recast_tensor(state.smem.scales, Int32)
            for i in cutlass.range_constexpr(self.tile_n // 8):
                two = pairs[4 * i + state.lane % 4]
                for pair in cutlass.range_constexpr(2):
                    # A bfloat16 is the upper half of a float32.
                    bits = two << 16 if const_expr(pair == 0) else two & Int32(UPPER_HALF)
                    values[4 * i + pair] *= bits.bitcast(Float32)
                    values[4 * i + 2 + pair] *= bits.bitcast(Float32)

    @cute.jit
    def _scale_parts(self, state: WarpgroupState, acc: cute.Tensor, work: WorkTile):
        """Multiply a tile's accumulators, in place, by the global scales of their parts (a and u of a gated layer)."""
        for part in cutlass.range_constexpr(self.parts):
            scale = state.inputs.global_scales.of(work.expert, part)
            for slab in cutlass.range_constexpr(self.slabs):
                first = slab * (cute.size(acc) // self.slabs) + part * (self.part_n // 2)
                for i in cutlass.range_constexpr(self.part_n // 2):
                    acc[first + i] *= scale

    @cute.jit
    def _add_bias(self, state: WarpgroupState, acc: cute.Tensor, scale_upper_row: Float32, scale_lower_row: Float32):
        """Add the biases to the accumulators of a slab (64 rows): the bias of the column times the scale of the row.

        scale_upper_row, scale_lower_row: scales of the thread's first and second row of the slab.
        """
        if state.has_bias():
            state.slots.sync()
            values = registers(acc)
            for i in cutlass.range(self.tile_n // 8 * 2, unroll_full=True):
                group, pair = i // 2, i % 2
                bias = Float32(state.smem.bias[8 * group + 2 * (state.lane % 4) + pair])
                values[4 * group + pair] += bias * scale_upper_row
                values[4 * group + 2 + pair] += bias * scale_lower_row
