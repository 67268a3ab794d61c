"""The interface of staging slots: 64 rows of 128 bytes in shared memory, through which epilogues store their results.

Each architecture has its own slots and stores. A store, of an epilogue's `stores`, has an `atom` and a
`tile(work, row, column, half, cols)`, which `Slots.start` takes.
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
    """Return the columns of a slot of `dtype`."""
    return ROW_BYTES * 8 // dtype.width


def smem_layout(
    dtype: type[cutlass.Numeric], *more: int, rows: int = ROWS, cols: int | None = None
) -> cute.ComposedLayout:
    """Make the shared-memory layout of slots, (row, column, *more)."""
    return swizzled_layout(dtype, (rows, columns(dtype) if cols is None else cols, *more))


def narrowed(values: cute.Tensor, dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """Convert registers to `dtype`; return `values` itself if it is of `dtype`."""
    if values.element_type is dtype:
        return values
    result = cute.make_rmem_tensor(values.shape, dtype)
    result.store(values.load().to(dtype))
    return result


class Slots(Invariant):
    """A warpgroup's staging slots. Registers are in the order of accumulators (fragments.py).

    smem: (row, column, slot), `cols` columns of `dtype`. thread: index in the warpgroup. is_storing_warp: this warp
    calls `start` and `drain`. warp_step: rows of a tile between one warp's 16 rows of a slab and the next warp's.
    """

    warp_step = 16

    dtype: type[cutlass.Numeric]
    smem: cute.Tensor
    cols: int
    thread: Int32
    is_storing_warp: Any

    def sync(self) -> None:
        """Wait for the warpgroup's other threads."""
        raise NotImplementedError

    def acquire(self) -> None:
        """Wait until the next slot is free."""
        raise NotImplementedError

    def write(self, values: cute.Tensor, slot: int) -> None:
        """Write a slot's worth of converted registers into a free slot."""
        raise NotImplementedError

    def fill_piece(self, values: cute.Tensor, slot: Int32 | int, piece: int) -> None:
        """Write converted registers into piece number `piece` of a slot, 16 columns."""
        raise NotImplementedError

    def publish(self) -> None:
        """Make a filled slot visible to the warp that stores it."""
        raise NotImplementedError

    def start(self, atom: Any, tile: Any, slot: Int32 | int) -> None:
        """Start to store a published slot."""
        raise NotImplementedError

    def store(self, target: Any, tile: Any, slot: int) -> None:
        """Publish a filled slot and store it into a tile of `target`."""
        raise NotImplementedError

    def put(self, values: cute.Tensor, target: Any, tile: Any, slot: int) -> None:
        """Convert, stage and store a slot's worth of accumulators."""
        raise NotImplementedError

    def drain(self) -> None:
        """Wait until all stores have read their slots."""
        raise NotImplementedError

    def pair(self, slot: Int32 | int, number: int) -> cute.Tensor:
        """Return the place of this thread's accumulators 2 * number and 2 * number + 1 in a slot."""
        lane = self.thread % WARP
        line = self.smem[self.thread // WARP * 16 + lane // 4 + number % 2 * 8, None, slot]
        return cute.local_tile(line, (2,), (number // 2 * 4 + lane % 4,))
