"""Epilogue of a fused FC1 in MXFP8: stores the activation as E4M3 with a scale for each block of a row, for FC2.

The activation is quantised from float32, by the rules of docs/mxfp8.md. A block is the columns of a row that share a
scale, and a tile holds whole blocks. In registers, four neighbouring lanes hold a block, a quarter each; each lane has
elements of two rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, const_expr

from ...device.gmem import vector_at
from ...epilogue.activation import ActivationEpilogue
from ...epilogue.base import ColumnSmem, WarpgroupState
from ...epilogue.fragments import chunk_of
from ...epilogue.shape import EpilogueShape, Smem
from ...epilogue.sizes import SLOTS
from ...formats import OPERANDS, Format
from ...quantize.scales import exponent_of, magnitude_of, multiplier_of
from ...schedule.groups import Groups
from ...schedule.work import WorkTile
from ...specs import GroupedGluSpec
from .store import Slots


class QuantizingState(WarpgroupState):
    """State of a warpgroup's quantising epilogue.

    Attributes:
        act_slots: the staging slots (64 rows of 128 bytes each in shared memory), viewed as slots of E4M3 elements.
        pitch: number of scales of a row of the activation.
    """

    def __init__(self, inputs, slots: Slots, smem: ColumnSmem, act_slots: Slots, pitch: Int32):
        super().__init__(inputs, slots, smem)
        self.act_slots = act_slots
        self.pitch = pitch


class QuantizingEpilogue(ActivationEpilogue):
    """Epilogue that stores the activation act in E4M3 and, if the spec saves it, the preactivation in 16 bits.

    Attributes:
        act_cols: columns of the activation that a slot holds.
        block_cols: columns that share a scale.
    """

    act_cols = 128

    def __init__(self, dtype: type[cutlass.Numeric], spec: GroupedGluSpec):
        super().__init__(dtype, spec)
        self.act = OPERANDS[spec.operands].act
        self.block_cols = self.act.block
        self.act_chunks = self.act_n // self.act_cols
        self.chunks_per_slab = self.preact_chunks + self.act_chunks

    @property
    def shape(self) -> EpilogueShape:
        shape = super().shape
        in_e4m3 = replace(shape.slots, dtype=Float8E4M3FN, row_bytes=self.act_cols)
        return shape if self.spec.save_preact else replace(shape, slots=in_e4m3)

    def store_columns(self, dtype: type[cutlass.Numeric]) -> int:
        return self.act_cols if dtype is Float8E4M3FN else super().store_columns(dtype)

    def make_state(self, inputs, groups: Groups, slots: Slots, smem: Smem, ring) -> QuantizingState:
        act_slots = slots.recast(Float8E4M3FN, self.act_cols) if self.spec.save_preact else slots
        pitch = self.act.num_scales(inputs.bias_size // self.parts)
        return QuantizingState(inputs, slots, ColumnSmem(**smem), act_slots, pitch)

    @cute.jit
    def finish_slab(
        self, state: QuantizingState, acc: cute.Tensor, scales: cute.Tensor, stores: tuple, work: WorkTile, row: Int32,
        first_slot: cutlass.Constexpr[int],
    ):  # fmt: skip
        self._scale_columns(state, acc)
        self._add_bias(state, acc, Float32(1.0), Float32(1.0))
        if const_expr(self.spec.save_preact):
            self._store_preact(state, acc, stores[1], work, row, first_slot)
        for chunk in cutlass.range_constexpr(self.act_chunks):
            values = self._activated(state, acc, chunk, self.act_cols, scales)
            column = work.n_tile * self.act_n + chunk * self.act_cols
            for block in cutlass.range_constexpr(self.act_cols // self.block_cols):
                of_block = chunk_of(values, block, self.block_cols)
                self._quantize(state, of_block, work, row, column + block * self.block_cols)
            tile = stores[0].tile(work, row, column, cols=self.act_cols)
            state.act_slots.put(values, stores[0], tile, (first_slot + self.preact_chunks + chunk) % SLOTS)

    @cute.jit
    def _quantize(self, state: QuantizingState, values: cute.Tensor, work: WorkTile, row: Int32, column: Int32):
        """Scale a block of columns into E4M3's range, in place, and store the scale of each of its rows.

        Args:
            values: the thread's float32 elements of the block, in two rows.
            work: the output tile. Scales of rows past the end of its group are not stored.
            row: first row of the slab. A slab is 64 rows of the tile; `state.row_in_slab` is the first of the thread's
                two rows in it, 8 rows apart.
            column: first column of the block in the activation.
        """
        count = cute.size(values)
        for half in cutlass.range_constexpr(2):
            amax = Int32(0)
            for i in cutlass.range_constexpr(count):
                if const_expr(i // 2 % 2 == half):
                    amax = cutlass.max(amax, magnitude_of(values[i]))
            for distance in cutlass.range_constexpr(1, 3):
                amax = cutlass.max(amax, cute.arch.shuffle_sync_bfly(amax, distance))
            scale = self._scale_of(amax.bitcast(Float32))
            multiplier = self._multiplier_of(scale)
            for i in cutlass.range_constexpr(count):
                if const_expr(i // 2 % 2 == half):
                    values[i] = values[i] * multiplier
            at = row + state.row_in_slab + half * 8
            if (state.lane % 4 == half) & (at < work.group_end):
                self._store_scale(state, scale, at, column)

    def _scale_of(self, amax: Float32) -> Any:
        """Return the scale of a block whose greatest magnitude is `amax`: here the biased exponent of a power of two
        (E8M0). `_multiplier_of` and `_store_scale` take the scale as this method returns it.
        """
        return exponent_of(amax)

    def _multiplier_of(self, scale: Any) -> Float32:
        """Return the factor that turns the block's elements into E4M3 numbers."""
        return multiplier_of(scale)

    def _store_scale(self, state: QuantizingState, exponent: Int32, row: Int32, column: Int32) -> None:
        """Store a row's scale for the block that begins at `column`, in as many copies as the format has
        (`Format.copies`).

        Args:
            exponent: the scale as `_scale_of` returns it: here the biased exponent of a power of two.
            row: the row of the activation [T, I].
        """
        store_scale(self.act, state.inputs.out_scale, state.pitch, exponent, row, column)


@cute.jit
def store_scale(
    act: cutlass.Constexpr[Format], scales: Int64, pitch: Int32, exponent: Int32, row: Int32, column: Int32
):  # fmt: skip
    """Store a block's scale, in as many equal copies as the format has (`Format.copies`, 1 or 4).

    Four copies take one 32-bit store if `pitch` is a multiple of 4, since they are then aligned; otherwise they take
    byte stores.

    Args:
        act: the format of the result.
        scales: address of the scales of all rows.
        pitch: number of scales of a row.
        exponent: the block's scale byte.
        row, column: where the block begins in the result.
    """
    copies = act.copies
    block = column // act.scale_step
    address = scales + Int64(row) * pitch + block
    if const_expr(copies == 1):
        if block < pitch:
            vector_at(cutlass.Uint8, address)[0] = exponent.to(cutlass.Uint8)
    elif pitch % copies == 0:
        if block < pitch:
            vector_at(Int32, address)[0] = exponent * 0x01010101
    else:
        for i in cutlass.range_constexpr(copies):
            if block + i < pitch:
                vector_at(cutlass.Uint8, address + i)[0] = exponent.to(cutlass.Uint8)
