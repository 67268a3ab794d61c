"""What an epilogue asks of its kernel: weight rows, staging slots, small shared memory, barriers, a warp."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ..budget import ROW_BYTES, ROWS, SLOTS


@dataclasses.dataclass(frozen=True)
class SlotShape:
    """Staging slots of TMA stores, `count` of `rows` rows of `row_bytes`, which hold elements of `dtype`.

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
