"""Stores of tiles without TMA, for builds that avoid TMA addresses that wrap (plain.py): the storing warp itself writes
a slot's rows, up to the group's end."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...arguments import DIVISOR
from ...device.warps import WARP
from ...epilogue.sizes import ROWS
from ...portable.store import Place
from ..tensor_memory import SLAB_LANES, WARP_LANES
from . import store


class RowSlots(store.Slots):
    """A warpgroup's staging slots (buffers of 64 rows in shared memory), stored without TMA.

    A lane writes DIVISOR (8) columns of a row at a time. A row has a multiple of 8 columns, but its bytes need not be a
    multiple of 16.
    """

    @cute.jit
    def start(self, atom: None, tile: Place, slot: Int32 | int, policy: Int64 | None = None):
        """Write a published slot (one that the warpgroup has filled) to `tile`; called by the storing warp.

        When this returns, all lanes have read the slot.

        Args:
            atom: None, as there is no TMA.
            tile: the place in global memory.
            slot: the slot's index.
            policy: not used.
        """
        lanes_a_row = self.cols // DIVISOR
        lane = self.thread % WARP
        first, part = lane // lanes_a_row, lane % lanes_a_row
        num_bytes = DIVISOR * self.dtype.width // 8
        if part * DIVISOR < tile.columns:
            for i in cutlass.range(ROWS * lanes_a_row // WARP, unroll=1):
                line = first + i * (WARP // lanes_a_row)
                row = line // SLAB_LANES * WARP_LANES + line % SLAB_LANES
                if row < tile.rows:
                    at = tile.address + row * tile.pitch + part * num_bytes
                    there = cute.make_ptr(self.dtype, at, cute.AddressSpace.gmem, assumed_align=num_bytes)
                    source = cute.local_tile(self.smem[line, None, slot], (DIVISOR,), (part,))
                    cute.autovec_copy(source, cute.make_tensor(there, cute.make_layout(DIVISOR)))
        cute.arch.sync_warp()
