"""Stores of tiles without TMA: a CTA writes a chunk into a slot in shared memory (epilogue/slots.py), then each thread
writes 16 bytes of a row at once to global memory."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from ..device.gmem import CHUNK_BYTES, bytes_if, copy_chunk
from ..device.opaque import opaque
from ..device.select import select
from ..epilogue import slots
from ..epilogue.sizes import ROWS, SLOT_BYTES, SLOTS
from ..epilogue.slots import narrowed, smem_layout
from ..schedule.work import WorkTile
from .operands import CHUNKS, STEP, chunk_at


class Place(NamedTuple):
    """The place, a rectangle of a matrix in global memory, that a slot is stored to or loaded from.

    Attributes:
        address: the address of the place's first element.
        pitch: bytes from row to row.
        rows, columns: how many rows (of the group, or of dw) and columns there are from the first element on. Elements
            of the slot past these rows or columns are not stored; a load fills them with zeros.
    """

    address: Int64
    pitch: Int64
    rows: Int32
    columns: Int32


class RowStore(NamedTuple):
    """Addresses by which tiles of a tensor of 16-bit elements in global memory are stored or loaded.

    Attributes:
        address: the address of the tensor's first element.
        pitch: bytes from row to row.
        columns: number of columns of the tensor, or of each half if it has halves.
        half: bytes from the first half to the second half; 0: there are no halves.
    """

    address: Int64
    pitch: Int64
    columns: Int32
    half: Int64

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 2

    @property
    def atom(self) -> None:
        """None: stores without TMA need no descriptor."""

    def tile(
        self, work: WorkTile, row: Int32, col: Int32, half: Int32 | int | None = None, cols: int = 0
    ) -> Place:  # fmt: skip
        """Return the place of a slot whose first element is (row, col), clipped at the group's end and at the last
        column.

        Args:
            half: 0 or 1; None: no halves.
            cols: not used.
        """
        address = self.address + Int64(row) * self.pitch + col * self.itemsize
        if half is not None:
            address += half * self.half
        return Place(address, self.pitch, work.group_end - row, self.columns - col)


class ByteStore(RowStore):
    """The `RowStore` of a tensor of 8-bit elements."""

    @property
    def itemsize(self) -> int:
        return 1


def make_store(view: cute.Tensor) -> RowStore:
    """Host side: make the RowStore of a tensor (T, columns[, half]); the ByteStore if elements have 8 bits."""
    itemsize = view.element_type.width // 8
    kind = ByteStore if itemsize == 1 else RowStore
    half = Int64(view.stride[2] * itemsize) if cute.rank(view) == 3 else Int64(0)
    return kind(view.iterator.toint(), Int64(view.stride[0]) * itemsize, Int32(view.shape[1]), half)


class Slots(slots.Slots):
    """A CTA's slots: `count` slots of 64 rows of 128 bytes in shared memory. They are filled and emptied one after the
    other, around the ring, with one barrier for each use of a slot.

    Args:
        smem: the first slot.
        rows: the greatest number of rows that are stored from a slot.
    """

    is_storing_warp = True

    def __init__(self, smem: cute.Pointer, dtype: type[cutlass.Numeric], count: int = SLOTS, rows: int = ROWS):
        self.dtype, self.rows, self.first = dtype, rows, Int32(smem.toint())
        layout = smem_layout(dtype, count)
        self.smem = cute.make_tensor(cute.recast_ptr(smem, layout.inner, dtype=dtype), layout.outer)
        self.cols = cute.size(self.smem, mode=[1])
        thread, _, _ = cute.arch.thread_idx()
        self.thread = opaque(thread)

    def sync(self) -> None:
        cute.arch.sync_threads()

    def acquire(self) -> None:
        """Do nothing: the next slot is free, since a barrier has come between its store and the filling of the other
        slot."""

    def write(self, values: cute.Tensor, slot: Int32 | int) -> None:
        """Write registers of dtype `dtype`, a whole chunk in the order of accumulators, into a slot."""
        self.fill_piece(values, slot, 0)

    @cute.jit
    def fill_piece(self, values: cute.Tensor, slot: Int32 | int, piece: cutlass.Constexpr[int]):
        """Write registers of dtype `dtype` into 16 columns of a slot. piece: index of these columns: column / 16."""
        for i in cutlass.range_constexpr(cute.size(values) // 2):
            two = cute.make_tensor(values.iterator + 2 * i, cute.make_layout(2))
            cute.autovec_copy(two, self.pair(slot, 4 * piece + i))

    @cute.jit
    def bring(self, place: Place, slot: cutlass.Constexpr[int]):
        """Start to copy a rectangle of a matrix in global memory into a slot (64 rows of 128 bytes in shared memory),
        by cp.async. The caller commits the copies and waits for them. Past the rectangle's rows and columns, the slot
        is filled with zeros.

        Args:
            place: the rectangle: its address, row distance, and number of rows and columns.
            slot: the slot's index.
        """
        line, chunk = self.thread // CHUNKS, self.thread % CHUNKS
        elements = CHUNK_BYTES * 8 // self.dtype.width
        for i in cutlass.range_constexpr(ROWS // STEP):
            row = line + i * STEP
            is_inside = (row < place.rows) & (chunk * elements < place.columns)
            at = select(is_inside, place.address + row * place.pitch + chunk * CHUNK_BYTES, place.address)
            copy_chunk(self.first + slot * SLOT_BYTES + chunk_at(row, chunk), at, bytes_if(is_inside))

    def publish(self) -> None:
        """Make a filled slot (64 rows in shared memory) visible to all threads."""
        self.sync()

    def drain(self) -> None:
        """Do nothing: when `start` returns, it has read its slot."""

    def store(self, target: RowStore | None, place: Place, slot: Int32 | int, adds: Boolean | bool = False) -> None:
        """Make a filled slot (64 rows of 128 bytes in shared memory) visible to all threads, and store it at `place`.

        Args:
            target: ignored.
            place: the place in global memory, a result of `RowStore.tile`.
            slot: the slot's index.
            adds: True: add the slot's numbers to the numbers in memory; False: overwrite these.
        """
        self.sync()
        self.start(None, place, slot, adds)

    @cute.jit
    def start(self, atom: None, place: Place, slot: Int32 | int, adds: Boolean | cutlass.Constexpr[bool] = False):
        """Store a slot (64 rows of 128 bytes in shared memory) at `place`. When the method returns, the slot has been
        read. Call `publish` first, so that all threads see the slot's numbers.

        Args:
            atom: ignored; stores by TMA take one.
            place: the place in global memory, a result of `RowStore.tile`.
            slot: the slot's index.
            adds: True: add the slot's numbers to the numbers in memory; False: overwrite these.
        """
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
        """Set target = source or, if `adds`, target += source, summed in float32."""
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
        """Convert a chunk of accumulators to `dtype`, and store it through a slot at `place` in global memory.

        Args:
            values: the chunk (64 rows of the tile, the columns of a slot), float32.
            target: ignored.
            place: the place in global memory, a result of `RowStore.tile`.
            slot: the slot's index.
            adds: True: add the converted numbers to the numbers in memory; False: overwrite these.
        """
        self.write(narrowed(values, self.dtype), slot)
        self.store(target, place, slot, adds)
