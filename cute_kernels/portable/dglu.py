"""The epilogue of grouped_dglu in portable kernels, which have no load warp.

After the mainloop, all preactivations of a tile are copied into slots (8 KB each) in the stages' shared memory. There
their gradients overwrite them (epilogue/preact.py).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..device.invariant import Invariant
from ..epilogue.base import ColumnSmem, Prefetched
from ..epilogue.dglu import DgluEpilogue, DgluInputs, DgluState
from ..epilogue.fragments import TileShare
from ..epilogue.preact import PreactLayout, PreactPair
from ..epilogue.shape import EpilogueShape, SlotShape, Smem
from ..schedule.groups import Groups
from ..schedule.work import WorkTile
from .store import RowStore, Slots, make_store


class PreactSlots(Invariant):
    """The slots (8 KB of shared memory each) of all chunks (64 x 64 outputs) of a tile.

    Each chunk has one slot for act, followed by the slots of its preactivation: two with a gate, else one. This object
    is the `ring` of a `PreactPair` (epilogue/preact.py), although no slot is used twice in a tile.
    """

    def __init__(self, slots: Slots, layout: PreactLayout):
        self.slots, self.layout, self.smem = slots, layout, slots.smem

    def act_slot(self, number: Int32) -> Int32:
        """Return the index of the slot that holds act of chunk `number` (64 x 64 outputs)."""
        return number * (1 + self.layout.slots)

    def slot(self, number: Int32 | int, slot: int) -> Int32 | int:
        """Return the index of slot `slot` (0 or, with a gate, 1) of the preactivation of chunk `number`."""
        return number * (1 + self.layout.slots) + 1 + slot

    def load(self, preact: RowStore, work: WorkTile, chunk: int, row: Int32, column: Int32) -> None:
        """Start to copy a chunk's preactivations into their slots.

        Args:
            preact: locates the preactivations in global memory.
            work: the output tile.
            chunk: number of the chunk (64 x 64 outputs) in the tile.
            row, column: row and column of the chunk's first output.
        """
        for slot in range(self.layout.slots):
            at, half = self.layout.column(column, slot)
            self.slots.bring(preact.tile(work, row, at, half), self.slot(chunk, slot))

    def wait(self, number: Int32) -> None:
        """Do nothing: all preactivations of a tile have arrived before its first chunk (64 x 64 outputs) begins."""

    def release(self, number: Int32) -> None:
        """Do nothing: no two chunks (64 x 64 outputs) of a tile share slots."""


class Pair(PreactPair):
    """A thread's access to a chunk's slots of preactivations; it loads two elements at a time."""

    def load_piece(self, target: cute.Tensor, slot: Int32, index: int) -> None:
        for i in range(cute.size(target) // 2):
            two = cute.make_tensor(target.iterator + 2 * i, cute.make_layout(2))
            cute.autovec_copy(self.slots.pair(slot, 4 * index + i), two)


class Epilogue(DgluEpilogue):
    """The epilogue of grouped_dglu without a load warp. Its first store is for dpreact, its second for act."""

    @property
    def shape(self) -> EpilogueShape:
        count = self.chunks_per_share * (1 + self.preact_layout.slots)
        return EpilogueShape(SlotShape(self.dtype, self.chunks_per_share, count), super().shape.smem)

    def kernel_inputs(self, inputs: DgluInputs) -> DgluInputs:
        return inputs._replace(preact=make_store(self.preact_layout.view(inputs.preact)))

    def make_state(self, inputs: DgluInputs, groups: Groups, slots: Any, smem: Smem, ring: None) -> DgluState:
        return DgluState(inputs, groups, slots, ColumnSmem(**smem), PreactSlots(slots, self.preact_layout), Pair)

    @cute.jit
    def finish(
        self, state: DgluState, acc: cute.Tensor, prefetched: Prefetched, stores: tuple, work: WorkTile,
        share: TileShare,
    ):  # fmt: skip
        for chunk in cutlass.range_constexpr(self.chunks_per_share):
            _, row, column = self._chunk_at(work, Int32(0), 0, chunk)
            state.ring.load(state.inputs.preact, work, chunk, row, column)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        DgluEpilogue.finish(self, state, acc, prefetched, stores, work, share)
