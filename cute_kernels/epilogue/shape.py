"""The interface between a kernel and its epilogue: the shared memory that it asks for, and the methods to call."""

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
"""A warpgroup's small shared memory, by name."""


@dataclasses.dataclass(frozen=True)
class SlotShape:
    """Size of staging slots: `count` slots of `rows` rows of `row_bytes`, which hold elements of `dtype`.

    chunks: how many slots' worth a warpgroup stores for a tile, over all outputs. shared: all warpgroups use the same
    slots; otherwise each has its own.
    """

    dtype: Any
    chunks: int
    count: int = SLOTS
    rows: int = ROWS
    row_bytes: int = ROW_BYTES
    shared: bool = False

    def columns(self, dtype: Any = None) -> int:
        """Return the columns of a slot that holds elements of `dtype`. None: the shape's own dtype."""
        return self.row_bytes * 8 // (dtype or self.dtype).width

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots of an owner."""
        return self.count * self.rows * self.row_bytes


@dataclasses.dataclass(frozen=True)
class SmemField:
    """Small shared memory of each warpgroup, under the name by which the warpgroup's state finds it."""

    name: str
    dtype: Any
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.width // 8


@dataclasses.dataclass(frozen=True)
class EpilogueShape:
    """Properties of an epilogue that a kernel reads.

    parts: ranges of weight rows in a tile. layout: their order in memory (memory/weights.py). load_barriers: barriers
    of loads into slots. has_load_warp: a warp with this role makes these loads (`KernelEpilogue.load`).
    """

    slots: SlotShape
    smem: tuple[SmemField, ...] = ()
    parts: int = 1
    layout: str = "concat"
    load_barriers: int = 0
    has_load_warp: bool = False

    @property
    def smem_bytes(self) -> int:
        """Bytes of a warpgroup's small shared memory."""
        return sum(field.num_bytes for field in self.smem)

    @property
    def names(self) -> tuple[str, ...]:
        """Names in a warpgroup's small shared memory."""
        return tuple(field.name for field in self.smem)


class KernelEpilogue(Invariant):
    """Methods of an epilogue that a kernel calls."""

    @property
    def shape(self) -> EpilogueShape:
        raise NotImplementedError

    def make_ring(self, barriers: cute.Pointer, staging: cute.Tensor) -> Any:
        """Make the ring of loads into slots; called by all threads before roles begin, if there are such loads."""
        raise NotImplementedError

    def load(self, ring: Any, inputs: Any, work: WorkTile, turn: Int32) -> None:
        """Load the inputs that `finish` reads for the CTA's tile number `turn`; called by the load warp, if there is
        one."""
        raise NotImplementedError

    def make_state(self, inputs: Any, groups: Groups, slots: Any, smem: Smem, ring: Any) -> Any:
        """Make the state that one warpgroup keeps while the kernel runs."""
        raise NotImplementedError

    def begin(self, state: Any, work: WorkTile, share: TileShare) -> Any:
        """Start to fetch a tile's inputs before its MMAs, which hide the latency. Return the argument `prefetched` of
        `finish`."""
        raise NotImplementedError

    def finish(
        self, state: Any, acc: cute.Tensor, prefetched: Any, stores: Any, work: WorkTile, share: TileShare
    ) -> Any:  # fmt: skip
        """Turn a warpgroup's accumulators into stores."""
        raise NotImplementedError
