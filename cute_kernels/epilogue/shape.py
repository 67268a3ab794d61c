"""The interface between a kernel and its epilogue: the shared memory that an epilogue asks for, and the methods that a
kernel calls. base.py explains the terms."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from ..device.invariant import Invariant
from ..schedule.groups import Groups
from ..schedule.work import WorkTile
from .fragments import TileShare
from .sizes import ROW_BYTES, ROWS, SLOTS

Smem = dict[str, cute.Tensor]
"""A warpgroup's tensors in shared memory, except its slots, by the name of their `SmemField`."""


@dataclasses.dataclass(frozen=True)
class SlotShape:
    """Number and size of an epilogue's slots (buffers in shared memory for stores).

    Attributes:
        dtype: the type of the slots' elements.
        chunks: how many chunks a warpgroup stores for a tile, over all outputs. A chunk fills one slot.
        count: number of slots of each owner. The owner is a warpgroup, or the CTA if `shared`.
        rows, row_bytes: rows of a slot, and bytes of a row.
        shared: True if all warpgroups of a CTA use the same slots, False if each has its own.
    """

    dtype: Any
    chunks: int
    count: int = SLOTS
    rows: int = ROWS
    row_bytes: int = ROW_BYTES
    shared: bool = False

    def columns(self, dtype: Any = None) -> int:
        """Return the number of columns of a slot whose elements are of `dtype`. None: the dtype of this shape."""
        return self.row_bytes * 8 // (dtype or self.dtype).width

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots of one owner (a warpgroup, or the CTA if `shared`)."""
        return self.count * self.rows * self.row_bytes


@dataclasses.dataclass(frozen=True)
class SmemField:
    """A tensor in shared memory that each warpgroup has besides its slots. `make_state` receives it by its `name`."""

    name: str
    dtype: Any
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.num_elements * self.dtype.width // 8


@dataclasses.dataclass(frozen=True)
class EpilogueShape:
    """Properties of an epilogue that a kernel reads.

    Attributes:
        slots: the number and size of its slots.
        smem: a warpgroup's tensors in shared memory besides the slots.
        parts: parts of a tile: 2 for a gated layer (a, the activated half, and u, the linear half), else 1.
        layout: the order of the parts' weight rows in memory (memory/weights.py).
        load_barriers: number of mbarriers for loads into slots; 0: there are no such loads.
        has_load_warp: True if a separate warp makes these loads (`KernelEpilogue.load`).
    """

    slots: SlotShape
    smem: tuple[SmemField, ...] = ()
    parts: int = 1
    layout: str = "concat"
    load_barriers: int = 0
    has_load_warp: bool = False

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory that a warpgroup has besides the slots."""
        return sum(field.num_bytes for field in self.smem)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of a warpgroup's tensors in shared memory besides the slots."""
        return tuple(field.name for field in self.smem)


class KernelEpilogue(Invariant):
    """The methods of an epilogue that a kernel calls."""

    @property
    def shape(self) -> EpilogueShape:
        """Properties that the kernel reads."""
        raise NotImplementedError

    def make_ring(self, barriers: cute.Pointer, staging: cute.Tensor) -> Any:
        """Make the pipeline of loads into slots.

        All threads call this before the warps take their roles. It is called only if `EpilogueShape.load_barriers` is
        not 0.

        Args:
            barriers: shared memory for `EpilogueShape.load_barriers` mbarriers.
            staging: all slots of the CTA (buffers in shared memory).
        """
        raise NotImplementedError

    def load(self, ring: Any, inputs: Any, work: WorkTile, turn: Int32) -> None:
        """Load the inputs of one tile that `finish` reads, into slots. The load warp calls this, if there is one.

        Args:
            ring: the pipeline of loads into slots, which `make_ring` made.
            inputs: the epilogue's run-time inputs.
            turn: number of tiles that the CTA computed before.
        """
        raise NotImplementedError

    def make_state(self, inputs: Any, groups: Groups, slots: Any, smem: Smem, ring: Any) -> Any:
        """Make the run-time state of one warpgroup's epilogue, an argument of `begin` and `finish`.

        Args:
            inputs: the epilogue's run-time inputs.
            slots: the warpgroup's slots.
            smem: the warpgroup's tensors in shared memory besides the slots.
            ring: the pipeline of loads into slots, which `make_ring` made; None: the epilogue loads nothing into slots.
        """
        raise NotImplementedError

    def begin(self, state: Any, work: WorkTile, share: TileShare) -> Any:
        """Start to fetch a tile's inputs (biases, scales) before the tile's MMAs, which hide the latency. The result is
        the argument `prefetched` of `finish`."""
        raise NotImplementedError

    def finish(
        self, state: Any, acc: cute.Tensor, prefetched: Any, stores: Any, work: WorkTile, share: TileShare
    ) -> Any:  # fmt: skip
        """Turn a warpgroup's accumulators of a tile into results, and start to store them.

        Args:
            prefetched: the tile's inputs that `begin` started to fetch.
            stores: the objects that stand for the output tensors (slots.py).
            share: the warpgroup's slabs (64 rows each) of the tile.
        """
        raise NotImplementedError
