"""Storing tiles: staging slots in shared memory, and TMA stores that never touch a neighbour's rows.

Each MMA warpgroup owns 64 rows of a tile and works alone: it converts 64 columns at a time, writes them into one of its
`SLOTS` staging slots (64 x 64, 128-byte swizzle, stmatrix), and one warp starts a TMA store of the slot.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from ..invariant import Invariant
from .tile_scheduler import WorkTile

ROWS = 64
COLS = 64
SLOTS = 2
THREADS = 128
CHUNK_REGS = ROWS * COLS // THREADS
# Named barrier 0 is the CTA's own.
FIRST_BARRIER = 1


class RaggedStore(NamedTuple):
    """A TMA store whose rows end where a group ends."""

    atom: cute.CopyAtom
    tensor: cute.Tensor
    rows: Int32


def smem_layout(dtype: type[cutlass.Numeric]) -> cute.ComposedLayout:
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, (ROWS, COLS), order=(0, 1))


def staging_layout(dtype: type[cutlass.Numeric], num_warpgroups: int) -> cute.ComposedLayout:
    """(ROWS, COLS, slot, warpgroup) of the staging buffer."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, (ROWS, COLS, SLOTS, num_warpgroups), order=(0, 1, 2, 3))


def ragged_rows(tensor: cute.Tensor) -> cute.Tensor:
    """A view (row, column modes..., end) of tensor (T, column modes...) that clips rows at `end`, not at T.

    Row mode and end mode both have the row's stride, and the base lies T rows before the tensor. Coordinates
    (row + T - end, ..., end) then address `row`, and rows from `end` on are past the row mode's bound T: the TMA unit
    drops them. No descriptor changes between groups, and a tile that starts past its group stores nothing.
    """
    rows = tensor.shape[0]
    shape = (*tensor.shape, rows + 1)
    stride = (*tensor.stride, tensor.stride[0])
    base = cute.domain_offset((-rows, *[0] * (cute.rank(tensor) - 1)), tensor).iterator
    return cute.make_tensor(base, cute.make_layout(shape, stride=stride))


def make_store(tensor: cute.Tensor) -> RaggedStore:
    """Host side: the descriptor for storing 64 x 64 slots into tensor (T, columns[, half])."""
    atom, view = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileS2GOp(), ragged_rows(tensor), smem_layout(tensor.element_type), (ROWS, COLS)
    )
    return RaggedStore(atom, view, tensor.shape[0])


def halves(tensor: cute.Tensor) -> cute.Tensor:
    """A concat preactivation [T, 2I] as (T, I, half): each half clips at its own last column."""
    rows, cols = tensor.shape
    half = cols // 2
    return cute.make_tensor(tensor.iterator, cute.make_layout((rows, half, 2), stride=(*tensor.stride, half)))


class Slots(Invariant):
    """A warpgroup's staging slots: fill one from registers, store it, reuse it when its store has been read."""

    def __init__(
        self, staging: cute.Tensor, dtype: type[cutlass.Numeric], warpgroup_index: Int32, thread: Int32,
        chunks_per_tile: int,
    ):  # fmt: skip
        self.dtype = dtype
        # Chunk c of every tile takes slot c % SLOTS. With an odd count a tile's first slot is the one before's last.
        self.may_be_pending = SLOTS - 1 if chunks_per_tile % SLOTS == 0 else 0
        self.smem = staging[None, None, None, warpgroup_index]
        self.barrier = FIRST_BARRIER + warpgroup_index
        self.thread = thread
        self.is_storing_warp = cute.arch.make_warp_uniform(thread // 32) == 0
        mma = sm90_utils.make_trivial_tiled_mma(
            dtype, dtype, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), (ROWS, COLS)
        )
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
        self.tiled_copy = cute.make_tiled_copy_C(atom, mma)
        self.destination = self.tiled_copy.get_slice(thread).partition_D(self.smem)

    def sync(self):
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=THREADS)

    @cute.jit
    def acquire(self):
        """Wait until the store that last used the next slot has read it."""
        if self.is_storing_warp:
            cute.arch.cp_async_bulk_wait_group(self.may_be_pending, read=True)
        self.sync()

    @cute.jit
    def store(self, target: RaggedStore, work: WorkTile, row: Int32, col: Int32, half: cutlass.Constexpr, slot: int):
        """Publish a filled slot and start its store at (row, col) of the output."""
        cute.arch.fence_proxy("async.shared", space="cta")
        self.sync()
        if self.is_storing_warp:
            half_mode = () if const_expr(half is None) else (half,)
            at = (None, None, *half_mode, work.group_end)
            tensor = target.tensor[at]
            tensor = cute.domain_offset((row + target.rows - work.group_end, col), tensor)
            tile = cute.local_tile(tensor, (ROWS, COLS), (0, 0))
            source, destination = cpasync.tma_partition(
                target.atom, 0, cute.make_layout(1), cute.group_modes(self.smem, 0, 2), cute.group_modes(tile, 0, 2)
            )
            cute.copy(target.atom, source[None, slot], destination)
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def put(self, values: cute.Tensor, target: RaggedStore, work: WorkTile, row: Int32, col: Int32, half, slot: int):
        """Convert CHUNK_REGS accumulator registers, stage and store them."""
        out = cute.make_rmem_tensor(self.destination[None, None, None, 0].shape, self.dtype)
        flat = cute.make_tensor(out.iterator, cute.make_layout(values.shape))
        flat.store(values.load().to(self.dtype))
        self.acquire()
        cute.copy(self.tiled_copy, out, self.destination[None, None, None, slot])
        self.store(target, work, row, col, half, slot)

    @cute.jit
    def drain(self):
        """Before the CTA ends: shared memory must outlive its stores' reads."""
        if self.is_storing_warp:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
