"""Epilogues of a swapped tile: accumulators whose rows are columns of the output, and whose columns are its rows.

What stands at (row, column) of a slab's accumulators in epilogue.py is here output column `row`, row `column`: thread t
has columns 16 (t / 32) + (t % 32) / 4 + 8 (v / 2) of 64 and rows 8 j + 2 (t % 4) + v % 2 at register 4 j + v. stmatrix
transposes them on their way into a slot. So a bias is a register and a row scale comes from shared memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import warp

from .. import activation as act
from ..gmem import vector_at
from ..invariant import Invariant
from ..specs import GroupedGluSpec, TileConfig
from .decoding_mainloop import ROW_HALVES, SWIZZLE_CHUNK, SwappedRows
from .epilogue import Epilogue, TileShare, registers
from .quantize_mxfp8 import exponent_of, multiplier_of
from .scales import power_of_two
from .store import ROW_BYTES, ROWS, SLOTS, Slots, narrowed
from .tile_scheduler import Groups, WorkTile
from .turns import THREADS
from .weights import row_of

WARPS = THREADS // 32
# Rows and columns of one stmatrix of four 8 x 8 matrices.
PIECE = 16
ABS_MASK = 0x7FFFFFFF


class RowSmem(NamedTuple):
    """A warpgroup's shared memory: a float32 for each row of the tile, and a byte for each of its warps and rows of a
    chunk where the output is rounded."""

    scales: cute.Tensor
    exponents: Any  # cute.Tensor | None


class SwappedSlots(Slots):
    """Slots of as many rows as a chunk has, filled from transposed accumulators."""

    def _partition(self) -> None:
        """A lane's 16 bytes of a piece: row lane % 8 of matrix lane / 8, which are two of columns by two of rows."""
        lane, matrix = self.thread % 32, self.thread % 32 // 8
        column_chunk = self.thread // 32 * 2 + matrix % 2
        row = matrix // 2 * 8 + lane % 8
        # A slot's rows are 128 bytes, in which chunk c of 16 bytes lies at c ^ (row % 8).
        swizzled = (column_chunk ^ (lane % 8)) * SWIZZLE_CHUNK
        self.first = Int32(self.smem.iterator.toint()) + row * ROW_BYTES + swizzled
        self.slot_bytes = cute.size(self.smem, mode=[0]) * ROW_BYTES
        self.atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), self.dtype)

    @cute.jit
    def fill(self, values: cute.Tensor, slot: cutlass.Constexpr[int]):
        """Write a chunk of registers, in the order of accumulators."""
        converted = narrowed(values, self.dtype)
        self.acquire()
        for piece in cutlass.range_constexpr(cute.size(values) // 8):
            at = self.first + (slot * self.slot_bytes + piece * PIECE * ROW_BYTES)
            pointer = cute.make_ptr(self.dtype, at, cute.AddressSpace.smem, assumed_align=16)
            target = cute.make_tensor(pointer, cute.make_layout((8, 1)))
            cute.copy(self.atom, cute.append_ones(registers(converted, 8 * piece, 8), 2), target)

    @cute.jit
    def skip(self):
        """Count a chunk that is not stored, so that others find their slots free when they should be."""
        if self.is_storing_warp:
            cute.arch.cp_async_bulk_commit_group()


class SwappedState(Invariant):
    """What one MMA warpgroup's epilogue holds while the kernel runs."""

    def __init__(self, inputs: Any, slots: SwappedSlots, smem: RowSmem):
        self.addends = inputs.addends
        self.params = inputs.params
        self.bias_size = inputs.bias_size
        self.slots = slots
        self.smem = smem
        self.lane = slots.thread % 32
        self.warp = slots.thread // 32

    def has_bias(self) -> cutlass.Boolean:
        return (self.addends.bias | self.addends.bias_table) != 0


class SwappedEpilogue(Epilogue):
    """Chunks of 64 columns and at most 64 rows: a slab, or a and u together, makes as many as the tile has rows for.

    `begin` returns a thread's biases, two a slab, and puts the tile's row scales into shared memory.
    """

    # Whether a row scale multiplies the bias alone, and counts only where there is one.
    scales_bias = False
    rounds = False

    def __init__(self, dtype: type[cutlass.Numeric], tile: TileConfig, parts: int = 1, layout: str = "concat"):
        super().__init__(dtype, tile, parts, layout)
        self.chunk_rows = min(tile.m, ROWS)
        self.row_chunks = tile.m // self.chunk_rows
        self.output_slabs = self.slabs // parts
        self.chunks = self.output_slabs * self.row_chunks
        self.num_slots = min(SLOTS, self.chunks)

    def make_state(self, inputs: Any, groups: Groups, slots: Slots, smem: Any, ring: Any) -> Any:
        assert isinstance(slots, SwappedSlots)
        return SwappedState(inputs, slots, smem)

    @cute.jit
    def begin(self, state: SwappedState, work: WorkTile, share: TileShare) -> cute.Tensor:
        biases = cute.make_rmem_tensor(ROW_HALVES * self.slabs, Float32)
        biases.fill(0.0)
        if state.has_bias():
            self._fetch_bias(state, biases, work, share)
        address = state.addends.scale
        if const_expr(self.scales_bias):
            address = Int64(cutlass.select_(state.has_bias(), address, Int64(0)))
        for i in cutlass.range_constexpr((self.tile.m + THREADS - 1) // THREADS):
            row = state.slots.thread + i * THREADS
            scale = Float32(1.0)
            if (address != 0) & (work.row + row < work.group_end):
                scale = vector_at(Float32, address)[work.row + row]
            if row < self.tile.m:
                state.smem.scales[row] = scale
        return biases

    @cute.jit
    def _fetch_bias(self, state: SwappedState, biases: cute.Tensor, work: WorkTile, share: TileShare):
        address = state.addends.bias + Int64(work.expert) * state.bias_size * (self.dtype.width // 8)
        if state.addends.bias_table != 0:
            address = vector_at(Int64, state.addends.bias_table)[work.expert]
        bias = vector_at(self.dtype, address)
        rows = SwappedRows(self.tile, self.parts, share.first_slab, state.slots.thread)
        half = state.bias_size // self.parts
        for i in cutlass.range_constexpr(ROW_HALVES * self.slabs):
            slab = i // ROW_HALVES
            column = work.n_tile * self.part_n + rows.column(slab) + rows.row_in_slab + i % ROW_HALVES * 8
            if column < half:
                biases[i] = Float32(bias[row_of(self.layout, column, rows.part(slab), half)])

    @cute.jit
    def finish(
        self, state: SwappedState, acc: cute.Tensor, biases: cute.Tensor, stores: tuple, work: WorkTile,
        share: TileShare,
    ):  # fmt: skip
        rows = SwappedRows(self.tile, self.parts, share.first_slab, state.slots.thread)
        column = work.n_tile * self.part_n + rows.column(0)
        columns = state.bias_size // self.parts
        state.slots.sync()
        for chunk in cutlass.range_constexpr(self.row_chunks):
            for output in cutlass.range_constexpr(self.output_slabs):
                row = chunk * self.chunk_rows
                if (work.row + row < work.group_end) & (column + output * ROWS < columns):
                    values = self._outputs(state, acc, biases, output, chunk)
                    if const_expr(self.rounds):
                        self._round(state, values)
                    tile = stores[0].tile(work, work.row + row, column + output * ROWS, rows=self.chunk_rows)
                    state.slots.put(values, stores[0], tile, (chunk * self.output_slabs + output) % self.num_slots)
                else:
                    state.slots.skip()

    @cute.jit
    def _outputs(
        self, state: SwappedState, acc: cute.Tensor, biases: cute.Tensor, output: cutlass.Constexpr[int],
        chunk: cutlass.Constexpr[int],
    ):  # fmt: skip
        """A chunk of results, float32."""
        slab_regs = cute.size(acc) // self.slabs
        outputs = cute.make_rmem_tensor(slab_regs // self.row_chunks, Float32)
        for i in cutlass.range_constexpr(cute.size(outputs)):
            index = chunk * cute.size(outputs) + i
            row = index // 4 * 8 + 2 * (state.lane % 4) + index % 2
            # Of the slabs that this output is made of, which are `output_slabs` apart.
            sums = [registers(acc, slab * slab_regs)[index] for slab in range(output, self.slabs, self.output_slabs)]
            first = ROW_HALVES * output + index // 2 % ROW_HALVES
            addends = [biases[first + ROW_HALVES * self.output_slabs * part] for part in range(self.parts)]
            outputs[i] = self._output(state, sums, addends, state.smem.scales[row])
        return outputs

    def _output(self, state: SwappedState, sums: list[Float32], biases: list[Float32], scale: Float32) -> Float32:
        """One result, of an accumulator and a bias for each part, and its row's scale."""
        raise NotImplementedError

    def _round(self, state: SwappedState, values: cute.Tensor) -> None:
        """Round a chunk of results to numbers of another format."""


class SwappedLinearEpilogue(SwappedEpilogue):
    """y = acc + bias * scale[row]."""

    scales_bias = True

    def _output(self, state: SwappedState, sums: list[Float32], biases: list[Float32], scale: Float32) -> Float32:
        return sums[0] + biases[0] * scale


class SwappedActivationEpilogue(SwappedEpilogue):
    """act = activation(acc + bias) * scale[row]; of "mxfp8_exact", rounded to MXFP8 values, 32 columns a block.

    Gated, the two slabs are a and u: a thread holds both halves of each of its outputs.
    """

    def __init__(self, dtype: type[cutlass.Numeric], spec: GroupedGluSpec):
        self.spec = spec
        self.rounds = spec.operands == "mxfp8_exact"
        super().__init__(dtype, spec.tile, 2 if spec.gated else 1, spec.glu_layout)

    def _output(self, state: SwappedState, sums: list[Float32], biases: list[Float32], scale: Float32) -> Float32:
        values = [total + bias for total, bias in zip(sums, biases, strict=True)]
        if self.spec.gated:
            return act.GATED[self.spec.activation](values[0], values[1], state.params) * scale
        return act.UNGATED[self.spec.activation](values[0]) * scale

    @cute.jit
    def _round(self, state: SwappedState, values: cute.Tensor):
        """To what quantising to MXFP8 and back gives, from float32. A block of 32 columns is that of two warps."""
        exponents = cute.make_rmem_tensor(cute.size(values) // 2, Int32)
        for i in cutlass.range_constexpr(cute.size(exponents)):
            # Magnitudes as integers: a NaN is the greatest of them.
            upper, lower = (values[i // 2 * 4 + i % 2 + 2 * half].bitcast(Int32) & ABS_MASK for half in range(2))
            amax = cutlass.max(upper, lower)
            for log_distance in cutlass.range_constexpr(2, 5):
                amax = cutlass.max(amax, cute.arch.shuffle_sync_bfly(amax, 1 << log_distance))
            exponents[i] = exponent_of(amax.bitcast(Float32))
        # The greater maximum has the greater exponent.
        self._exchange(state, exponents)
        for i in cutlass.range_constexpr(cute.size(values)):
            values[i] = values[i] * multiplier_of(exponents[i // 4 * 2 + i % 2])
        rounded = cute.make_rmem_tensor(cute.size(values), Float8E4M3FN)
        rounded.store(values.load().to(Float8E4M3FN))
        values.store(rounded.load().to(Float32))
        for i in cutlass.range_constexpr(cute.size(values)):
            values[i] = values[i] * power_of_two(exponents[i // 4 * 2 + i % 2])

    @cute.jit
    def _exchange(self, state: SwappedState, exponents: cute.Tensor):
        """The greater of each row's exponent and that of the warp which has the other 16 columns of the block."""
        for i in cutlass.range_constexpr(cute.size(exponents)):
            if state.lane < 4:
                row = i // 2 * 8 + 2 * state.lane + i % 2
                state.smem.exponents[row, state.warp] = exponents[i].to(Uint8)
        state.slots.sync()
        for i in cutlass.range_constexpr(cute.size(exponents)):
            row = i // 2 * 8 + 2 * (state.lane % 4) + i % 2
            other = Int32(state.smem.exponents[row, state.warp ^ 1]) & 0xFF
            exponents[i] = cutlass.max(exponents[i], other)
