"""Epilogue of a fused FC1 in MXFP8 on a swapped tile: `quantizing.QuantizingEpilogue` for transposed accumulators.

A block (128 columns of a row that share a scale) is spread over the four warps of the MMA warpgroup. Within a warp,
lanes with equal lane % 4 hold elements of the same rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Int32, Uint8

from ...device.swizzle import SWIZZLE_BYTES
from ...epilogue.shape import EpilogueShape, Smem
from ...epilogue.sizes import ROWS
from ...epilogue.slots import narrowed
from ...formats import OPERANDS
from ...schedule.groups import Groups
from ...schedule.work import WorkTile
from ...specs import GroupedGluSpec
from ..swapped_rows import ROW_HALVES, SWIZZLE_CHUNK
from .quantizing import store_scale
from .store import Slots
from .swapped import MATRIX, WARPS, RowSmem, SwappedActivationEpilogue, SwappedSlots, SwappedState


class ByteSlots(SwappedSlots):
    """Staging slots (buffers in shared memory) of E4M3 elements, in rows of 128 bytes. Threads write them byte by byte.

    The accumulators must be transposed, and stmatrix transposes only 16-bit elements. There are few bytes to write,
    since a swapped tile has few rows of x.
    """

    def _partition(self) -> None:
        lane, self.warp = self.thread % 32, self.thread // 32
        self.row, self.byte = 2 * (lane % 4), lane // 4
        self.slot_bytes = cute.size(self.smem, mode=[0]) * SWIZZLE_BYTES

    @cute.jit
    def fill(self, values: cute.Tensor, slot: cutlass.Constexpr[int]):
        """Wait until the slot is free, then convert a chunk of registers to E4M3 and write it into the slot.

        values: for each 8 output rows, the thread's elements [4 columns, 2 rows].
        """
        converted = narrowed(values, self.dtype)
        bytes_ = cute.recast_tensor(converted, Uint8)
        self.acquire()
        for i in cutlass.range_constexpr(cute.size(values)):
            slab, half = divmod(i // 2 % 4, 2)
            chunk = slab * (ROWS // SWIZZLE_CHUNK) + self.warp
            row = self.row + i % 2
            at = (i // 8 * MATRIX + row) * SWIZZLE_BYTES + (chunk ^ row) * SWIZZLE_CHUNK + half * MATRIX + self.byte
            address = Int32(self.smem.iterator.toint()) + slot * self.slot_bytes + at
            pointer = cute.make_ptr(Uint8, address, cute.AddressSpace.smem)
            cute.make_tensor(pointer, cute.make_layout(1))[0] = bytes_[i]


class SwappedQuantizingState(SwappedState):
    """State of one warpgroup's `SwappedQuantizingEpilogue`. pitch: number of scales in a row of the activation."""

    def __init__(self, inputs: Any, slots: SwappedSlots, smem: RowSmem, pitch: Int32):
        super().__init__(inputs, slots, smem)
        self.pitch = pitch


class SwappedQuantizingEpilogue(SwappedActivationEpilogue):
    """Epilogue that stores act in E4M3, with a scale for each 128 columns of a row.

    A chunk has the 128 columns of a block: two slabs (64 weight rows each), or four with a gate.
    """

    slots_type = ByteSlots
    block_warps = WARPS

    def __init__(self, dtype: type[cutlass.Numeric], spec: GroupedGluSpec):
        super().__init__(dtype, spec)
        self.act = OPERANDS[spec.operands].act
        self.rounds = True
        self.chunk_columns = self.act.block
        self.thread_columns = self.act.block // ROWS * ROW_HALVES

    @property
    def shape(self) -> EpilogueShape:
        shape = super().shape
        return replace(shape, slots=replace(shape.slots, dtype=Float8E4M3FN, row_bytes=self.chunk_columns))

    def make_state(self, inputs: Any, groups: Groups, slots: Slots, smem: Smem, ring: Any) -> SwappedQuantizingState:
        assert isinstance(slots, ByteSlots)
        pitch = self.act.num_scales(inputs.bias_size // self.parts)
        return SwappedQuantizingState(inputs, slots, RowSmem(**smem), pitch)

    @cute.jit
    def _round(
        self, state: SwappedQuantizingState, values: cute.Tensor, work: WorkTile, row: Int32, first_column: Int32
    ):  # fmt: skip
        """Scale a chunk's results into E4M3's range, in place, and store one scale for each row.

        Args:
            values: the thread's float32 results of the chunk, which has the columns of one block.
            row, first_column: where the chunk begins in the output.
        """
        exponents = self._scale(state, values)
        for i in cutlass.range_constexpr(cute.size(exponents)):
            at = row + i // 2 * MATRIX + 2 * (state.lane % 4) + i % 2
            if (state.slots.thread < 4) & (at < work.group_end):
                store_scale(self.act, state.inputs.out_scale, state.pitch, exponents[i], at, first_column)
