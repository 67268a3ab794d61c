"""Epilogues of a swapped tile: the rows of its accumulators are output columns, and the columns are output rows.

Element (row, column) of a slab's accumulators (`fragments`) is output column `row` and output row `column`. At register
4 j + v, thread t has output column 16 (t / 32) + (t % 32) / 4 + 8 (v / 2) of 64 and output row 8 j + 2 (t % 4) + v % 2.
A slab may hold equal numbers of rows of a and u (the activated and the linear half of a gated layer). Then v / 2 is the
half, and the output column is 8 (t / 32) + (t % 32) / 4 of 32. stmatrix transposes the results on their way into a
slot.

A thread has few output columns, so it keeps their biases in registers; it has many output rows, so it reads row scales
from shared memory.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import warp

from ... import activation as act
from ...device.gmem import vector_at
from ...device.invariant import Invariant
from ...device.select import select
from ...device.swizzle import swizzle_of
from ...epilogue.base import Epilogue
from ...epilogue.fragments import TileShare, registers
from ...epilogue.shape import EpilogueShape, SlotShape, Smem, SmemField
from ...epilogue.sizes import ROWS, SLOTS, THREADS
from ...epilogue.slots import narrowed
from ...formats import DENSE, OPERANDS, Format
from ...memory.weights import row_of
from ...quantize.scales import exponent_of, magnitude_of, multiplier_of, power_of_two
from ...schedule.groups import Groups
from ...schedule.work import WorkTile
from ...specs import GroupedGluSpec
from ...tiles import TileConfig
from ..budget import stage_k
from ..mainloop.decoders import decoder_of
from ..swapped_rows import SWIZZLE_CHUNK, SwappedRows
from .store import Slots

WARPS = THREADS // 32
# Rows and columns of a matrix of stmatrix. Here one stmatrix writes two matrices, or at most MATRICES.
MATRIX = 8
MATRICES = 4


class RowSmem(NamedTuple):
    """Small shared memory of a warpgroup's epilogue.

    Attributes:
        scales: float32 [tile.m], the row scales.
        exponents: uint8 [rows of a chunk, warps], the scale exponents that warps exchange; None: the output is not
            rounded.
        globals: float32 [parts], the global scale of each part; None: weights have no global scales.
    """

    scales: cute.Tensor
    exponents: Any = None  # cute.Tensor | None
    globals: Any = None  # cute.Tensor | None


class OfColumns(NamedTuple):
    """A thread's registers for its output columns. Each output column belongs to a weight row, or to two with a gate.

    Attributes:
        biases: float32, the bias of each of the thread's weight rows; zeros if the call has no biases.
        scales: float32, the scale of each of these rows; None: weight rows have no scale of their own.
    """

    biases: cute.Tensor
    scales: Any = None  # cute.Tensor | None


class SwappedSlots(Slots):
    """Staging slots that hold one chunk of the output each and are filled from transposed accumulators."""

    def _partition(self) -> None:
        """Compute the address to which a lane writes the 16 bytes of its matrix row: row lane % 8 of matrix lane / 8.

        One stmatrix writes a piece of the slot. Its matrices are numbered along columns first (1 or 2 matrices), then
        along rows.
        """
        rows, columns = (cute.size(self.smem, mode=[i]) for i in range(2))
        across = columns // (WARPS * MATRIX)
        matrices = min(MATRICES, rows // MATRIX * across)
        lane, matrix = self.thread % 32, self.thread % 32 // MATRIX
        column_chunk = self.thread // 32 * across + matrix % across
        row = matrix // across * MATRIX + lane % MATRIX
        row_bytes = columns * self.dtype.width // 8
        swizzled = (column_chunk ^ swizzle_of(lane % MATRIX, row_bytes)) * SWIZZLE_CHUNK
        self.first = Int32(self.smem.iterator.toint()) + row * row_bytes + swizzled
        self.slot_bytes = rows * row_bytes
        self.piece_bytes = matrices // across * MATRIX * row_bytes
        self.piece_values = 2 * matrices
        self.atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, matrices), self.dtype)

    @cute.jit
    def fill(self, values: cute.Tensor, slot: cutlass.Constexpr[int]):
        """Wait for a free slot, then write a chunk of registers in accumulator order, converted to the slot's dtype."""
        converted = narrowed(values, self.dtype)
        self.acquire()
        count = self.piece_values
        for piece in cutlass.range_constexpr(cute.size(values) // count):
            at = self.first + (slot * self.slot_bytes + piece * self.piece_bytes)
            pointer = cute.make_ptr(self.dtype, at, cute.AddressSpace.smem, assumed_align=16)
            target = cute.make_tensor(pointer, cute.make_layout((count, 1)))
            cute.copy(self.atom, cute.append_ones(registers(converted, count * piece, count), 2), target)

    @cute.jit
    def skip(self):
        """Commit an empty bulk group for a chunk that is not stored, so that `acquire`'s wait counts stay right."""
        if self.is_storing_warp:
            cute.arch.cp_async_bulk_commit_group()


class SwappedState(Invariant):
    """State of one MMA warpgroup's epilogue of a swapped tile, whose MMAs have weights as rows and x as columns.

    It has the kernel's inputs, the warpgroup's staging slots and small shared memory, and the thread's lane and warp.
    """

    def __init__(self, inputs: Any, slots: SwappedSlots, smem: RowSmem):
        self.inputs = inputs
        self.optional = inputs.optional
        self.global_scales = inputs.global_scales
        self.params = inputs.params
        self.bias_size = inputs.bias_size
        self.gate = inputs.gate
        self.slots = slots
        self.smem = smem
        self.lane = slots.thread % 32
        self.warp = slots.thread // 32

    def has_bias(self) -> cutlass.Boolean:
        return (self.optional.bias | self.optional.bias_table) != 0


class SwappedEpilogue(Epilogue):
    """Epilogue that stores results in chunks of at most 64 rows and 64 columns.

    If a slab holds rows of both a and u, a chunk has 32 columns. `begin` returns `OfColumns`. It also writes to shared
    memory the tile's row scales and, if the weights have global scales, each part's global scale times the power of two
    that decoded products lack (`rest_exponent` of decoding.scales).

    Args:
        dtype: element type of the output.
        parts: 2 if a tile has rows of both halves of a gated layer, else 1.
        layout: order of the weight rows, one of specs.LAYOUT_FORMS.
        weights: format of the weights.
    """

    slots_type: type[SwappedSlots] = SwappedSlots
    # True: a row scale multiplies the bias alone, so that it is read only if there is a bias.
    scales_bias = False
    rounds = False

    def __init__(
        self, dtype: type[cutlass.Numeric], tile: TileConfig, parts: int = 1, layout: str = "concat",
        weights: Format = DENSE,
    ):  # fmt: skip
        super().__init__(dtype, tile, parts, layout, weights)
        self.unit = 2.0 ** decoder_of(weights).scales.rest_exponent if self.has_global_scales else 1.0
        self.rows = SwappedRows(tile, parts)
        # If stages hold half a k-tile, slots hold half the rows, too, to make room for one more stage.
        self.chunk_rows = math.gcd(tile.m, ROWS) if stage_k(tile) == tile.k else ROWS // 2
        self.chunk_columns = self.rows.chunk_columns
        self.thread_columns = self.rows.thread_columns

    @property
    def column_chunks(self) -> int:
        """Chunks beside each other, along the columns of the warpgroup's output."""
        return self.rows.columns // self.chunk_columns

    @property
    def chunks(self) -> int:
        """Chunks that a warpgroup stores for a tile."""
        return self.column_chunks * (self.tile.m // self.chunk_rows)

    @property
    def num_slots(self) -> int:
        return min(SLOTS, self.chunks)

    @property
    def shape(self) -> EpilogueShape:
        row_bytes = self.chunk_columns * self.dtype.width // 8
        slots = SlotShape(self.dtype, self.chunks, self.num_slots, self.chunk_rows, row_bytes)
        smem: tuple[SmemField, ...] = (SmemField("scales", Float32, (self.tile.m,)),)
        if self.rounds:
            smem += (SmemField("exponents", Uint8, (self.chunk_rows, WARPS)),)
        if self.has_global_scales:
            smem += (SmemField("globals", Float32, (self.parts,)),)
        return EpilogueShape(slots, smem, self.parts, self.layout)

    def make_state(self, inputs: Any, groups: Groups, slots: Slots, smem: Smem, ring: Any) -> SwappedState:
        assert isinstance(slots, SwappedSlots)
        return SwappedState(inputs, slots, RowSmem(**smem))

    @cute.jit
    def begin(self, state: SwappedState, work: WorkTile, share: TileShare) -> OfColumns:
        biases = cute.make_rmem_tensor(self.rows.count, Float32)
        biases.fill(0.0)
        if state.has_bias():
            self._fetch_bias(state, biases, work, share)
        of_columns = OfColumns(biases, self._weight_scales(state, work, share) if self.scales_columns else None)
        address = state.optional.scale
        if const_expr(self.scales_bias):
            address = select(state.has_bias(), address, Int64(0))
        for i in cutlass.range_constexpr((self.tile.m + THREADS - 1) // THREADS):
            row = state.slots.thread + i * THREADS
            scale = Float32(1.0)
            if (address != 0) & (work.row + row < work.group_end):
                scale = vector_at(Float32, address)[work.row + row]
            if row < self.tile.m:
                state.smem.scales[row] = scale
        if const_expr(self.has_global_scales):
            part = state.slots.thread
            if part < self.parts:
                state.smem.globals[part] = state.global_scales.of(work.expert, part) * self.unit
        return of_columns

    def _weight_row(self, state: SwappedState, work: WorkTile, share: TileShare, i: int) -> tuple[Int32, Boolean]:
        """Return the index, in the expert, of the thread's i-th weight row, and a boolean. True: the row exists;
        False: it is past the expert's last weight row."""
        column = work.n_tile * self.part_n + self.rows.column(i, share.first_slab, state.slots.thread)
        half = state.bias_size // self.parts
        return row_of(self.layout, state.gate, column, self.rows.part(i), half), column < half

    @cute.jit
    def _fetch_bias(self, state: SwappedState, biases: cute.Tensor, work: WorkTile, share: TileShare):
        bias = vector_at(self.dtype, self._bias_of(state, work.expert))
        for i in cutlass.range_constexpr(self.rows.count):
            row, is_there = self._weight_row(state, work, share, i)
            if is_there:
                biases[i] = Float32(bias[row])

    @cute.jit
    def _weight_scales(self, state: SwappedState, work: WorkTile, share: TileShare) -> cute.Tensor:
        """Load the scales of the thread's weight rows."""
        bytes_ = vector_at(Uint8, state.inputs.w_scale + Int64(work.expert) * state.bias_size)
        scales = cute.make_rmem_tensor(self.rows.count, Float32)
        for i in cutlass.range_constexpr(self.rows.count):
            row, is_there = self._weight_row(state, work, share, i)
            scales[i] = Float32(0.0)
            if is_there:
                scales[i] = power_of_two(Int32(bytes_[row]) & 0xFF)
        return scales

    @cute.jit
    def finish(
        self, state: SwappedState, acc: cute.Tensor, of_columns: OfColumns, stores: tuple, work: WorkTile,
        share: TileShare,
    ):  # fmt: skip
        first_column = work.n_tile * self.part_n + self.rows.first_column(share.first_slab)
        columns = state.bias_size // self.parts
        size = self.chunk_rows, self.chunk_columns
        state.slots.sync()
        for i in cutlass.range_constexpr(self.chunks):
            row, column = i // self.column_chunks * size[0], first_column + i % self.column_chunks * size[1]
            if (work.row + row < work.group_end) & (column < columns):
                values = self._outputs(state, acc, of_columns, i // self.column_chunks, i % self.column_chunks)
                if const_expr(self.rounds):
                    self._round(state, values, work, work.row + row, column)
                tile = stores[0].tile(work, work.row + row, column, rows=size[0], cols=size[1])
                state.slots.put(values, stores[0], tile, i % self.num_slots)
            else:
                state.slots.skip()

    @cute.jit
    def _outputs(
        self, state: SwappedState, acc: cute.Tensor, of_columns: OfColumns, row_chunk: cutlass.Constexpr[int],
        column_chunk: cutlass.Constexpr[int],
    ):  # fmt: skip
        """Return a thread's float32 results of one chunk (the results that are stored at once): for each 8 output rows,
        [thread_columns, 2 rows], where thread_columns are the thread's output columns of the chunk.

        Args:
            acc: the thread's accumulators.
            of_columns: biases and scales of the thread's weight rows, which `begin` loaded.
            row_chunk: index of the chunk along output rows.
            column_chunk: index of the chunk along the warpgroup's output columns.
        """
        slab_regs, count = cute.size(acc) // self.slabs, self.thread_columns
        sums = tuple(cute.make_rmem_tensor(self.chunk_rows // 4 * count, Float32) for _ in range(self.parts))
        for i in cutlass.range_constexpr(cute.size(sums[0])):
            eight = row_chunk * (self.chunk_rows // 8) + i // (2 * count)
            for part in cutlass.range_constexpr(self.parts):
                row = count * column_chunk + i // 2 % count + part * self.rows.part_count
                total = registers(acc, row // 2 * slab_regs)[4 * eight + 2 * (row % 2) + i % 2]
                if const_expr(self.has_global_scales):
                    total *= state.smem.globals[part]
                if const_expr(self.scales_columns):
                    total *= of_columns.scales[row]
                bias = of_columns.biases[row]
                if const_expr(self.scales_bias):
                    bias *= self._row_scale(state, eight, i)
                sums[part][i] = total + bias
        outputs = self._activated(state, sums)
        if const_expr(not self.scales_bias):
            for i in cutlass.range_constexpr(cute.size(outputs)):
                outputs[i] *= self._row_scale(state, row_chunk * (self.chunk_rows // 8) + i // (2 * count), i)
        return outputs

    def _row_scale(self, state: SwappedState, eight: int, i: int) -> Float32:
        """Return the row scale of the thread's i-th result in output rows 8 * eight to 8 * eight + 7 of the tile."""
        return state.smem.scales[8 * eight + 2 * (state.lane % 4) + i % 2]

    def _activated(self, state: SwappedState, sums: tuple) -> cute.Tensor:
        """Compute results, without row scales. sums: for each part of the tile (a and u of a gated layer, else one), a
        tensor of sums, bias included."""
        return sums[0]

    def _round(self, state: SwappedState, values: cute.Tensor, work: WorkTile, row: Int32, first_column: Int32) -> None:
        """Round a chunk of results, in place, to values of another format; called if `rounds` is true.

        Args:
            values: the thread's results of the chunk.
            row, first_column: where the chunk begins in the output.
        """


class SwappedLinearEpilogue(SwappedEpilogue):
    """Epilogue of a linear layer: y = acc + bias * scale[row]."""

    scales_bias = True


class SwappedActivationEpilogue(SwappedEpilogue):
    """Epilogue of FC1: act = activation(acc + bias) * scale[row].

    If the format of `spec.operands` asks for it, act is rounded to values of MXFP8, which has blocks of 32 columns. A
    thread holds both parts (a, u) of each of its outputs.
    """

    def __init__(self, dtype: type[cutlass.Numeric], spec: GroupedGluSpec):
        self.spec = spec
        self.rounds = OPERANDS[spec.operands].act.holds is not None
        super().__init__(dtype, spec.tile, 2 if spec.gated else 1, spec.glu_layout, OPERANDS[spec.operands].w)

    def _activated(self, state: SwappedState, sums: tuple) -> cute.Tensor:
        return act.activate(self.spec.activation, sums, state.params)

    @property
    def block_warps(self) -> int:
        """Number of warps that share a block of columns; all of a thread's columns of a chunk lie in one block."""
        return WARPS // self.thread_columns

    @cute.jit
    def _round(self, state: SwappedState, values: cute.Tensor, work: WorkTile, row: Int32, first_column: Int32):
        """Round results, in place, to the values that quantising them from float32 to MXFP8 and back gives.

        values: the thread's float32 results of one chunk.
        """
        exponents = self._scale(state, values)
        rounded = cute.make_rmem_tensor(cute.size(values), Float8E4M3FN)
        rounded.store(values.load().to(Float8E4M3FN))
        values.store(rounded.load().to(Float32))
        for i in cutlass.range_constexpr(cute.size(values)):
            values[i] = values[i] * power_of_two(exponents[i // (2 * self.thread_columns) * 2 + i % 2])

    @cute.jit
    def _scale(self, state: SwappedState, values: cute.Tensor) -> cute.Tensor:
        """Divide a chunk of results, in place, by the scales of their blocks. Return the scales' exponents.

        A thread has two rows in every 8 output rows: exponents[i] is the exponent of the scale of row i % 2 in the
        (i / 2)-th 8 rows.
        """
        count = self.thread_columns
        exponents = cute.make_rmem_tensor(cute.size(values) // count, Int32)
        for i in cutlass.range_constexpr(cute.size(exponents)):
            amax = Int32(0)
            for column in cutlass.range_constexpr(count):
                amax = cutlass.max(amax, magnitude_of(values[i // 2 * 2 * count + 2 * column + i % 2]))
            for log_distance in cutlass.range_constexpr(2, 5):
                amax = cutlass.max(amax, cute.arch.shuffle_sync_bfly(amax, 1 << log_distance))
            exponents[i] = exponent_of(amax.bitcast(Float32))
        # Warps exchange exponents rather than maxima: the larger maximum has the larger exponent.
        self._exchange(state, exponents)
        for i in cutlass.range_constexpr(cute.size(values)):
            values[i] = values[i] * multiplier_of(exponents[i // (2 * count) * 2 + i % 2])
        return exponents

    @cute.jit
    def _exchange(self, state: SwappedState, exponents: cute.Tensor):
        """Replace the exponent of each of the thread's rows by the greatest among the warps that share the block."""
        for i in cutlass.range_constexpr(cute.size(exponents)):
            if state.lane < 4:
                row = i // 2 * 8 + 2 * state.lane + i % 2
                state.smem.exponents[row, state.warp] = exponents[i].to(Uint8)
        state.slots.sync()
        for i in cutlass.range_constexpr(cute.size(exponents)):
            row = i // 2 * 8 + 2 * (state.lane % 4) + i % 2
            for other in cutlass.range_constexpr(1, self.block_warps):
                exponent = Int32(state.smem.exponents[row, state.warp ^ other]) & 0xFF
                exponents[i] = cutlass.max(exponents[i], exponent)
