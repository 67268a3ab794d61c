"""Epilogue of a weight gradient. It overwrites dw or adds to it.

It adds in memory, by a TMA reduction, or in registers, after loading dw's previous values.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint8, const_expr

from ...device.gmem import vector_at
from ...device.invariant import Invariant
from ...epilogue.fragments import TileShare, chunk_of, slab_of
from ...epilogue.shape import EpilogueShape, KernelEpilogue, SlotShape, Smem
from ...epilogue.sizes import ROWS, SLOTS
from ...epilogue.slots import columns, narrowed
from ...memory.weights import EVICT_FIRST, ExpertAddress, expert_offset, lo_hi
from ...schedule.groups import Groups
from ...schedule.work import WorkTile
from ...tiles import PINGPONG_WARPGROUPS, TileConfig
from .slot_loads import SlotBarriers, SlotLoads, TileLoads
from .store import Slots


class WgradInputs(NamedTuple):
    """Inputs of the epilogue.

    Attributes:
        address: where each expert's dw lies in memory.
        mask: address of bool [E]: group e adds to dw[e] if mask[e] is true. 0: `accumulate` decides.
        accumulate: without a mask, all groups add to dw if this is not 0; else all overwrite dw.
        loads_dw: True: groups that add load dw's previous values and add them in registers. False: TMA adds in memory.
        loads: TMA loads of dw's previous values.
    """

    address: ExpertAddress
    mask: Int64
    accumulate: Int32
    loads_dw: Boolean
    loads: TileLoads


class WgradStores(NamedTuple):
    """Two TMA stores into dw.

    Attributes:
        overwrite: TMA copy that overwrites dw.
        add: TMA copy that adds to dw.
        tensor: dw's coordinates (n, k, lo, hi), where (lo, hi) is the expert (memory/weights.py).
    """

    overwrite: cute.CopyAtom
    add: cute.CopyAtom
    tensor: cute.Tensor


class WgradState(Invariant):
    """State of a warpgroup's epilogue of a weight gradient: its inputs, its slots, and the loads into these slots."""

    def __init__(
        self, inputs: WgradInputs, slots: Slots, barriers: SlotBarriers, loads_type: type[SlotLoads]
    ):  # fmt: skip
        self.inputs = inputs
        self.slots = slots
        self.loads = loads_type(barriers, slots)


class WgradEpilogue(KernelEpilogue):
    """Epilogue that converts accumulators to dw's type, `dtype`, and overwrites dw or adds to it. Results pass through
    staging slots (64 rows of 128 bytes each in shared memory). A chunk is the part of dw that fills one slot.

    The stores mark dw as the first to leave L2, since the kernel does not read it again (saves up to 9 % of
    gpt-oss-120b's time under skew).

    loads_type: class of the loads of dw's previous values into staging slots.
    """

    loads_type: type[SlotLoads] = SlotLoads

    def __init__(self, dtype: type[cutlass.Numeric], tile: TileConfig):
        self.dtype = dtype
        self.tile = tile
        self.cols = columns(dtype)
        self.chunks_per_slab = tile.n // self.cols
        self.num_chunks = tile.slabs * self.chunks_per_slab

    @property
    def shape(self) -> EpilogueShape:
        return EpilogueShape(SlotShape(self.dtype, self.num_chunks), load_barriers=SLOTS * self.tile.warpgroups)

    def make_ring(self, barriers: cute.Pointer, staging: cute.Tensor) -> SlotBarriers:
        made = SlotBarriers(barriers, self.tile.warpgroups)
        made.make()
        return made

    def make_state(
        self, inputs: WgradInputs, groups: Groups, slots: Slots, smem: Smem, barriers: SlotBarriers
    ) -> WgradState:
        return WgradState(inputs, slots, barriers, self.loads_type)

    def _tiles(self, tensor: cute.Tensor, state: WgradState, work: WorkTile, share: TileShare) -> list[cute.Tensor]:
        """Return the tiles of dw to which a warpgroup stores its accumulators, slab by slab (64 rows of dw). Each tile
        has the 64 rows and the columns of one chunk, which fills one slot.

        Args:
            tensor: the TMA view of dw; the results are tiles of this view.
            share: which slabs of the CTA's tile the warpgroup has.
        """
        lo, hi = lo_hi(expert_offset(state.inputs.address, work.expert))
        first_row = self._first_row(work, share)
        first_n = work.n_tile * self.chunks_per_slab
        across = self.chunks_per_slab
        places = [(first_row, chunk // across, first_n + chunk % across) for chunk in range(self.num_chunks)]
        return [self._tile(tensor[None, None, lo, hi], *place) for place in places]

    def _first_row(self, work: WorkTile, share: TileShare) -> Int32:
        """Return where the rows of dw begin that a warpgroup computes, as a number of slabs (64 rows of dw).

        A subclass may count in another unit, as long as its `_tile` takes the same unit.
        """
        return work.m_tile * (self.tile.m // ROWS) + share.first_slab

    def _tile(self, dw: cute.Tensor, first_row: Int32, slab: int, column: Int32) -> cute.Tensor:
        """Return the tile of dw, 64 rows by `cols` columns, to which one chunk is stored. A chunk is what one slot (a
        staging buffer in shared memory) holds.

        Args:
            dw: an expert's dw [N, K].
            first_row: where the rows that the warpgroup computes begin, as a number of slabs of 64 rows (`_first_row`).
            slab: index of the chunk's slab (64 rows of dw) among the warpgroup's slabs.
            column: index of the chunk along dw's columns, in units of `cols`.
        """
        return cute.local_tile(dw, (ROWS, self.cols), (first_row + slab, column))

    @cute.jit
    def begin(self, state: WgradState, work: WorkTile, share: TileShare) -> Boolean:
        """Return True if this tile adds to dw, False if it overwrites dw.

        If `inputs.loads_dw`, also start loading dw's previous values of the first SLOTS chunks.
        """
        adds = state.inputs.accumulate != 0
        if state.inputs.mask != 0:
            adds = vector_at(Uint8, state.inputs.mask)[work.expert] != 0
        if state.inputs.loads_dw & state.slots.is_storing_warp:
            state.slots.wait_all()
            sources = self._tiles(state.inputs.loads.tensor, state, work, share)
            for chunk in cutlass.range_constexpr(min(SLOTS, self.num_chunks)):
                state.loads.start(state.inputs.loads.atom, sources[chunk], chunk)
        return adds

    @cute.jit
    def finish(
        self, state: WgradState, acc: cute.Tensor, adds: Boolean, stores: WgradStores, work: WorkTile,
        share: TileShare,
    ):  # fmt: skip
        if state.inputs.loads_dw:
            self._load_and_store(state, acc, adds, stores, work, share)
        else:
            targets = self._tiles(stores.tensor, state, work, share)
            for slab in cutlass.range_constexpr(self.tile.slabs):
                values = slab_of(acc, slab, self.tile.slabs)
                for column in cutlass.range_constexpr(self.chunks_per_slab):
                    chunk = slab * self.chunks_per_slab + column
                    slot = chunk % SLOTS
                    state.slots.fill(chunk_of(values, column, self.cols), slot)
                    state.slots.publish()
                    if state.slots.is_storing_warp:
                        if adds:
                            state.slots.start(stores.add, targets[chunk], slot, Int64(EVICT_FIRST))
                        else:
                            state.slots.start(stores.overwrite, targets[chunk], slot, Int64(EVICT_FIRST))

    @cute.jit
    def _load_and_store(
        self, state: WgradState, acc: cute.Tensor, adds: Boolean, stores: WgradStores, work: WorkTile,
        share: TileShare,
    ):  # fmt: skip
        """Finish a tile whose previous values of dw are loaded into the slots.

        For each chunk: wait until its previous values are in the chunk's slot, write the new values into the same slot,
        and store the slot.

        Args:
            adds: True: the new values are previous values plus accumulators; False: the accumulators alone.
            stores: the TMA stores into dw.
            share: the warpgroup's slabs (64 rows each) of the tile.
        """
        tiles_before = share.turn // PINGPONG_WARPGROUPS if const_expr(self.tile.takes_turns) else share.turn
        targets = self._tiles(stores.tensor, state, work, share)
        sources = self._tiles(state.inputs.loads.tensor, state, work, share)
        for slab in cutlass.range_constexpr(self.tile.slabs):
            values = slab_of(acc, slab, self.tile.slabs)
            for column in cutlass.range_constexpr(self.chunks_per_slab):
                chunk = slab * self.chunks_per_slab + column
                slot, sums = chunk % SLOTS, chunk_of(values, column, self.cols)
                loads_a_tile = len(range(slot, self.num_chunks, SLOTS))
                state.loads.wait(slot, tiles_before * loads_a_tile + chunk // SLOTS)
                state.loads.add(sums, slot, adds)
                state.slots.write(narrowed(sums, self.dtype), slot)
                state.slots.publish()
                if state.slots.is_storing_warp:
                    state.slots.start(stores.overwrite, targets[chunk], slot, Int64(EVICT_FIRST))
                    if const_expr(chunk + SLOTS < self.num_chunks):
                        state.slots.wait_all()
                        state.loads.start(state.inputs.loads.atom, sources[chunk + SLOTS], slot)
