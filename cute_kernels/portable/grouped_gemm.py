"""The grouped GEMM, ragged in rows, on any GPU from Ampere on: y[row] = epilogue(x[row] @ w[e]^T)."""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8

from ..device.invariant import Invariant
from ..device.warps import last_lane
from ..memory.weights import weight_rows, weight_view
from ..schedule.groups import Groups
from ..schedule.tile_scheduler import GroupTileScheduler
from ..schedule.work import TileGrid, WorkTile
from ..sm90.epilogue.base import Epilogue, Inputs
from ..sm90.fragments import TileShare
from ..specs import GroupedGluSpec, GroupedMmSpec
from .mainloop import CHUNK_BYTES, CTAS_PER_SM, SLAB, THREADS, Mainloop
from .sources import Rows, Weights, row_sources, weight_sources
from .store import Slots, make_store


class TileWalk(GroupTileScheduler):
    """Every warp walks the groups for itself: no warp has time to spare."""

    def _tile_at(self, index: Int32, begin: Int32, end: Int32, rank: Int32) -> tuple[Int32, ...]:
        m_tile, n_tile = self._cluster_tile_at(index, end - begin)
        return self._first_row(begin, m_tile), end, m_tile, n_tile, Int32(0)


class GroupedGemm(Invariant):
    """A CTA takes tiles in turns with the others, each from its first copy to its last store.

    who           waits for                                  then
    all warps     own copies of a stage, barrier (CTA)       copy the next stage, multiply this one
    all warps     barrier (CTA), at a tile's end             epilogue in the stages' memory, a barrier a slot
    all warps     barrier (CTA), at the epilogue's end       next tile
    """

    def __init__(self, spec: GroupedMmSpec | GroupedGluSpec, dtype: type[cutlass.Numeric], epilogue: Epilogue):
        self.name = spec.name
        self.dtype = dtype
        self.tile = spec.tile
        self.epilogue = epilogue
        self.parts, self.layout = epilogue.shape.parts, epilogue.shape.layout

    @cute.jit
    def launch(
        self, x: cute.Tensor, w: cute.Tensor, outputs: tuple, groups: tuple[Int64, Int32, Int32, Int64], w_table: Int64,
        rows: Int64, inputs: Inputs, num_sms: Int32, position: Int32, stream: cuda.CUstream, w_up: Int64 | None = None,
    ):  # fmt: skip
        """As that of sm90's. Tiles are dealt, not drawn, and no launch is early."""
        view, expert = weight_view(w, w_table, self.parts, self.layout, False, inputs.gate, w_up)
        unit = CHUNK_BYTES * 8 // self.dtype.width
        lines = Rows(x.iterator.toint(), Int32(x.stride[0] // unit), Int32(x.shape[0]), rows)
        n, depth = weight_rows(w, w_up), Int32(w.shape[2])
        weights = Weights(view.iterator.toint(), expert, depth // unit, n // self.parts, inputs.gate)
        stores = tuple(make_store(view) for view in self.epilogue.store_views(outputs, inputs))
        sizes = Groups(*groups, outputs[0].shape[0])
        grid = TileGrid(Int32(0), cute.ceil_div(n, self.tile.n))
        small = sum(-(-field.num_bytes // CHUNK_BYTES) * CHUNK_BYTES for field in self.epilogue.shape.smem)
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(lines, weights, stores, inputs, sizes, depth, grid).launch(
            grid=(num_sms * CTAS_PER_SM, 1, 1),
            block=(THREADS, 1, 1),
            smem=Mainloop.num_bytes(self.tile.m, self.tile.n) + small,
            min_blocks_per_mp=CTAS_PER_SM,
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, rows: Rows, weights: Weights, stores: tuple, inputs: Inputs, groups: Groups, depth: Int32, grid: TileGrid
    ):  # fmt: skip
        smem = cute.arch.get_dyn_smem(Uint8, alignment=1024)
        stages = smem.toint()
        mainloop = Mainloop(self.dtype, self.tile.m, self.tile.n, stages)
        own, at = {}, Mainloop.num_bytes(self.tile.m, self.tile.n)
        for field in self.epilogue.shape.smem:
            pointer = cute.make_ptr(field.dtype, stages + at, cute.AddressSpace.smem, assumed_align=CHUNK_BYTES)
            own[field.name] = cute.make_tensor(pointer, cute.make_layout(field.shape))
            at += -(-field.num_bytes // CHUNK_BYTES) * CHUNK_BYTES
        slots: Any = Slots(smem, self.dtype)
        state = self.epilogue.make_state(inputs, groups, slots, own, None)
        acc = cute.make_rmem_tensor(self.tile.m // SLAB * (self.tile.n // 2), Float32)
        walk = TileWalk(self.tile, groups, grid)
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
                self._make(mainloop, state, acc, work, rows, weights, stores, depth)
            tile += blocks

    @cute.jit
    def _make(
        self, mainloop: Mainloop, state, acc: cute.Tensor, work: WorkTile, rows: Rows, weights: Weights, stores: tuple,
        depth: Int32,
    ):  # fmt: skip
        """One tile."""
        share = TileShare(Int32(0), Int32(0))
        a = row_sources(rows, work, mainloop.a)
        b = weight_sources(weights, work, mainloop.b, self.tile.n // self.parts, self.layout)
        prefetched = self.epilogue.begin(state, work, share)
        mainloop.run(acc, a, b, depth)
        self.epilogue.finish(state, acc, prefetched, stores, work, share)
        cute.arch.sync_threads()
