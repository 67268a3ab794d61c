"""Rows by index: the left operand is x[rows[t]], which two warps of the producer warpgroup bring by cp.async.

TMA loads boxes of neighbouring rows; rows anywhere are copied 16 bytes a lane, 8 lanes a row of a k-tile (128 bytes),
in the swizzle that wgmma reads. Weights go on by TMA, in clusters by multicast; of rows each CTA loads its own.

A stage is full when the weights' bytes are there and every lane's copies are, which arrive on their own when they are
done. They are writes of the generic proxy, so whoever waited for a stage orders them before its wgmma by a fence, which
costs nothing that could be measured.

A lane has 16 rows of a tile of 128, and keeps an address in registers for each. Computed anew for each copy, addresses
share registers, which are free only once the copy before has been issued: FC1 then takes 1.27 times as long as with
neighbouring rows. For the same reason addresses advance once in K_TILES_AT_ONCE k-tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Int64

from ..chosen import chosen
from ..gmem import vector_at
from . import tile_scheduler as sched
from .mainloop import GemmMainloop, Operands
from .tile_scheduler import WorkTile
from .warps import WARP
from .weights import ExpertAddress

WARPS = 2
LANES_A_ROW = 8
ROWS_A_WARP = WARP // LANES_A_ROW
ROWS_AT_ONCE = WARPS * ROWS_A_WARP  # 8, the period of the swizzle
CHUNK_BYTES = 16
ROW_BYTES = LANES_A_ROW * CHUNK_BYTES
K_TILES_AT_ONCE = 4


class Lane(NamedTuple):
    """A lane's part of a piece of ROWS_AT_ONCE rows: the first row of its warp, its own, which 16 bytes of that, and
    where they go in the first stage.
    """

    first: Int32
    row: Int32
    chunk: Int32
    target: Int32


class GatheredMainloop(GemmMainloop):
    """As GemmMainloop, of rows anywhere. `operands.beside_a` is the address of their indices, int32 [T]."""

    gathering_warps = WARPS

    def operands(self, x: cute.Tensor, w: cute.Tensor, address: ExpertAddress, beside_a: Int64) -> Operands:
        # x has no descriptor: that of the weights, in its place, is prefetched twice.
        atom_b, b = self._tma(w, self.b_major, self.part_n, self.tile.cluster_m)
        extra: tuple = (address, self._tma(w, self.b_major, self.part_n, 1)) if self.tile.adaptive else (address,)
        return Operands(atom_b, x, atom_b, b, extra, beside_a)

    def _row_sources(self, operands: Operands) -> tuple[None, None]:
        return None, None

    def after_wait(self) -> None:
        cute.arch.fence_view_async_shared()

    @cute.jit
    def gather(
        self, operands: Operands, sA: cute.Tensor, stages: pipeline.PipelineTmaAsync, ring: sched.WorkRing, rank: Int32
    ):  # fmt: skip
        """The role of a gathering warp, the first or second of them."""
        thread, first = cute.arch.lane_idx(), rank * ROWS_A_WARP
        row, chunk = first + thread // LANES_A_ROW, thread % LANES_A_ROW
        lane = Lane(first, row, chunk, sA.iterator.toint() + row * ROW_BYTES + (chunk ^ row) * CHUNK_BYTES)
        sources = cute.make_rmem_tensor(self.tile.m // ROWS_AT_ONCE, Int64)
        ring_state = ring.consumer_state()
        state = self.producer_state()
        work = ring.get(ring_state)
        while work.expert >= 0:
            count = self._find(operands, work, lane, sources)
            columns = Int32(operands.a.shape[1]) - chunk * (CHUNK_BYTES * 8 // self.dtype.width)
            num_k_tiles = self.num_k_tiles(operands, work)
            for _ in cutlass.range(num_k_tiles // K_TILES_AT_ONCE, unroll=1):
                for i in cutlass.range_constexpr(K_TILES_AT_ONCE):
                    state = self._load_rows(lane, sources, count, columns, i, stages, state)
                columns = self._advance(sources, columns, K_TILES_AT_ONCE)
            for _ in cutlass.range(num_k_tiles % K_TILES_AT_ONCE, unroll=1):
                state = self._load_rows(lane, sources, count, columns, 0, stages, state)
                columns = self._advance(sources, columns, 1)
            ring_state.advance()
            work = ring.get(ring_state)

    @cute.jit
    def _find(self, operands: Operands, work: WorkTile, lane: Lane, sources: cute.Tensor) -> Int32:
        """A tile's rows of its group, and where this lane's begin; behind the last row they begin where that does."""
        x, indices = operands.a, vector_at(Int32, operands.beside_a)
        pitch = x.stride[0] * (self.dtype.width // 8)
        count = cutlass.max(cutlass.min(work.group_end - work.row, Int32(self.tile.m)), Int32(0))
        if count > 0:
            for i in cutlass.range_constexpr(cute.size(sources)):
                place = cutlass.min(lane.row + i * ROWS_AT_ONCE, count - 1)
                index = cutlass.max(cutlass.min(indices[work.row + place], Int32(x.shape[0]) - 1), Int32(0))
                sources[i] = x.iterator.toint() + Int64(index) * pitch + lane.chunk * CHUNK_BYTES
        return count

    @cute.jit
    def _load_rows(
        self, lane: Lane, sources: cute.Tensor, count: Int32, columns: Int32, ahead: cutlass.Constexpr[int],
        stages: pipeline.PipelineTmaAsync, state: pipeline.PipelineState,
    ):  # fmt: skip
        """Fill a stage's rows with the k-tile so many ahead of `sources`. Returns the advanced state.

        `columns`: those from the lane's first on. Behind the last come zeros, since the weights' would not do: what was
        in the stage may be NaN.
        """
        stages.sync_object_empty.wait(state.index, state.phase)
        target = lane.target + state.index * (self.tile.m * ROW_BYTES)
        num_bytes = chosen(columns > ahead * self.tile.k, Int32(CHUNK_BYTES), Int32(0))
        if count == self.tile.m:
            for i in cutlass.range_constexpr(cute.size(sources)):
                _copy(target + i * (ROWS_AT_ONCE * ROW_BYTES), sources[i], ahead * ROW_BYTES, num_bytes)
        else:
            for i in cutlass.range_constexpr(cute.size(sources)):
                if i * ROWS_AT_ONCE + lane.first < count:
                    _copy(target + i * (ROWS_AT_ONCE * ROW_BYTES), sources[i], ahead * ROW_BYTES, num_bytes)
        cute.arch.cp_async_mbarrier_arrive_noinc(stages.sync_object_full.get_barrier(state.index))
        state.advance()
        return state

    @cute.jit
    def _advance(self, sources: cute.Tensor, columns: Int32, k_tiles: cutlass.Constexpr[int]) -> Int32:
        for i in cutlass.range_constexpr(cute.size(sources)):
            sources[i] += k_tiles * ROW_BYTES
        return columns - k_tiles * self.tile.k


def _copy(target: Int32, source: Int64, offset: int, num_bytes: Int32) -> None:
    """16 bytes to shared memory: `num_bytes` of them from so far behind `source`, zeros for the rest."""
    cute.arch.inline_ptx(
        f"cp.async.cg.shared.global.L2::128B [{{$r0}}], [{{$r1}} + {offset}], 16, {{$r2}};",
        read_only_args=[target, source, num_bytes],
    )
