"""Stores of tiles: staging slots in shared memory, and the TMA stores that empty them.

Each MMA warpgroup stores its rows of a tile by itself, at most 64 rows at a time. It converts a chunk, at most 128
bytes of columns of these rows, and writes it into one of its `SLOTS` staging slots, whose swizzle is as wide as their
rows. Then one warp starts a TMA store of the slot.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp

from ...epilogue import slots
from ...epilogue.sizes import COLS, ROWS, SLOTS, THREADS
from ...epilogue.slots import columns, narrowed, smem_layout
from ...memory.ragged import clipped, ragged_rows
from ...schedule.work import WorkTile

# Named barrier 0 is the CTA's own.
FIRST_BARRIER = 1


class RaggedStore(NamedTuple):
    """A TMA store into a tensor (T, columns[, half]). It drops rows past the end of a group.

    Attributes:
        atom: the TMA copy of one slot.
        tensor: the tensor's ragged view (memory/ragged.py).
    """

    atom: cute.CopyAtom
    tensor: cute.Tensor

    def tile(
        self, work: WorkTile, row: Int32, col: Int32, half: Int32 | int | None = None, cols: int = COLS,
        rows: int = ROWS,
    ) -> cute.Tensor:  # fmt: skip
        """Return the destination [rows, cols] at (row, col), without the rows past the end of the tile's group.

        Args:
            work: the output tile, which says where its group ends.
            row, col: the first element of the destination in the tensor, or in the half.
            half: index of the half in which the columns are; None: the tensor has no mode for halves.
        """
        group = clipped(self.tensor, row, work.group_end)
        if half is not None:
            group = group[None, None, half]
        return self.cut(group, col, rows, cols)

    def cut(self, group: cute.Tensor, col: Int32, rows: int, cols: int) -> cute.Tensor:
        """Return the tile [rows, cols] at column `col` of `group`, a tensor whose first row is the tile's first row."""
        return cute.local_tile(cute.domain_offset((0, col), group), (rows, cols), (0, 0))


def make_store(tensor: cute.Tensor, rows: int = ROWS, cols: int | None = None) -> RaggedStore:
    """Host side: make the TMA descriptor for storing slots into a tensor (T, columns[, half]).

    Args:
        rows: rows of a slot.
        cols: columns of a slot; None: 128 bytes of columns.
    """
    cols = columns(tensor.element_type) if cols is None else cols
    atom, view = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileS2GOp(), ragged_rows(tensor), smem_layout(tensor.element_type, rows=rows, cols=cols),
        (rows, cols),
    )  # fmt: skip
    return RaggedStore(atom, view)


class Slots(slots.Slots):
    """A warpgroup's staging slots for TMA stores.

    An epilogue fills a slot from registers, starts its store, and fills it again once the store has read the slot.
    Accumulator order is the order of epilogue/fragments.py.

    Args:
        smem: the slots' shared memory, (row, column, slot).
        dtype: type of the slots' elements.
        warpgroup_index: index of the MMA warpgroup.
        thread: index of the thread in the warpgroup.
        chunks_per_tile: how many chunks, each of which fills a slot, the warpgroup stores for each tile.
    """

    def __init__(
        self, smem: cute.Tensor, dtype: type[cutlass.Numeric], warpgroup_index: Int32, thread: Int32,
        chunks_per_tile: int,
    ):  # fmt: skip
        self.dtype = dtype
        # Chunk c of every tile takes slot c % SLOTS. With an odd number of chunks, a tile's first slot is also the
        # previous tile's last one, so its store must have ended: no store may be pending.
        self.may_be_pending = SLOTS - 1 if chunks_per_tile % SLOTS == 0 else 0
        self.smem = smem
        self.cols = cute.size(smem, mode=[1])
        self.warpgroup_index = warpgroup_index
        self.chunks_per_tile = chunks_per_tile
        self.barrier = FIRST_BARRIER + warpgroup_index
        self.thread = thread
        self.is_storing_warp = cute.arch.make_warp_uniform(thread // 32) == 0
        self._partition()

    def _partition(self) -> None:
        """Prepare the stmatrix copy that writes the accumulators of 64 rows into a slot."""
        if self.dtype.width == 16:
            self.tiled_copy = self.matrix_copy(warp.StMatrix8x8x16bOp(False, 4))
            self.destination = self.tiled_copy.get_slice(self.thread).partition_D(self.smem)

    def matrix_copy(self, op: Any) -> cute.TiledCopy:
        """Make a copy between a slot's 16-bit elements and registers in accumulator order. op: ldmatrix or stmatrix."""
        k_major = OperandMajorMode.K
        shape = (ROWS, self.cols)
        mma = sm90_utils.make_trivial_tiled_mma(self.dtype, self.dtype, k_major, k_major, Float32, (1, 1, 1), shape)
        return cute.make_tiled_copy_C(cute.make_copy_atom(op, self.dtype), mma)

    def recast(self, dtype: type[cutlass.Numeric], cols: int | None = None) -> Slots:
        """Return the same shared memory as slots for elements of another type. cols: columns of a slot; None: 128 bytes
        of columns."""
        count, most = cute.size(self.smem, mode=[2]), columns(dtype)
        parts = () if cols in (None, most) else (most // cols,)
        layout = smem_layout(dtype, *parts, count, cols=cols)
        smem = cute.make_tensor(cute.recast_ptr(self.smem.iterator, layout.inner, dtype=dtype), layout.outer)
        slots = smem[None, None, 0, None] if parts else smem
        return type(self)(slots, dtype, self.warpgroup_index, self.thread, self.chunks_per_tile)

    def sync(self):
        """Wait for the other threads of the warpgroup."""
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=THREADS)

    @cute.jit
    def acquire(self):
        """Wait until the next slot is free, which means that the last store from it has read it."""
        if self.is_storing_warp:
            cute.arch.cp_async_bulk_wait_group(self.may_be_pending, read=True)
        self.sync()

    @cute.jit
    def fill(self, values: cute.Tensor, slot: cutlass.Constexpr[int]):
        """Wait for a free slot, then write registers in accumulator order into it, converted to the slot's dtype."""
        converted = narrowed(values, self.dtype)
        self.acquire()
        self.write(converted, slot)

    @cute.jit
    def write(self, values: cute.Tensor, slot: cutlass.Constexpr[int]):
        """Write registers in accumulator order, already of the slot's dtype, into a free slot."""
        if const_expr(self.dtype.width == 16):
            shape = self.destination[None, None, None, 0].shape
            source = cute.make_tensor(values.iterator, cute.make_layout(shape))
            cute.copy(self.tiled_copy, source, self.destination[None, None, None, slot])
        else:
            for i in cutlass.range_constexpr(cute.size(values) // 2):
                pair = cute.make_tensor(values.iterator + 2 * i, cute.make_layout(2))
                cute.autovec_copy(pair, self.pair(slot, i))

    @cute.jit
    def fill_piece(self, values: cute.Tensor, slot: Int32, piece: cutlass.Constexpr[int]):
        """Write 16 columns of a free slot, from 16-bit registers in accumulator order.

        Args:
            values: the thread's 16-bit registers of these columns.
            slot: the slot's index.
            piece: index of the 16 columns in the slot: column / 16.
        """
        target = cute.append_ones(self.destination[(None, piece), 0, 0, slot], 2)
        cute.copy(self.tiled_copy, cute.append_ones(values, 2), target)

    def publish(self):
        """Make filled slots (64 rows each in shared memory) visible to TMA; called by all threads of the warpgroup."""
        cute.arch.fence_proxy("async.shared", space="cta")
        self.sync()

    @cute.jit
    def start(self, atom: cute.CopyAtom, tile: cute.Tensor, slot: Int32 | int, policy: Int64 | None = None):
        """Start the TMA store of a slot, after `publish`; called by the storing warp alone.

        Args:
            atom: the TMA copy of one slot.
            tile: the destination in the output tensor.
            slot: the slot's index.
            policy: L2 policy; None: the default.
        """
        source, destination = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(self.smem, 0, 2), cute.group_modes(tile, 0, 2)
        )
        cute.copy(atom, source[None, slot], destination, cache_policy=policy)
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def store(self, target: RaggedStore, tile: cute.Tensor, slot: cutlass.Constexpr[int]):
        """Make a filled slot visible to TMA (`publish`), and start its store into `tile`, a tile of `target`."""
        self.publish()
        if self.is_storing_warp:
            self.start(target.atom, tile, slot)

    @cute.jit
    def put(self, values: cute.Tensor, target: RaggedStore, tile: cute.Tensor, slot: cutlass.Constexpr[int]):
        """Convert a chunk of accumulators to the slot's dtype, write them into the slot once it is free, and start its
        store."""
        self.fill(values, slot)
        self.store(target, tile, slot)

    def wait_all(self):
        """Wait until all stores have read their slots; called by the storing warp."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def drain(self):
        """Wait for all stores before the CTA ends, because they still read its shared memory."""
        if self.is_storing_warp:
            self.wait_all()
