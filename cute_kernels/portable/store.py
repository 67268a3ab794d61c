"""Storing tiles without TMA: through shared memory, whose lines a CTA then writes 16 bytes a thread, row by row."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..device.invariant import Invariant
from ..device.warps import WARP
from ..schedule.work import WorkTile
from ..sm90.epilogue.store import narrowed, smem_layout
from .mainloop import CHUNK_BYTES, CHUNKS, SLAB, STEP

SLOTS = 2


class Place(NamedTuple):
    """A slot's rows and columns in global memory: where they begin, and how many of them there are."""

    address: Int64
    pitch: Int64
    rows: Int32
    columns: Int32


class RowStore(NamedTuple):
    """Rows of 16-bit columns, `pitch` bytes apart, in two halves `half` bytes apart, or one."""

    address: Int64
    pitch: Int64
    columns: Int32
    half: Int64

    def tile(
        self, work: WorkTile, row: Int32, col: Int32, half: Int32 | int | None = None, cols: int = 0
    ) -> Place:  # fmt: skip
        """What of a slot at (row, col) is inside the group and the columns."""
        address = self.address + Int64(row) * self.pitch + col * 2
        if half is not None:
            address += half * self.half
        return Place(address, self.pitch, work.group_end - row, self.columns - col)


def make_store(view: cute.Tensor) -> RowStore:
    """Host side, of a tensor (T, columns[, half])."""
    has_halves = cute.rank(view) == 3
    half = Int64(view.stride[2] * 2) if has_halves else Int64(0)
    return RowStore(view.iterator.toint(), Int64(view.stride[0]) * 2, Int32(view.shape[1]), half)


class Slots(Invariant):
    """Slots of 64 rows of 128 bytes, which a CTA fills and empties in turns: one barrier each."""

    def __init__(self, smem: cute.Pointer, dtype: type[cutlass.Numeric]):
        self.dtype = dtype
        layout = smem_layout(dtype, SLOTS)
        self.smem = cute.make_tensor(cute.recast_ptr(smem, layout.inner, dtype=dtype), layout.outer)
        self.cols = cute.size(self.smem, mode=[1])
        thread, _, _ = cute.arch.thread_idx()
        self.thread = thread

    def sync(self) -> None:
        cute.arch.sync_threads()

    def acquire(self) -> None:
        """A slot is free: since it was emptied, the other one was filled."""

    @cute.jit
    def write(self, values: cute.Tensor, slot: cutlass.Constexpr[int]):
        """Converted registers, in the order of accumulators."""
        lane = self.thread % WARP
        for i in cutlass.range_constexpr(cute.size(values) // 2):
            line = self.smem[self.thread // WARP * 16 + lane // 4 + i % 2 * 8, None, slot]
            pair = cute.make_tensor(values.iterator + 2 * i, cute.make_layout(2))
            cute.autovec_copy(pair, cute.local_tile(line, (2,), (i // 2 * 4 + lane % 4,)))

    @cute.jit
    def store(self, target: RowStore, place: Place, slot: cutlass.Constexpr[int]):
        """Empty a slot that was filled."""
        self.sync()
        line, chunk = self.thread // CHUNKS, self.thread % CHUNKS
        elements = CHUNK_BYTES * 8 // self.dtype.width
        if chunk * elements < place.columns:
            for i in cutlass.range(SLAB // STEP, unroll=1):
                row = line + i * STEP
                if row < place.rows:
                    source = cute.local_tile(self.smem[row, None, slot], (elements,), (chunk,))
                    at = place.address + row * place.pitch + chunk * CHUNK_BYTES
                    there = cute.make_ptr(self.dtype, at, cute.AddressSpace.gmem, assumed_align=CHUNK_BYTES)
                    cute.autovec_copy(source, cute.make_tensor(there, cute.make_layout(elements)))

    @cute.jit
    def put(self, values: cute.Tensor, target: RowStore, place: Place, slot: cutlass.Constexpr[int]):
        """Convert, stage and store a slot's worth of accumulators."""
        self.write(narrowed(values, self.dtype), slot)
        self.store(target, place, slot)
