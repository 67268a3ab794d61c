"""The weight gradient, ragged in the contraction: dw[e] = dy_e^T @ x_e over the rows of group e.

Every element of dw is made by one CTA in one pass, so the result is deterministic. Where a group accumulates, the TMA
store adds in memory (once an element, so in a fixed order); an empty group adds nothing, or overwrites with zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint8
from cutlass.cute.nvgpu import cpasync

from ..gmem import vector_at
from ..invariant import Invariant
from ..tiles import TileConfig
from . import store
from . import tile_scheduler as sched
from .epilogue import ColumnSmem, TileShare, registers
from .mainloop import WgradMainloop
from .persistent import PersistentGemm
from .tickets import Tickets
from .turns import THREADS
from .weights import EVICT_FIRST, ExpertAddress, expert_offset, lo_hi, weight_view
from .wgrad_scheduler import WgradTileScheduler

# At most, of a light group: an SM's share of memory's bandwidth stores a 16-bit tile in the time of as many rows' MMAs.
# With twice as many, results of 32 bits are up to 3 % slower.
LIGHT_ROWS = 160


class WgradInputs(NamedTuple):
    """Where dw's experts lie, and which groups add: all (`accumulate` != 0) or those with mask[e] (bool, 0: absent)."""

    address: ExpertAddress
    mask: Int64
    accumulate: Int32


class WgradStores(NamedTuple):
    """TMA stores into dw (n, k, lo, hi), one that overwrites and one that adds."""

    overwrite: cute.CopyAtom
    add: cute.CopyAtom
    tensor: cute.Tensor


class WgradState(Invariant):
    def __init__(self, inputs: WgradInputs, slots: store.Slots):
        self.inputs = inputs
        self.slots = slots


class WgradEpilogue(Invariant):
    """Store accumulators as dw's type, overwriting or adding.

    Nobody here reads dw again, so it is the first to leave L2 (up to 9 % of gpt-oss-120b's time under skew).
    """

    def __init__(self, dtype: type[cutlass.Numeric], tile: TileConfig):
        self.dtype = self.slot_dtype = dtype
        self.slot_row_bytes = store.ROW_BYTES
        self.num_slots = store.SLOTS
        self.num_barriers = 0
        self.tile = tile
        self.cols = store.columns(dtype)
        self.chunks_per_slab = tile.n // self.cols
        self.shares_slots = False
        self.scales_columns = False

    def make_ring(self, barriers: cute.Pointer, staging: cute.Tensor) -> None:
        return None

    def make_state(
        self, inputs: WgradInputs, groups: sched.Groups, slots: store.Slots, smem: ColumnSmem, ring: None
    ) -> WgradState:
        return WgradState(inputs, slots)

    @cute.jit
    def begin(self, state: WgradState, work: sched.WorkTile, share: TileShare) -> Boolean:
        """Whether this tile adds to what dw holds."""
        adds = state.inputs.accumulate != 0
        if state.inputs.mask != 0:
            adds = vector_at(Uint8, state.inputs.mask)[work.expert] != 0
        return adds

    @cute.jit
    def finish(
        self, state: WgradState, acc: cute.Tensor, adds: Boolean, stores: WgradStores, work: sched.WorkTile,
        share: TileShare,
    ):  # fmt: skip
        regs = store.ROWS * self.cols // THREADS
        lo, hi = lo_hi(expert_offset(state.inputs.address, work.expert))
        first_m = work.m_tile * (self.tile.m // store.ROWS) + share.first_slab
        for chunk in cutlass.range_constexpr(self.tile.slabs * self.chunks_per_slab):
            slot = chunk % store.SLOTS
            state.slots.fill(registers(acc, chunk * regs, regs), slot)
            state.slots.publish()
            m = first_m + chunk // self.chunks_per_slab
            n = work.n_tile * self.chunks_per_slab + chunk % self.chunks_per_slab
            tile = cute.local_tile(stores.tensor[None, None, lo, hi], (store.ROWS, self.cols), (m, n))
            if state.slots.is_storing_warp:
                if adds:
                    state.slots.start(stores.add, tile, slot, Int64(EVICT_FIRST))
                else:
                    state.slots.start(stores.overwrite, tile, slot, Int64(EVICT_FIRST))


class GroupedWgrad(PersistentGemm):
    """Kernel of dy [T,N] and x [T,K], 16-bit, into dw of `out_dtype`."""

    walks_twice = True

    def __init__(
        self, name: str, dtype: type[cutlass.Numeric], out_dtype: type[cutlass.Numeric], tile: TileConfig
    ):  # fmt: skip
        super().__init__(name, dtype, tile, WgradEpilogue(out_dtype, tile))

    def make_mainloop(self) -> WgradMainloop:
        return WgradMainloop(self.dtype, self.tile, self.stages)

    def make_scheduler(
        self, groups: sched.Groups, grid: sched.TileGrid, tickets: Tickets | None
    ) -> sched.GroupTileScheduler:
        return WgradTileScheduler(self.tile, groups, grid, LIGHT_ROWS)

    @cute.jit
    def launch(
        self, dy: cute.Tensor, x: cute.Tensor, dw: cute.Tensor, groups: tuple[Int64, Int32, Int32, Int64],
        dw_table: Int64, mask: Int64, accumulate: Int32, num_sms: Int32, stream: cuda.CUstream,
        after_launch: cutlass.Constexpr[bool] = False,
    ):  # fmt: skip
        """Launch on `stream`. See PersistentGemm.start for `after_launch`."""
        operands = self.make_mainloop().operands(dy, x)
        view, address = weight_view(dw, dw_table, 1, "concat", False)
        tile = (store.ROWS, self.epilogue.cols)
        layout = store.smem_layout(dw.element_type)
        overwrite, tensor = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), view, layout, tile)
        add, _ = cpasync.make_tiled_tma_atom(cpasync.CopyReduceBulkTensorTileS2GOp(), view, layout, tile)
        grid = sched.TileGrid(
            cute.ceil_div(dy.shape[1], self.tile.m * self.tile.cluster_m),
            cute.ceil_div(x.shape[1], self.tile.n * self.tile.cluster_n),
        )
        self.start(
            operands, WgradStores(overwrite, add, tensor), WgradInputs(address, mask, accumulate),
            sched.Groups(*groups, dy.shape[0]), grid, num_sms, stream, after_launch,
        )  # fmt: skip
