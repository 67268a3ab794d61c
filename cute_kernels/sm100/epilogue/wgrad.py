"""Blackwell's epilogue of a weight gradient: Hopper's, but dw is stored and loaded in boxes of 16 rows (store.py)."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...epilogue.fragments import TileShare
from ...epilogue.sizes import SLOT_BYTES
from ...schedule.work import WorkTile
from ...sm90.epilogue import slot_loads, wgrad
from ..tensor_memory import SLAB_LANES
from .store import box_copies, boxes_at


class SlotLoads(slot_loads.SlotLoads):
    """Hopper's loads of dw into staging slots (64 rows in shared memory), box by box of 16 rows."""

    @cute.jit
    def start(self, atom: cute.CopyAtom, tile: cute.Tensor, slot: cutlass.Constexpr[int]):
        """Start to load the boxes of `tile` into a free slot; called by the storing warp.

        Args:
            atom: the TMA copy.
            tile: the boxes in global memory.
            slot: the slot's index.
        """
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + slot, SLOT_BYTES)
        for target, source in box_copies(atom, self.slots.smem, tile, slot):
            cute.copy(atom, source, target, tma_bar_ptr=self.full + slot)


class WgradEpilogue(wgrad.WgradEpilogue):
    """Hopper's epilogue of weight gradients, which stores and loads boxes of 16 rows of dw."""

    loads_type = SlotLoads

    def _first_row(self, work: WorkTile, share: TileShare) -> Int32:
        """Return the first row of dw that the warpgroup computes; here the unit is rows, not slabs."""
        return work.m_tile * self.tile.m

    def _tile(self, dw: cute.Tensor, first_row: Int32, slab: int, column: Int32) -> cute.Tensor:
        """Return the boxes of 16 rows of a slab (64 rows) of dw, in `cols` columns from column * `cols` on.

        Args:
            dw: an expert's dw [N, K].
            first_row: the first row of the warpgroup's slab 0.
            slab: index of the slab among the warpgroup's slabs.
            column: index of the chunk (the columns that one slot holds) along dw's columns.
        """
        return boxes_at(dw, first_row + slab * SLAB_LANES, column * self.cols, self.cols)
