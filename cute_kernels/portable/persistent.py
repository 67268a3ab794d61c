"""A persistent kernel without warp roles: every warp finds its tiles itself, copies, multiplies and stores."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint8

from ..device.gmem import CHUNK_BYTES
from ..device.invariant import Invariant
from ..device.naming import name_kernel
from ..device.warps import last_lane
from ..epilogue.fragments import TileShare
from ..epilogue.sizes import ROWS, THREADS
from ..schedule.groups import Groups
from ..schedule.tile_scheduler import GroupTileScheduler
from ..schedule.work import TileGrid, WorkTile
from ..tiles import TileConfig
from .mainloop import CTAS_PER_SM, SMEM_BYTES, Mainloop
from .store import Slots


class TileWalk(GroupTileScheduler):
    """The tile scheduler of kernels without a scheduler warp: the warps that multiply also find their tiles."""

    def _tile_at(self, index: Int32, begin: Int32, end: Int32, rank: Int32) -> tuple[Int32, ...]:
        m_tile, n_tile = self._cluster_tile_at(index, end - begin)
        return self._first_row(begin, m_tile), end, m_tile, n_tile, Int32(0)


def rounded_up(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to a multiple of 16."""
    return -(-num_bytes // CHUNK_BYTES) * CHUNK_BYTES


class States(Invariant):
    """Factory of an epilogue's states: a tile has one state before the mainloop and another after it.

    With one state for the whole kernel, its addresses would stay in registers that the mainloop needs: 72 bytes were
    spilled on sm_80, 104 on sm_86.

    own: the epilogue's tensors in shared memory besides the slots, by name.
    """

    def __init__(self, tile: TileConfig, epilogue: Any, inputs: Any, groups: Groups, smem: cute.Pointer, own: dict):
        self.tile, self.epilogue, self.own = tile, epilogue, own
        self.inputs, self.groups, self.smem = inputs, groups, smem

    def new(self) -> Any:
        """Return a new state of the epilogue, for the current tile."""
        slots = Slots(self.smem, self.epilogue.dtype, self.epilogue.shape.slots.count, min(self.tile.m, ROWS))
        return self.epilogue.make_state(self.inputs, self.groups, slots, self.own, None)


class TileKernel(Invariant):
    """A persistent kernel without warp roles: all warps of a CTA do the same work on one output tile after another.

    CTA c of G takes tiles c, c + G, c + 2G, ... It finishes a tile, from its first copy to its last store, before it
    begins the next tile. A run is 1 or 2 k-tiles (`mainloop.py`).

    phase        all warps wait for                              then
    mainloop     own copies of a run, barrier (CTA)              start copies of a later run, multiply this run
    epilogue     barrier (CTA) after the last run                fill and store each slot, with a barrier (CTA) between
    next tile    barrier (CTA) after the last slot               first copies of the next tile

    Timeline of a tile:

    1. The epilogue's `begin` fetches row scales and biases.
    2. The mainloop starts to fill all stages except one run's, then multiplies one run after the other while copies
       of later runs arrive.
    3. After the last run the stages' memory is free. The epilogue's slots lie there, and results pass through them to
       global memory. Meanwhile the SM's other CTA can multiply.
    """

    walk: Any = TileWalk

    def __init__(self, name: str, dtype: type[cutlass.Numeric], tile: TileConfig, epilogue: Any):
        self.name, self.dtype, self.tile, self.epilogue = name, dtype, tile, epilogue

    def make_operands(self) -> tuple[Any, Any]:
        """Return operands A and B (operands.py): objects that copy an operand to shared memory and read it there."""
        raise NotImplementedError

    def multiply(self, mainloop: Mainloop, acc: cute.Tensor, operands: Any, work: WorkTile) -> None:
        """Run the mainloop over the whole contraction of a tile.

        Args:
            acc: the thread's accumulators.
            operands: the kernel's run-time inputs of A and B.
            work: the output tile.
        """
        raise NotImplementedError

    @cute.jit
    def start(
        self, operands: Any, stores: Any, inputs: Any, groups: Groups, grid: TileGrid, num_sms: Int32,
        stream: Any,
    ):  # fmt: skip
        """Launch the kernel, two CTAs on each SM.

        Args:
            operands, inputs: run-time inputs of the mainloop and of the epilogue.
            stores: a `RowStore` (the address of an output tensor and its shape) for each output tensor.
        """
        small = sum(rounded_up(field.num_bytes) for field in self.epilogue.shape.smem)
        name_kernel(self.kernel, self.name)
        self.kernel(operands, stores, inputs, groups, grid).launch(
            grid=(num_sms * CTAS_PER_SM, 1, 1),
            block=(THREADS, 1, 1),
            smem=SMEM_BYTES + small,
            min_blocks_per_mp=CTAS_PER_SM,
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, operands: Any, stores: Any, inputs: Any, groups: Groups, grid: TileGrid):
        smem = cute.arch.get_dyn_smem(Uint8, alignment=1024)
        first = smem.toint()
        mainloop = Mainloop(self.dtype, self.tile, *self.make_operands(), first)
        own, at = {}, SMEM_BYTES
        for field in self.epilogue.shape.smem:
            pointer = cute.make_ptr(field.dtype, first + at, cute.AddressSpace.smem, assumed_align=CHUNK_BYTES)
            own[field.name] = cute.make_tensor(pointer, cute.make_layout(field.shape))
            at += rounded_up(field.num_bytes)
        states = States(self.tile, self.epilogue, inputs, groups, smem, own)
        acc = cute.make_rmem_tensor(self.tile.accumulators, Float32)
        walk = self.walk(self.tile, groups, grid)
        tile, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        tiles_before = Int32(0)
        window = walk._load_window(Int32(0), Int32(0), tiles_before)
        window_end = last_lane(window.tiles_end)
        more = Boolean(True)
        while more:
            while (tile >= window_end) & (window.base + 32 < groups.count):
                tiles_before = window_end
                window = walk._load_window(window.base + 32, last_lane(window.end), tiles_before)
                window_end = last_lane(window.tiles_end)
            more = tile < window_end
            if more:
                work = walk._tile_in_window(window, tile, tiles_before)
                self._make(mainloop, states, acc, work, operands, stores)
            tile += blocks

    @cute.jit
    def _make(
        self, mainloop: Mainloop, states: States, acc: cute.Tensor, work: WorkTile, operands: Any, stores: Any
    ):  # fmt: skip
        """Make one tile of the output, from the first copy to the last store.

        Args:
            states: makes the epilogue's states.
            acc: the thread's accumulators.
            work: the output tile.
            operands: run-time inputs of the mainloop.
            stores: a `RowStore` (the address of an output tensor and its shape) for each output tensor.
        """
        share = TileShare(Int32(0), Int32(0))
        acc.fill(0.0)
        prefetched = self.epilogue.begin(states.new(), work, share)
        self.multiply(mainloop, acc, operands, work)
        mainloop.add_up(acc)
        self.epilogue.finish(states.new(), acc, prefetched, stores, work, share)
        cute.arch.sync_threads()
