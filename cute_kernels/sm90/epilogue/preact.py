"""TMA loads of preactivations into a ring of staging slots that all warpgroups of a CTA share."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warp

from ...device.invariant import Invariant
from ...epilogue.preact import PreactLayout, PreactPair
from ...epilogue.sizes import COLS, ROWS, SLOT_BYTES
from ...epilogue.slots import smem_layout
from ..budget import PAIRS
from .store import Slots


class PreactLoads(NamedTuple):
    """A TMA load from the preactivations.

    Attributes:
        atom: the TMA copy of one slot.
        tensor: the preactivations' coordinates: (T, columns), or (T, I, half) if the gate layout is "concat".
    """

    atom: cute.CopyAtom
    tensor: cute.Tensor


def make_loads(preact: cute.Tensor, layout: PreactLayout) -> PreactLoads:
    """Host side: make the TMA descriptor by which boxes of 64 x 64 preactivations are loaded into slots."""
    atom, view = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), layout.view(preact), smem_layout(preact.element_type), (ROWS, COLS)
    )
    return PreactLoads(atom, view)


class PreactRing(Invariant):
    """Ring of staging slots through which a CTA's chunks (64 x 64 outputs each) pass.

    Chunks are numbered over all tiles of the CTA, in the order in which they are computed. Each chunk has slots (64
    rows of 128 bytes) for its preactivations (a pair; one slot without a gate) and one slot for act. The ring is a
    pipeline of PAIRS stages, one for each chunk in it:

        full     the bytes of the chunk's preactivations, which the epilogue load warp loads
        empty    1 arrival: the warp that stored the chunk, once its stores have read the slots

    The same warp also stores act. So when a chunk's preactivations have been loaded, its act slot is free, too.
    """

    def __init__(self, barriers: cute.Pointer, staging: cute.Tensor, layout: PreactLayout):
        self.layout = layout
        self.smem = staging[None, None, None, 0]
        self.pipeline = pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=PAIRS,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 1),
            tx_count=layout.slots * SLOT_BYTES,
            defer_sync=True,
        )

    def act_slot(self, number: Int32) -> Int32:
        """Return the index of the staging slot for the act of chunk `number`."""
        return number & (PAIRS - 1)

    def slot(self, number: Int32, slot: int) -> Int32:
        """Return the index, among all staging slots, of slot `slot` (0 or 1) of the pair for chunk `number`'s
        preactivations.
        """
        return PAIRS + self.act_slot(number) * self.layout.slots + slot

    def _state(self, number: Int32, is_producer: bool) -> pipeline.PipelineState:
        phase = number // PAIRS & 1
        return pipeline.PipelineState(PAIRS, number, self.act_slot(number), phase ^ 1 if is_producer else phase)

    @cute.jit
    def load(self, loads: PreactLoads, number: Int32, row: Int32, column: Int32):
        """Load the preactivations of chunk `number`; called by the epilogue load warp.

        Args:
            loads: the TMA load from the preactivations.
            row: the chunk's first row.
            column: the chunk's first output column.
        """
        state = self._state(number, True)
        self.pipeline.producer_acquire(state)
        barrier = self.pipeline.producer_get_barrier(state)
        for slot in cutlass.range_constexpr(self.layout.slots):
            at, half = self.layout.column(column, slot)
            self.bring(loads, row, at, half, self.slot(number, slot), barrier)

    @cute.jit
    def bring(
        self, loads: PreactLoads, row: Int32, at: Int32, half: cutlass.Constexpr[int | None], slot: Int32,
        barrier: cute.Pointer,
    ):  # fmt: skip
        """Start the TMA load of one box of preactivations into a slot.

        Args:
            loads: the TMA load from the preactivations.
            row: the box's first row.
            at: the box's first column.
            half: index of the half that the column belongs to; None: the tensor has no mode for halves.
            slot: index of the staging slot.
            barrier: the full barrier on which the bytes arrive.
        """
        smem = cute.group_modes(self.smem, 0, 2)
        view = loads.tensor if const_expr(half is None) else loads.tensor[None, None, half]
        tile = cute.local_tile(cute.domain_offset((row, at), view), (ROWS, COLS), (0, 0))
        to, source = cpasync.tma_partition(loads.atom, 0, cute.make_layout(1), smem, cute.group_modes(tile, 0, 2))
        cute.copy(loads.atom, source, to[None, slot], tma_bar_ptr=barrier)

    def wait(self, number: Int32) -> None:
        """Wait until the preactivations of chunk `number` are loaded."""
        self.pipeline.consumer_wait(self._state(number, False))

    def release(self, number: Int32) -> None:
        """Free the slots of chunk `number`; called by the warp that stored the chunk."""
        self.pipeline.consumer_release(self._state(number, False))


class MatrixPair(PreactPair):
    """A thread's access to a pair of slots (staging buffers in shared memory) with preactivations, which it reads by
    ldmatrix."""

    def __init__(self, ring: PreactRing, slots: Slots):
        super().__init__(ring, slots)
        self.tiled_copy = slots.matrix_copy(warp.LdMatrix8x8x16bOp(False, 4))
        self.source = self.tiled_copy.get_slice(slots.thread).partition_S(slots.smem)

    def load_piece(self, target: cute.Tensor, slot: Int32, index: int) -> None:
        source = cute.append_ones(self.source[(None, index), 0, 0, slot], 2)
        cute.copy(self.tiled_copy, source, cute.append_ones(target, 2))
