"""What a kernel knows of its epilogue: what that asks for, and what is called of it."""

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
"""A warpgroup's small shared memory by name."""


@dataclasses.dataclass(frozen=True)
class SlotShape:
    """Staging slots, `count` of `rows` rows of `row_bytes`, which hold elements of `dtype`.

    chunks: slots' worth that a warpgroup stores of a tile, over all outputs. shared: all warpgroups have the same
    slots; else each has its own.
    """

    dtype: Any
    chunks: int
    count: int = SLOTS
    rows: int = ROWS
    row_bytes: int = ROW_BYTES
    shared: bool = False

    def columns(self, dtype: Any = None) -> int:
        """Of a slot that holds elements of `dtype`, by default its own."""
        return self.row_bytes * 8 // (dtype or self.dtype).width

    @property
    def num_bytes(self) -> int:
        """Of all slots of an owner."""
        return self.count * self.rows * self.row_bytes


@dataclasses.dataclass(frozen=True)
class SmemField:
    """Small shared memory of each warpgroup, by the name under which its state finds it."""

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
    """All that a kernel reads of its epilogue.

    parts: how many row ranges of the weights one tile takes. layout: where they lie (memory/weights.py).
    load_barriers: of loads into slots. has_load_warp: a warp of its own makes these loads (`Epilogue.load`).
    """

    slots: SlotShape
    smem: tuple[SmemField, ...] = ()
    parts: int = 1
    layout: str = "concat"
    load_barriers: int = 0
    has_load_warp: bool = False

    @property
    def smem_bytes(self) -> int:
        """Of a warpgroup's small shared memory."""
        return sum(field.num_bytes for field in self.smem)

    @property
    def names(self) -> tuple[str, ...]:
        """Of its small shared memory."""
        return tuple(field.name for field in self.smem)


class KernelEpilogue(Invariant):
    """All that a kernel calls of its epilogue."""

    @property
    def shape(self) -> EpilogueShape:
        raise NotImplementedError

    def make_ring(self, barriers: cute.Pointer, staging: cute.Tensor) -> Any:
        """What loads into slots go through; made by all threads before the roles part, if there are such loads."""
        raise NotImplementedError

    def load(self, ring: Any, inputs: Any, work: WorkTile, turn: Int32) -> None:
        """Bring what `finish` reads of the CTA's tile number `turn`; called by the load warp, if the shape has one."""
        raise NotImplementedError

    def make_state(self, inputs: Any, groups: Groups, slots: Any, smem: Smem, ring: Any) -> Any:
        """What one MMA warpgroup holds of it while the kernel runs."""
        raise NotImplementedError

    def begin(self, state: Any, work: WorkTile, share: TileShare) -> Any:
        """Before a tile's MMAs, so that latencies hide behind them. Returns what `finish` takes back."""
        raise NotImplementedError

    def finish(
        self, state: Any, acc: cute.Tensor, prefetched: Any, stores: Any, work: WorkTile, share: TileShare
    ) -> Any:  # fmt: skip
        """Turn a warpgroup's accumulators into stores."""
        raise NotImplementedError
