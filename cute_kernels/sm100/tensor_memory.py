"""Accumulators in tensor memory: their place, and who writes, reads and frees them.

Tensor memory has 128 lanes of 512 columns of 32 bits. A CTA has two accumulators; its tile number `turn` (0, 1, ...)
uses accumulator turn % 2. An accumulator of 128 x n takes n columns of all lanes; row r is in lane r (PTX ISA, "Data
path layout organization", M = 128). A warp can read 32 lanes, from lane 32 (warp % 4) on.

`tcgen05.ld.16x256b` reads 16 lanes and 8 columns, and leaves them in registers as an MMA of 16 x 8 would. So a slab (64
rows) is 16 lanes of each of a warpgroup's four warps, and epilogues find accumulators in the same registers as after
Hopper's wgmma (epilogue/fragments.py).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import tcgen05

from ..device.invariant import Invariant
from ..device.select import select
from ..device.warps import WARP
from ..epilogue.fragments import Accumulators
from ..epilogue.sizes import ROWS, THREADS
from ..tiles import PINGPONG_WARPGROUPS, TileConfig

# A tensor memory address holds the lane in its upper half.
LANE = 1 << 16
WARP_LANES, SLAB_LANES = 32, 16
# Columns of one read: ptxas requires that an instruction's registers, here 64, fit into a thread's registers at launch.
READ_COLUMNS = 128
# Columns of one read of whole rows (`ShuffledAccumulators`), whose registers are needed in addition to the slab's.
ROW_COLUMNS = 32
NUM_ACCUMULATORS = PINGPONG_WARPGROUPS
NUM_BARRIERS = 2 * NUM_ACCUMULATORS


class TensorMemory(Invariant):
    """A CTA's two accumulators, their mbarriers, and further columns of tensor memory after the accumulators.

        barrier of an accumulator    arrivals
        full                         1, by the commit of the MMA warp
        empty                        1 of each thread of the warpgroup that reads the accumulator

    Args:
        barriers: NUM_BARRIERS mbarriers.
        place: the word in shared memory to which the allocation writes the address of the columns.
        more: number of columns after the accumulators, for scales.
    """

    def __init__(self, tile: TileConfig, barriers: cute.Pointer, place: cute.Pointer, more: int = 0):
        self.tile = tile
        self.columns = 1 << (NUM_ACCUMULATORS * tile.n + more - 1).bit_length()
        self.full = barriers
        self.empty = barriers + NUM_ACCUMULATORS
        self.place = place
        self.base: Any = None

    @cute.jit
    def make(self):
        """Initialise the barriers and allocate the columns; called by the MMA warp before the CTA's first barrier."""
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(NUM_ACCUMULATORS):
                cute.arch.mbarrier_init(self.full + i, 1)
                cute.arch.mbarrier_init(self.empty + i, THREADS)
        cute.arch.alloc_tmem(self.columns, self.place)
        cute.arch.relinquish_tmem_alloc_permit()

    def found(self) -> None:
        """Read the address of the allocated columns from shared memory; called by all threads once it is visible."""
        self.base = cute.arch.retrieve_tmem_ptr(Float32, 16, self.place)

    def free(self) -> None:
        """Free the columns; called by the MMA warp when no warp reads them any more."""
        cute.arch.dealloc_tmem(self.base, self.columns)

    def accumulator(self, turn: Int32, layout: cute.Layout) -> cute.Tensor:
        """Return the accumulator of tile number `turn`, in the layout in which MMAs write it."""
        return cute.make_tensor(self.base + turn % NUM_ACCUMULATORS * self.tile.n, layout)

    def after(self, column: int, dtype: type[cutlass.Numeric]) -> cute.Pointer:
        """Return the address of column number `column` after the accumulators, as a pointer to `dtype`."""
        return cute.recast_ptr(self.base + NUM_ACCUMULATORS * self.tile.n + column, dtype=dtype)

    def wait_empty(self, turn: Int32) -> None:
        """Wait until the accumulator of tile number `turn` may be overwritten."""
        cute.arch.mbarrier_wait(self.empty + turn % NUM_ACCUMULATORS, turn // NUM_ACCUMULATORS % 2 ^ 1)

    @cute.jit
    def commit(self, turn: Int32):
        """Mark the accumulator of tile number `turn` as full once all MMAs issued so far are done; called by the MMA
        warp."""
        with cute.arch.elect_one():
            tcgen05.commit(self.full + turn % NUM_ACCUMULATORS)

    def wait_full(self, turn: Int32) -> None:
        """Wait until the accumulator of tile number `turn` has all its sums."""
        cute.arch.mbarrier_wait(self.full + turn % NUM_ACCUMULATORS, turn // NUM_ACCUMULATORS % 2)


class TileAccumulators(Accumulators):
    """A tile's sums in tensor memory, read slab by slab by the warpgroup that runs the tile's epilogue.

    Reading the last slab frees the accumulator.

    Args:
        index: index of the accumulator, 0 or 1.
        thread: the thread's index in the warpgroup.
        has_sums: False: nothing was multiplied, and `slab` returns zeros. None: every tile multiplies something.
    """

    def __init__(self, memory: TensorMemory, index: Int32, thread: Int32, has_sums: Boolean | None):
        self.memory = memory
        self.index = index
        self.thread = thread
        self.has_sums = has_sums

    @cute.jit
    def slab(self, slab: cutlass.Constexpr[int]):
        """Read the thread's accumulators of slab number `slab` (64 rows of the tile) into registers."""
        memory, n = self.memory, self.memory.tile.n
        acc = cute.make_rmem_tensor(ROWS * n // THREADS, Float32)
        for part in cutlass.range_constexpr(n // READ_COLUMNS):
            self._read(acc, slab, part)
        cute.arch.fence_view_async_tmem_load()
        if const_expr(slab == memory.tile.slabs - 1):
            cute.arch.mbarrier_arrive(memory.empty + self.index)
        if const_expr(self.has_sums is not None):
            if not self.has_sums:
                acc.fill(0.0)
        return acc

    @cute.jit
    def _read(self, acc: cute.Tensor, slab: cutlass.Constexpr[int], part: cutlass.Constexpr[int]):
        """Read columns part * READ_COLUMNS to (part + 1) * READ_COLUMNS - 1 of a slab into their registers of `acc`.

        acc: the thread's registers for one slab (64 rows of the tile).
        """
        memory = self.memory
        column = self.index * memory.tile.n + part * READ_COLUMNS
        address = memory.base.toint() + column + slab * (SLAB_LANES * LANE)
        base = cute.make_ptr(Float32, address, cute.AddressSpace.tmem, assumed_align=16)
        rows = (SLAB_LANES, ROWS // SLAB_LANES), (LANE, WARP_LANES * LANE)
        layout = cute.make_layout((rows[0], READ_COLUMNS), stride=(rows[1], 1))
        lanes = cute.make_tensor(base, layout)
        atom = cute.make_copy_atom(tcgen05.Ld16x256bOp(tcgen05.Repetition(READ_COLUMNS // 8)), Float32)
        copy = tcgen05.make_tmem_copy(atom, lanes).get_slice(self.thread)
        places = copy.partition_D(cute.make_identity_tensor((ROWS, READ_COLUMNS)))
        count = ROWS * READ_COLUMNS // THREADS
        target = cute.make_tensor(acc.iterator + part * count, cute.make_layout(places.shape))
        cute.copy(copy, copy.partition_S(lanes), target)


class ShuffledAccumulators(TileAccumulators):
    """A tile's sums in tensor memory, read by `tcgen05.ld.32x32b` and shuffles, for builds that avoid the construct
    "tmem_loads" (plain.py).

    The load gives each lane one row. Then the lanes of a warp exchange values: for each 8 columns, lane l needs columns
    2 (l % 4) and 2 (l % 4) + 1 of the slab's rows l / 4 and l / 4 + 8. A shuffle sends the same register of each lane,
    so each value takes four shuffles, one for each l % 4.
    """

    @cute.jit
    def _read(self, acc: cute.Tensor, slab: cutlass.Constexpr[int], part: cutlass.Constexpr[int]):
        for first in cutlass.range_constexpr(part * READ_COLUMNS, (part + 1) * READ_COLUMNS, ROW_COLUMNS):
            rows = self._rows(first)
            cute.arch.fence_view_async_tmem_load()
            for column in cutlass.range_constexpr(0, ROW_COLUMNS, 8):
                for half in cutlass.range_constexpr(2):
                    self._exchange(acc, first + column, rows, column, slab, half)

    def _rows(self, first: int) -> cute.Tensor:
        """Return registers with ROW_COLUMNS columns of this lane's row of the tile, from column `first` on."""
        memory = self.memory
        address = memory.base.toint() + self.index * memory.tile.n + first
        base = cute.make_ptr(Float32, address, cute.AddressSpace.tmem, assumed_align=16)
        lanes = cute.make_tensor(base, cute.make_layout((THREADS, ROW_COLUMNS), stride=(LANE, 1)))
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(ROW_COLUMNS)), Float32)
        copy = tcgen05.make_tmem_copy(atom, lanes).get_slice(self.thread)
        places = copy.partition_D(cute.make_identity_tensor((THREADS, ROW_COLUMNS)))
        rows = cute.make_rmem_tensor(ROW_COLUMNS, Float32)
        cute.copy(copy, copy.partition_S(lanes), cute.make_tensor(rows.iterator, cute.make_layout(places.shape)))
        return rows

    @cute.jit
    def _exchange(
        self, acc: cute.Tensor, to: cutlass.Constexpr[int], rows: cute.Tensor, column: cutlass.Constexpr[int],
        slab: cutlass.Constexpr[int], half: cutlass.Constexpr[int],
    ):  # fmt: skip
        """Set two of this lane's accumulators, which lie in one row and 8 columns of the slab, by shuffles within the
        warp.

        Each lane has read columns of one whole row (`_rows`), but needs two neighbouring columns of a row that another
        lane has read. A slab is 64 rows of the tile, 16 for each of the four warps.

        Args:
            acc: this lane's accumulators of the slab, of which two are set.
            to: the first of the 8 columns in the slab.
            rows, column: registers of this lane's row (`_rows`), and the first of the 8 columns in them.
            half: 0: the upper 8 of a warp's 16 rows of the slab; 1: the lower 8.
        """
        lane = self.thread % WARP
        source = slab * SLAB_LANES + half * (SLAB_LANES // 2) + lane // 4
        for i in cutlass.range_constexpr(2):
            value = Float32(0.0)
            for pair in cutlass.range_constexpr(4):
                passed = cute.arch.shuffle_sync(rows[column + 2 * pair + i], source)
                value = select(lane % 4 == pair, passed, value)
            acc[to // 2 + 2 * half + i] = value
