"""Epilogue of a fused FC1 in MXFP8: the activation leaves as E4M3 with a scale for each 128 of a row, for FC2 to read.

It is quantised from float32, by the rules of docs/mxfp8.md. A tile has whole blocks: 128 columns of the activation lie
in the registers of four lanes, 32 each, for each of their two rows.
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
from ...epilogue.shape import EpilogueShape, Smem
from ...epilogue.sizes import ROWS, SLOTS, THREADS
from ...formats import MXFP8_WIDE, OPERANDS
from ...quantize.scales import exponent_of, magnitude_of, multiplier_of
from ...schedule.groups import Groups
from ...schedule.work import WorkTile
from ...specs import GroupedGluSpec
from .store import Slots

BLOCK_COLS = MXFP8_WIDE.block
BLOCK_REGS = ROWS * BLOCK_COLS // THREADS
SCALE_COLS = MXFP8_WIDE.scale_step
SCALES = BLOCK_COLS // SCALE_COLS


class QuantizingState(WarpgroupState):
    """`act_slots`: the staging slots as 128 columns of E4M3. `pitch`: scales of a row."""

    def __init__(self, inputs, slots: Slots, smem: ColumnSmem, act_slots: Slots, pitch: Int32):
        super().__init__(inputs, slots, smem)
        self.act_slots = act_slots
        self.pitch = pitch


class QuantizingEpilogue(ActivationEpilogue):
    """Stores: act (E4M3), and the preactivation (16-bit) where the spec saves it."""

    def __init__(self, dtype: type[cutlass.Numeric], spec: GroupedGluSpec):
        super().__init__(dtype, spec)
        self.blocks = self.part_n // BLOCK_COLS
        self.chunks_per_slab = self.preact_chunks + self.blocks

    @property
    def shape(self) -> EpilogueShape:
        shape = super().shape
        return shape if self.spec.save_preact else replace(shape, slots=replace(shape.slots, dtype=Float8E4M3FN))

    def make_state(self, inputs, groups: Groups, slots: Slots, smem: Smem, ring) -> QuantizingState:
        act_slots = slots.recast(Float8E4M3FN) if self.spec.save_preact else slots
        pitch = OPERANDS[self.spec.operands].act.num_scales(inputs.bias_size // self.parts)
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
        for block in cutlass.range_constexpr(self.blocks):
            values = self._activated(state, acc, block, BLOCK_COLS, scales)
            column = work.n_tile * self.part_n + block * BLOCK_COLS
            self._quantize(state, values, work, row, column)
            tile = stores[0].tile(work, row, column, cols=BLOCK_COLS)
            state.act_slots.put(values, stores[0], tile, (first_slot + self.preact_chunks + block) % SLOTS)

    @cute.jit
    def _quantize(self, state: QuantizingState, values: cute.Tensor, work: WorkTile, row: Int32, column: Int32):
        """Multiply a block of 128 columns by what makes E4M3 numbers of it, and store its scales."""
        for half in cutlass.range_constexpr(2):
            amax = Int32(0)
            for i in cutlass.range_constexpr(BLOCK_REGS):
                if const_expr(i // 2 % 2 == half):
                    amax = cutlass.max(amax, magnitude_of(values[i]))
            for distance in cutlass.range_constexpr(1, 3):
                amax = cutlass.max(amax, cute.arch.shuffle_sync_bfly(amax, distance))
            scale = self._scale_of(amax.bitcast(Float32))
            multiplier = self._multiplier_of(scale)
            for i in cutlass.range_constexpr(BLOCK_REGS):
                if const_expr(i // 2 % 2 == half):
                    values[i] = values[i] * multiplier
            at = row + state.row_in_slab + half * 8
            if (state.lane % 4 == half) & (at < work.group_end):
                self._store_scale(state, scale, at, column)

    def _scale_of(self, amax: Float32) -> Any:
        """A block's scale, as `_multiplier_of` and `_store_scale` take it."""
        return exponent_of(amax)

    def _multiplier_of(self, scale: Any) -> Float32:
        """Return the factor that turns the block's elements into E4M3 numbers."""
        return multiplier_of(scale)

    @cute.jit
    def _store_scale(self, state: QuantizingState, exponent: Int32, row: Int32, column: Int32):
        """A scale four times: at once where the width of the rows lets the four be aligned."""
        block = column // SCALE_COLS
        address = state.inputs.out_scale + Int64(row) * state.pitch + block
        if state.pitch % SCALES == 0:
            if block < state.pitch:
                vector_at(Int32, address)[0] = exponent * 0x01010101
        else:
            for i in cutlass.range_constexpr(SCALES):
                if block + i < state.pitch:
                    vector_at(cutlass.Uint8, address + i)[0] = exponent.to(cutlass.Uint8)
