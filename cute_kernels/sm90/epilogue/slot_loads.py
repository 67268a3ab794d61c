"""TMA loads, into a warpgroup's staging slots, of values that are added to its accumulators.

An element's loaded value and its sum have the same place in a slot, so a warpgroup reads the slot, adds its
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
    """A TMA load of one slot: the copy, and the coordinates (n, k, lo, hi) of dw, from which it loads."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class SlotBarriers(Invariant):
    """Full barriers of a CTA's staging slots, one for each slot of every warpgroup.

    A slot is full once the storing warp, which starts the load, has arrived and TMA has written the slot's bytes.
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
    """Loads into one warpgroup's slots. The loads of each slot are numbered from 0; the warpgroup must wait for every
    load, since `wait` tells only odd from even numbers."""

    def __init__(self, barriers: SlotBarriers, slots: Slots):
        self.full = barriers.full + slots.warpgroup_index * SLOTS
        self.slots = slots
        if slots.dtype.width == 16:
            self.tiled_copy = slots.matrix_copy(warp.LdMatrix8x8x16bOp(False, 4))
            self.source = self.tiled_copy.get_slice(slots.thread).partition_S(slots.smem)

    @cute.jit
    def start(self, atom: cute.CopyAtom, tile: cute.Tensor, slot: cutlass.Constexpr[int]):
        """Start loading `tile` into a free slot; called by the storing warp."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + slot, SLOT_BYTES)
        smem = cute.group_modes(self.slots.smem, 0, 2)
        to, source = cpasync.tma_partition(atom, 0, cute.make_layout(1), smem, cute.group_modes(tile, 0, 2))
        cute.copy(atom, source, to[None, slot], tma_bar_ptr=self.full + slot)

    def wait(self, slot: int, number: Int32) -> None:
        """Wait for load number `number` of a slot."""
        cute.arch.mbarrier_wait(self.full + slot, number % 2)

    @cute.jit
    def add(self, values: cute.Tensor, slot: cutlass.Constexpr[int], adds: Boolean):
        """Add a loaded slot to `values`, the accumulators of its elements, if `adds`; else leave `values` as they
        are.
        """
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
