"""Stores of tiles from tensor memory, where a slab's 64 rows are not neighbours but four runs of 16 rows.

Row 32 w + 16 s + r of a tile is in lane 16 s + r of warp w, with s = 0, 1 and r = 0 .. 15. So slab s is four boxes of
16 rows, which begin 32 rows apart. One TMA copy stores or loads each box; four copies store or load a slot.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warp

from ...epilogue.sizes import ROWS
from ...sm90.epilogue import store
from ..tensor_memory import SLAB_LANES, WARP_LANES

BOXES = ROWS // SLAB_LANES
# Distance of a slot's boxes in global memory, counted in boxes.
BOX_STEP = WARP_LANES // SLAB_LANES


def boxes_at(tensor: cute.Tensor, row: Int32, col: Int32 | int, cols: int) -> cute.Tensor:
    """Return boxes of 16 rows by `cols` columns as a tensor (16 rows, columns, box).

    The boxes begin at column `col` and at rows `row`, `row` + 16, `row` + 32, ...
    """
    return cute.local_tile(cute.domain_offset((row, col), tensor), (SLAB_LANES, cols), (None, 0))


def box_copies(atom: cute.CopyAtom, slots: cute.Tensor, boxes: cute.Tensor, slot: Int32 | int) -> list[tuple]:
    """Return a pair for each box (16 rows) of a slot, a buffer of 64 rows in shared memory. The pair is the box's view
    in shared memory and its view in global memory, both partitioned for TMA.

    Args:
        atom: the TMA copy.
        slots: all slots.
        boxes: the boxes in global memory, a tensor (16 rows, columns, box) (`boxes_at`).
        slot: the slot's index.
    """
    copies = []
    for box in range(BOXES):
        smem = cute.local_tile(slots[None, None, slot], (SLAB_LANES, cute.size(slots, mode=[1])), (box, 0))
        gmem = boxes[None, None, BOX_STEP * box]
        pair = cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
        copies.append(cpasync.tma_partition(atom, 0, cute.make_layout(1), *pair))
    return copies


class BoxStore(store.RaggedStore):
    """The TMA store of an output tensor (T, columns[, half]) in boxes of 16 rows, clipped at the end of a group's
    rows."""

    def cut(self, group: cute.Tensor, col: Int32, rows: int, cols: int) -> cute.Tensor:
        """Return boxes of 16 rows by `cols` columns, from column `col` on (`boxes_at`). A slab (64 rows of the tile) is
        every second of the first eight boxes.

        Args:
            group: the output tensor from the slab's first row on, clipped at the end of the group's rows.
            col: the first column.
            rows: not used, since a box always has 16 rows.
            cols: columns of a box.
        """
        return boxes_at(group, Int32(0), col, cols)


def make_store(tensor: cute.Tensor, cols: int) -> BoxStore:
    """Host side: make the TMA descriptor for storing the boxes of a slot (64 rows in shared memory) into a tensor (T,
    columns[, half]).

    cols: columns of a slot.
    """
    return BoxStore(*store.make_store(tensor, SLAB_LANES, cols))


class Slots(store.Slots):
    """A warpgroup's staging slots (buffers of 64 rows in shared memory), stored by one TMA copy for each box of 16
    rows."""

    warp_step = WARP_LANES

    def matrix_copy(self, op: Any) -> cute.TiledCopy:
        """Make the tiled copy with which a warpgroup writes accumulators to a slot.

        The accumulators are in the order of an MMA in which each of four warps has 16 rows. op: the copy instruction.
        """
        mma_op, warps = warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16)), cute.make_layout((4, 1, 1))
        mma = cute.make_tiled_mma(mma_op, warps, permutation_mnk=(ROWS, self.cols, 16))
        return cute.make_tiled_copy_C(cute.make_copy_atom(op, self.dtype), mma)

    @cute.jit
    def start(self, atom: cute.CopyAtom, tile: cute.Tensor, slot: Int32 | int, policy: Int64 | None = None):
        """Start to store the boxes of a published slot (one that the warpgroup has filled); called by the storing warp
        alone.

        Args:
            atom: the TMA copy.
            tile: the boxes in global memory (`BoxStore.cut`).
            slot: the slot's index.
            policy: L2 policy; None: the default.
        """
        for source, target in box_copies(atom, self.smem, tile, slot):
            cute.copy(atom, source, target, cache_policy=policy)
        cute.arch.cp_async_bulk_commit_group()
