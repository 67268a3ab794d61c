"""The interface of slots: buffers in shared memory through which epilogues store their results. A slot has up to 64
rows of up to 128 bytes.

Each architecture has its own slots and stores. A *store* is an object that stands for an output tensor. It has an
`atom` (the TMA copy; None without TMA) and a method `tile(work, row, column, half, cols)`, which returns the place in
the tensor where a slot's data go. `Slots.start` takes the atom and this place.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..device.invariant import Invariant
from ..device.swizzle import swizzled_layout
from ..device.warps import WARP
from .sizes import ROW_BYTES, ROWS


def columns(dtype: type[cutlass.Numeric]) -> int:
    """Return the columns of a slot of 128-byte rows that holds elements of `dtype`."""
    return ROW_BYTES * 8 // dtype.width


def smem_layout(
    dtype: type[cutlass.Numeric], *more: int, rows: int = ROWS, cols: int | None = None
) -> cute.ComposedLayout:
    """Make the shared-memory layout (row, column, *more) of slots. `more` is, for example, the number of slots.

    cols: columns of a slot; None: as many as fill 128 bytes.
    """
    return swizzled_layout(dtype, (rows, columns(dtype) if cols is None else cols, *more))


def narrowed(values: cute.Tensor, dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """Return registers converted to `dtype`; `values` itself if it has this dtype."""
    if values.element_type is dtype:
        return values
    result = cute.make_rmem_tensor(values.shape, dtype)
    result.store(values.load().to(dtype))
    return result


class Slots(Invariant):
    """A warpgroup's slots: buffers in shared memory. Registers that are passed as `values` must be in the order of
    accumulators (fragments.py).

    A slot is free until it is filled from registers. `publish` makes a filled slot visible to the warp that stores it.
    This warp calls `start`, which starts the store to global memory. Once the store has read the slot, the slot is free
    again.

    Attributes:
        smem: (row, column, slot), `cols` columns of `dtype`.
        thread: the thread's index in its warpgroup.
        is_storing_warp: True in the warp that calls `start` and `drain`.
        warp_step: distance, in rows of the tile, from one warp's 16 rows of a slab to the next warp's 16 rows.
    """

    warp_step = 16

    dtype: type[cutlass.Numeric]
    smem: cute.Tensor
    cols: int
    thread: Int32
    is_storing_warp: Any

    def sync(self) -> None:
        """Wait for the warpgroup's other threads, at a barrier."""
        raise NotImplementedError

    def acquire(self) -> None:
        """Wait until the next slot is free."""
        raise NotImplementedError

    def write(self, values: cute.Tensor, slot: int) -> None:
        """Write a whole chunk (64 rows by the columns of a slot) into a free slot.

        Args:
            values: the thread's registers of the chunk, of dtype `dtype`.
            slot: the slot's index.
        """
        raise NotImplementedError

    def fill_piece(self, values: cute.Tensor, slot: Int32 | int, piece: int) -> None:
        """Write registers into 16 columns of a free slot.

        Args:
            values: the thread's registers of these columns, of dtype `dtype`.
            slot: the slot's index.
            piece: the index of the 16 columns: column / 16.
        """
        raise NotImplementedError

    def publish(self) -> None:
        """Make filled slots visible to the warp that stores them. All threads of the warpgroup call this."""
        raise NotImplementedError

    def start(self, atom: Any, tile: Any, slot: Int32 | int) -> None:
        """Start to store a slot to global memory. Call `publish` first, so that the storing warp sees the slot's data.

        Args:
            atom: the TMA copy of the store; None without TMA.
            tile: the place in the output tensor, which the store's method `tile` returned.
            slot: the slot's index.
        """
        raise NotImplementedError

    def store(self, target: Any, tile: Any, slot: int) -> None:
        """Make a filled slot visible to the warp that stores it (`publish`), and start to store it.

        Args:
            target: the store, which stands for the output tensor (see the top of this file).
            tile: the place in the output tensor, a result of `target.tile`.
            slot: the slot's index.
        """
        raise NotImplementedError

    def put(self, values: cute.Tensor, target: Any, tile: Any, slot: int) -> None:
        """Convert a chunk of accumulators to `dtype`, write it into a slot and start to store the slot.

        Args:
            values: the thread's accumulators of the chunk.
            target: the store, which stands for the output tensor.
            tile: the place in the output tensor, a result of `target.tile`.
            slot: the slot's index.
        """
        raise NotImplementedError

    def drain(self) -> None:
        """Wait until all started stores have read their slots."""
        raise NotImplementedError

    def pair(self, slot: Int32 | int, number: int) -> cute.Tensor:
        """Return a view of two neighbouring elements of a slot, where this thread's accumulators 2 * number and 2 *
        number + 1 of a chunk are stored.

        slot: the slot's index.
        """
        lane = self.thread % WARP
        line = self.smem[self.thread // WARP * 16 + lane // 4 + number % 2 * 8, None, slot]
        return cute.local_tile(line, (2,), (number // 2 * 4 + lane % 4,))
