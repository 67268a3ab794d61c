"""TMA loads of dw's previous values into a warpgroup's staging slots, for weight gradients that add to dw.

An element's previous value and its sum have the same place in a slot. So a warpgroup reads a slot, adds its
accumulators and overwrites the slot with the sums.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warp

from ...device.invariant import Invariant
from ...device.select import select
from ...epilogue.sizes import SLOT_BYTES, SLOTS
from .store import Slots


class TileLoads(NamedTuple):
    """A TMA load from dw into one slot.

    Attributes:
        atom: the TMA copy.
        tensor: dw's coordinates (n, k, lo, hi), where (lo, hi) is the expert (memory/weights.py).
    """

    atom: cute.CopyAtom
    tensor: cute.Tensor


class SlotBarriers(Invariant):
    """Full barriers (mbarriers) of a CTA's staging slots, one for each slot of every warpgroup. A slot is a buffer of
    64 rows of 128 bytes.

    A slot is full after 1 arrival, of the storing warp when it starts the load, and the slot's bytes from TMA.
    """

    def __init__(self, barriers: cute.Pointer, num_warpgroups: int):
        self.full = barriers
        self.count = SLOTS * num_warpgroups

    @cute.jit
    def make(self):
        """Initialise the barriers; called by all threads, before `pipeline_init_arrive`."""
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.count):
                    cute.arch.mbarrier_init(self.full + i, 1)


class SlotLoads(Invariant):
    """Loads into one warpgroup's slots.

    The loads of each slot are numbered from 0. The warpgroup must wait for every load: an mbarrier's phase has one bit,
    so `wait` tells only odd from even numbers.
    """

    def __init__(self, barriers: SlotBarriers, slots: Slots):
        self.full = barriers.full + slots.warpgroup_index * SLOTS
        self.slots = slots
        if slots.dtype.width == 16:
            self.tiled_copy = slots.matrix_copy(warp.LdMatrix8x8x16bOp(False, 4))
            self.source = self.tiled_copy.get_slice(slots.thread).partition_S(slots.smem)

    @cute.jit
    def start(self, atom: cute.CopyAtom, tile: cute.Tensor, slot: cutlass.Constexpr[int]):
        """Start loading a tile of dw into a free slot; called by the storing warp.

        Args:
            atom: the TMA copy (`TileLoads`).
            tile: the tile of dw, which fills the slot.
            slot: the slot's index.
        """
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + slot, SLOT_BYTES)
        smem = cute.group_modes(self.slots.smem, 0, 2)
        to, source = cpasync.tma_partition(atom, 0, cute.make_layout(1), smem, cute.group_modes(tile, 0, 2))
        cute.copy(atom, source, to[None, slot], tma_bar_ptr=self.full + slot)

    def wait(self, slot: int, number: Int32) -> None:
        """Wait for load number `number` of a slot. The loads of each slot are numbered from 0."""
        cute.arch.mbarrier_wait(self.full + slot, number % 2)

    @cute.jit
    def add(self, values: cute.Tensor, slot: cutlass.Constexpr[int], adds: Boolean):
        """If `adds`, add the loaded values of a slot to `values`, the thread's accumulators of the same elements."""
        dtype = self.slots.dtype
        loaded = cute.make_rmem_tensor(cute.size(values), dtype)
        if const_expr(dtype.width == 16):
            source = self.source[None, None, None, slot]
            cute.copy(self.tiled_copy, source, cute.make_tensor(loaded.iterator, cute.make_layout(source.shape)))
        else:
            for i in cutlass.range_constexpr(cute.size(values) // 2):
                pair = cute.make_tensor(loaded.iterator + 2 * i, cute.make_layout(2))
                cute.autovec_copy(self.slots.pair(slot, i), pair)
        for i in cutlass.range_constexpr(cute.size(values)):
            values[i] = values[i] + select(adds, Float32(loaded[i]), Float32(0.0))
