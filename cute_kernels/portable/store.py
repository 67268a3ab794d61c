"""Storing tiles without TMA: through shared memory, whose lines a CTA then writes 16 bytes a thread, row by row."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from ..device.anew import anew
from ..device.gmem import CHUNK_BYTES, bytes_if, copy_chunk
from ..device.select import select
from ..epilogue import slots
from ..epilogue.sizes import ROWS, SLOT_BYTES, SLOTS
from ..epilogue.slots import narrowed, smem_layout
from ..schedule.work import WorkTile
from .operands import CHUNKS, STEP, chunk_at


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

    @property
    def itemsize(self) -> int:
        """Bytes of a column."""
        return 2

    @property
    def atom(self) -> None:
        """No TMA descriptor: a place says it all."""

    def tile(
        self, work: WorkTile, row: Int32, col: Int32, half: Int32 | int | None = None, cols: int = 0
    ) -> Place:  # fmt: skip
        """What of a slot at (row, col) is inside the group and the columns."""
        address = self.address + Int64(row) * self.pitch + col * self.itemsize
        if half is not None:
            address += half * self.half
        return Place(address, self.pitch, work.group_end - row, self.columns - col)


class ByteStore(RowStore):
    """Rows of 8-bit columns."""

    @property
    def itemsize(self) -> int:
        return 1


def make_store(view: cute.Tensor) -> RowStore:
    """Host side, of a tensor (T, columns[, half])."""
    itemsize = view.element_type.width // 8
    kind = ByteStore if itemsize == 1 else RowStore
    half = Int64(view.stride[2] * itemsize) if cute.rank(view) == 3 else Int64(0)
    return kind(view.iterator.toint(), Int64(view.stride[0]) * itemsize, Int32(view.shape[1]), half)


class Slots(slots.Slots):
    """`count` slots of 64 rows of 128 bytes, which a CTA fills and empties in turns: one barrier each. `rows`: that are
    stored of a slot, at most."""

    is_storing_warp = True

    def __init__(self, smem: cute.Pointer, dtype: type[cutlass.Numeric], count: int = SLOTS, rows: int = ROWS):
        self.dtype, self.rows, self.first = dtype, rows, Int32(smem.toint())
        layout = smem_layout(dtype, count)
        self.smem = cute.make_tensor(cute.recast_ptr(smem, layout.inner, dtype=dtype), layout.outer)
        self.cols = cute.size(self.smem, mode=[1])
        thread, _, _ = cute.arch.thread_idx()
        self.thread = anew(thread)

    def sync(self) -> None:
        cute.arch.sync_threads()

    def acquire(self) -> None:
        """A slot is free: since it was emptied, the other one was filled."""

    def write(self, values: cute.Tensor, slot: Int32 | int) -> None:
        """Converted registers, in the order of accumulators."""
        self.fill_piece(values, slot, 0)

    @cute.jit
    def fill_piece(self, values: cute.Tensor, slot: Int32 | int, piece: cutlass.Constexpr[int]):
        """The same of 16 of a slot's columns."""
        for i in cutlass.range_constexpr(cute.size(values) // 2):
            two = cute.make_tensor(values.iterator + 2 * i, cute.make_layout(2))
            cute.autovec_copy(two, self.pair(slot, 4 * piece + i))

    @cute.jit
    def bring(self, place: Place, slot: cutlass.Constexpr[int]):
        """Start to copy a place into a slot, zeros where it has none."""
        line, chunk = self.thread // CHUNKS, self.thread % CHUNKS
        elements = CHUNK_BYTES * 8 // self.dtype.width
        for i in cutlass.range_constexpr(ROWS // STEP):
            row = line + i * STEP
            is_inside = (row < place.rows) & (chunk * elements < place.columns)
            at = select(is_inside, place.address + row * place.pitch + chunk * CHUNK_BYTES, place.address)
            copy_chunk(self.first + slot * SLOT_BYTES + chunk_at(row, chunk), at, bytes_if(is_inside))

    def publish(self) -> None:
        """A filled slot is everyone's to read."""
        self.sync()

    def drain(self) -> None:
        """Slots were read when `start` returned."""

    def store(self, target: RowStore | None, place: Place, slot: Int32 | int, adds: Boolean | bool = False) -> None:
        """Empty a slot that was filled."""
        self.sync()
        self.start(None, place, slot, adds)

    @cute.jit
    def start(self, atom: None, place: Place, slot: Int32 | int, adds: Boolean | cutlass.Constexpr[bool] = False):
        """Write a published slot, or add it to what is there."""
        line, chunk = self.thread // CHUNKS, self.thread % CHUNKS
        elements = CHUNK_BYTES * 8 // self.dtype.width
        if chunk * elements < place.columns:
            for i in cutlass.range(self.rows // STEP, unroll=1):
                row = line + i * STEP
                if row < place.rows:
                    source = cute.local_tile(self.smem[row, None, slot], (elements,), (chunk,))
                    at = place.address + row * place.pitch + chunk * CHUNK_BYTES
                    there = cute.make_ptr(self.dtype, at, cute.AddressSpace.gmem, assumed_align=CHUNK_BYTES)
                    target = cute.make_tensor(there, cute.make_layout(elements))
                    if const_expr(isinstance(adds, bool)):
                        cute.autovec_copy(source, target)
                    else:
                        self._add(source, target, adds)

    @cute.jit
    def _add(self, source: cute.Tensor, target: cute.Tensor, adds: Boolean):
        """target = source, plus what target holds if it `adds`."""
        values = cute.make_rmem_tensor(cute.size(source), self.dtype)
        cute.autovec_copy(source, values)
        if adds:
            held = cute.make_rmem_tensor(cute.size(source), self.dtype)
            cute.autovec_copy(target, held)
            values.store((values.load().to(Float32) + held.load().to(Float32)).to(self.dtype))
        cute.autovec_copy(values, target)

    def put(
        self, values: cute.Tensor, target: RowStore | None, place: Place, slot: int, adds: Boolean | bool = False
    ) -> None:  # fmt: skip
        """Convert, stage and store a slot's worth of accumulators."""
        self.write(narrowed(values, self.dtype), slot)
        self.store(target, place, slot, adds)
