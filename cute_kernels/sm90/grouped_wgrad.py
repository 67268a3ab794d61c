"""The weight gradient, ragged in the contraction: dw[e] = dy_e^T @ x_e over the rows of group e.

Every element of dw is made by one CTA in one pass, so the result is deterministic. Where a group accumulates, what dw
holds is loaded and added, or the TMA store adds in memory: once an element, so in a fixed order, either way. An empty
group adds nothing, or overwrites with zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync

from ..chosen import chosen
from ..gmem import vector_at
from ..invariant import Invariant
from ..tiles import PINGPONG_WARPGROUPS, TileConfig
from . import store
from . import tile_scheduler as sched
from .budget import ACROSS_REGISTERS
from .epilogue import ColumnSmem, TileShare, chunk_of
from .persistent import PersistentGemm
from .slot_loads import SlotBarriers, SlotLoads, TileLoads
from .tickets import Tickets
from .weights import EVICT_FIRST, ExpertAddress, expert_offset, lo_hi, weight_view
from .wgrad_mainloop import WgradMainloop
from .wgrad_scheduler import WgradTileScheduler

# At most, of a light group: an SM's share of memory's bandwidth stores a 16-bit tile in the time of as many rows' MMAs.
# With twice as many, results of 32 bits are up to 3 % slower.
LIGHT_ROWS = 160
# With fewer rows a group on average, for each byte of an element of dw, what dw holds is loaded: L2 adds to 1.2 TB/s of
# it, loads and stores make 1.5, but a tile's epilogue takes longer. With 512 rows 16 bits are 7 to 18 % slower so, and
# 32 bits 14 to 20 % faster, with 1024 either is 3 to 9 % slower.
LOADING_ROWS_PER_BYTE = 192


class WgradInputs(NamedTuple):
    """Where dw's experts lie, and which groups add: all (`accumulate` != 0) or those with mask[e] (bool, 0: absent).

    loads_dw: whether what dw holds is loaded and added here, rather than added to in memory.
    """

    address: ExpertAddress
    mask: Int64
    accumulate: Int32
    loads_dw: Boolean
    loads: TileLoads


class WgradStores(NamedTuple):
    """TMA stores into dw (n, k, lo, hi), one that overwrites and one that adds."""

    overwrite: cute.CopyAtom
    add: cute.CopyAtom
    tensor: cute.Tensor


class WgradState(Invariant):
    def __init__(self, inputs: WgradInputs, slots: store.Slots, barriers: SlotBarriers):
        self.inputs = inputs
        self.slots = slots
        self.loads = SlotLoads(barriers, slots)


class WgradEpilogue(Invariant):
    """Store accumulators as dw's type, overwriting or adding.

    Nobody here reads dw again, so it is the first to leave L2 (up to 9 % of gpt-oss-120b's time under skew).
    """

    def __init__(self, dtype: type[cutlass.Numeric], tile: TileConfig):
        self.dtype = self.slot_dtype = dtype
        self.slot_row_bytes = store.ROW_BYTES
        self.num_slots = store.SLOTS
        self.num_barriers = store.SLOTS * tile.warpgroups
        self.has_load_role = False
        self.tile = tile
        self.cols = store.columns(dtype)
        self.chunks_per_slab = tile.n // self.cols
        self.num_chunks = tile.slabs * self.chunks_per_slab
        self.shares_slots = False
        self.scales_columns = False

    def make_ring(self, barriers: cute.Pointer, staging: cute.Tensor) -> SlotBarriers:
        made = SlotBarriers(barriers, self.tile.warpgroups)
        made.make()
        return made

    def make_state(
        self, inputs: WgradInputs, groups: sched.Groups, slots: store.Slots, smem: ColumnSmem, barriers: SlotBarriers
    ) -> WgradState:
        return WgradState(inputs, slots, barriers)

    def _chunks(
        self, tensor: cute.Tensor, state: WgradState, work: sched.WorkTile, share: TileShare
    ) -> list[cute.Tensor]:
        """Where in dw the chunks of a warpgroup's share go."""
        lo, hi = lo_hi(expert_offset(state.inputs.address, work.expert))
        first_m = work.m_tile * (self.tile.m // store.ROWS) + share.first_slab
        first_n = work.n_tile * self.chunks_per_slab
        across = self.chunks_per_slab
        places = [(first_m + chunk // across, first_n + chunk % across) for chunk in range(self.num_chunks)]
        return [cute.local_tile(tensor[None, None, lo, hi], (store.ROWS, self.cols), place) for place in places]

    @cute.jit
    def begin(self, state: WgradState, work: sched.WorkTile, share: TileShare) -> Boolean:
        """Whether this tile adds to what dw holds. If that is loaded, its first chunks are on their way."""
        adds = state.inputs.accumulate != 0
        if state.inputs.mask != 0:
            adds = vector_at(Uint8, state.inputs.mask)[work.expert] != 0
        if state.inputs.loads_dw & state.slots.is_storing_warp:
            state.slots.wait_all()
            sources = self._chunks(state.inputs.loads.tensor, state, work, share)
            for chunk in cutlass.range_constexpr(min(store.SLOTS, self.num_chunks)):
                state.loads.start(state.inputs.loads.atom, sources[chunk], chunk)
        return adds

    @cute.jit
    def finish(
        self, state: WgradState, acc: cute.Tensor, adds: Boolean, stores: WgradStores, work: sched.WorkTile,
        share: TileShare,
    ):  # fmt: skip
        if state.inputs.loads_dw:
            self._load_and_store(state, acc, adds, stores, work, share)
        else:
            targets = self._chunks(stores.tensor, state, work, share)
            for chunk in cutlass.range_constexpr(self.num_chunks):
                slot = chunk % store.SLOTS
                state.slots.fill(chunk_of(acc, chunk, self.cols), slot)
                state.slots.publish()
                if state.slots.is_storing_warp:
                    if adds:
                        state.slots.start(stores.add, targets[chunk], slot, Int64(EVICT_FIRST))
                    else:
                        state.slots.start(stores.overwrite, targets[chunk], slot, Int64(EVICT_FIRST))

    @cute.jit
    def _load_and_store(
        self, state: WgradState, acc: cute.Tensor, adds: Boolean, stores: WgradStores, work: sched.WorkTile,
        share: TileShare,
    ):  # fmt: skip
        """Store sums with what was loaded, or without it, each chunk from the slot that had it."""
        tiles_before = share.turn // PINGPONG_WARPGROUPS if const_expr(self.tile.takes_turns) else share.turn
        targets = self._chunks(stores.tensor, state, work, share)
        sources = self._chunks(state.inputs.loads.tensor, state, work, share)
        for chunk in cutlass.range_constexpr(self.num_chunks):
            slot, values = chunk % store.SLOTS, chunk_of(acc, chunk, self.cols)
            loads_a_tile = len(range(slot, self.num_chunks, store.SLOTS))
            state.loads.wait(slot, tiles_before * loads_a_tile + chunk // store.SLOTS)
            state.loads.add(values, slot, adds)
            state.slots.write(store.narrowed(values, self.dtype), slot)
            state.slots.publish()
            if state.slots.is_storing_warp:
                state.slots.start(stores.overwrite, targets[chunk], slot, Int64(EVICT_FIRST))
                if const_expr(chunk + store.SLOTS < self.num_chunks):
                    state.slots.wait_all()
                    state.loads.start(state.inputs.loads.atom, sources[chunk + store.SLOTS], slot)


class GroupedWgrad(PersistentGemm):
    """Kernel of dy [T,N] and x [T,K], 16-bit, into dw of `out_dtype`."""

    load_registers = ACROSS_REGISTERS

    def __init__(
        self, name: str, dtype: type[cutlass.Numeric], out_dtype: type[cutlass.Numeric], tile: TileConfig
    ):  # fmt: skip
        super().__init__(name, dtype, tile, WgradEpilogue(out_dtype, tile))

    def make_mainloop(self) -> WgradMainloop:
        keeps_operands = self.epilogue.dtype.width == 32
        return WgradMainloop(self.dtype, self.tile, self.stages, keeps_operands)

    def make_scheduler(
        self, groups: sched.Groups, grid: sched.TileGrid, tickets: Tickets | None
    ) -> sched.GroupTileScheduler:
        return WgradTileScheduler(self.tile, groups, grid, LIGHT_ROWS)

    @cute.jit
    def launch(
        self, dy: cute.Tensor, x: cute.Tensor, dw: cute.Tensor, groups: tuple[Int64, Int32, Int32, Int64],
        rows: tuple[Int64, Int64], dw_table: Int64, mask: Int64, accumulate: Int32, num_sms: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """Launch on `stream`. `rows`: the addresses of the indices of dy's rows and of x's; one is 0, or both."""
        operands = self.make_mainloop().operands(dy, x, *rows)
        num_rows = chosen(rows[0] == 0, Int32(dy.shape[0]), Int32(x.shape[0]))
        view, address = weight_view(dw, dw_table, 1, "concat", False)
        tile = (store.ROWS, self.epilogue.cols)
        layout = store.smem_layout(dw.element_type)
        overwrite, tensor = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), view, layout, tile)
        add, _ = cpasync.make_tiled_tma_atom(cpasync.CopyReduceBulkTensorTileS2GOp(), view, layout, tile)
        loads = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, layout, tile)
        adds = (accumulate != 0) | (mask != 0)
        loads_dw = adds & (num_rows < LOADING_ROWS_PER_BYTE * self.epilogue.dtype.width // 8 * groups[2])
        grid = sched.TileGrid(
            cute.ceil_div(dy.shape[1], self.tile.m * self.tile.cluster_m),
            cute.ceil_div(x.shape[1], self.tile.n * self.tile.cluster_n),
        )
        self.start(
            operands, WgradStores(overwrite, add, tensor),
            WgradInputs(address, mask, accumulate, Boolean(loads_dw), TileLoads(*loads)),
            sched.Groups(*groups, num_rows), grid, num_sms, stream, Int32(0),
        )  # fmt: skip
