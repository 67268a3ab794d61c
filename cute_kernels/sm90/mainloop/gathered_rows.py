"""Rows by index: an operand's row t is x[rows[t]], which two warps of the producer warpgroup bring by cp.async.

TMA loads boxes of neighbouring rows. Rows anywhere are copied 16 bytes a lane, 8 lanes a line of 128 bytes, in the
swizzle that wgmma reads. The other operand goes on by TMA, in clusters by multicast; of rows each CTA loads its own.
Whether rows come by index is a run-time value: the same kernel reads them as they lie.

A stage is full when TMA's bytes are there and every lane's copies are, which arrive on their own when they are done.
They are writes of the generic proxy, so whoever waited for a stage orders them before its wgmma by a fence.

A copy holds the registers of its address until it is issued. So a lane has registers of their own for all lines of a
stage: computed anew for each copy, addresses shared registers, and FC1 took 1.27 times as long as with neighbouring
rows. For the same reason addresses along rows advance once in K_TILES_AT_ONCE k-tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Int32, Int64, const_expr

from ...device.gmem import CHUNK_BYTES, offset_by, vector_at
from ...device.invariant import Invariant
from ...device.select import select
from ...device.warps import WARP
from ...schedule.groups import clamp
from ...schedule.work import WorkTile

LANES_A_LINE = 8
LINE_BYTES = LANES_A_LINE * CHUNK_BYTES
WARPS = 2
LINES_AT_ONCE = WARP // LANES_A_LINE  # half of the period of the swizzle
K_TILES_AT_ONCE = 4
INDICES = 4
OF_A_LINE = WARP - LANES_A_LINE << 8 | WARP - 1
"""A shuffle among the lanes of a line."""


class RowIndices(NamedTuple):
    """The addresses of int32 [T], which of x's rows each is (0: rows lie in order), and of x; of this the distance of
    rows, in 16 bytes, their number and the columns.
    """

    address: Int64
    x: Int64
    pitch: Int32
    num_rows: Int32
    columns: Int32

    def index_of(self, row: Int32) -> Int32:
        """The index of a row, unchecked."""
        return vector_at(Int32, self.address)[row]

    def clamped(self, index: Int32) -> Int32:
        """Which of x's rows that is: an index out of range is clamped."""
        return clamp(index, Int32(0), self.num_rows - 1)

    def distance(self, index: Int32) -> Int32:
        """Of a row from the first, in 16 bytes: 32 bits without a sign, so x has at most 64 GiB."""
        return self.clamped(index) * self.pitch


NO_ROWS = RowIndices(Int64(0), Int64(0), Int32(0), Int32(0), Int32(0))


def row_indices(address: Int64, x: cute.Tensor) -> RowIndices:
    """Host side."""
    pitch = Int32(x.stride[0] // (CHUNK_BYTES * 8 // x.element_type.width))
    return RowIndices(address, x.iterator.toint(), pitch, Int32(x.shape[0]), Int32(x.shape[1]))


class Share(NamedTuple):
    """The lines of a warp: the first, a multiple of the swizzle's period, and how many times LINES_AT_ONCE."""

    first: Int32 | int
    times: int


class Lane(NamedTuple):
    """Which of its warp's first lines, and which 16 bytes of it, are a lane's. targets: where they go in the first
    stage, and where those of the line half a period behind do.
    """

    line: Int32
    chunk: Int32
    targets: tuple[Int32, Int32]


class Gather(Invariant):
    """Fills an operand's part of a stage, `lines` of 128 bytes."""

    def __init__(self, lines: int, dtype: type[cutlass.Numeric]):
        self.lines = lines
        self.line_elements = LINE_BYTES * 8 // dtype.width
        self.chunk_elements = self.line_elements // LANES_A_LINE

    def half(self, rank: Int32) -> Share:
        """Of the first or the second of two warps that share the work."""
        return Share(rank * (self.lines // WARPS), self.lines // (WARPS * LINES_AT_ONCE))

    def lane(self, smem: cute.Tensor, first: Int32 | int) -> Lane:
        """`first`: the warp's first line."""
        thread = cute.arch.lane_idx()
        line, chunk = thread // LANES_A_LINE, thread % LANES_A_LINE
        target = smem.iterator.toint() + (first + line) * LINE_BYTES + (chunk ^ line) * CHUNK_BYTES
        behind = (target ^ LINES_AT_ONCE * CHUNK_BYTES) + LINES_AT_ONCE * LINE_BYTES
        return Lane(first + line, chunk, (target, behind))

    def copy(
        self, lane: Lane, stage: Int32, i: int, lines_before: int, source: Int64, offset: int, num_bytes: Int32
    ) -> None:  # fmt: skip
        """The lane's 16 bytes of its i-th line behind so many: `num_bytes` of them from so far behind `source`, zeros
        for the rest.
        """
        first = lane.targets[i % 2] + stage * (self.lines * LINE_BYTES)
        target = first + (lines_before + i // 2 * 2 * LINES_AT_ONCE) * LINE_BYTES
        cute.arch.inline_ptx(
            f"cp.async.cg.shared.global.L2::128B [{{$r0}}], [{{$r1}} + {offset}], {CHUNK_BYTES}, {{$r2}};",
            read_only_args=[target, source, num_bytes],
        )


def arrive(stages: pipeline.PipelineTmaAsync, state: pipeline.PipelineState) -> None:
    """This lane's copies so far, once they are done."""
    cute.arch.cp_async_mbarrier_arrive_noinc(stages.sync_object_full.get_barrier(state.index))


class GatherAlongRows(Gather):
    """Of an operand whose rows are contracted: a line is a row's part of a k-tile."""

    @cute.jit
    def fill(
        self, rows: RowIndices, smem: cute.Tensor, share: Share, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile, num_k_tiles: Int32, beside: Any = None,
    ):  # fmt: skip
        """All of K for one output tile. Returns the advanced state.

        `beside`: `load(stages, state, k_tile)` brings what else this warp has to bring.
        """
        lane = self.lane(smem, share.first)
        sources = cute.make_rmem_tensor(share.times, Int64)
        count = clamp(work.group_end - work.row, Int32(0), Int32(self.lines))
        first = rows.x + Int64(lane.chunk * CHUNK_BYTES)
        if count > 0:  # behind the last row lines begin where that does
            for i in cutlass.range_constexpr(cute.size(sources)):
                row = cutlass.min(lane.line + i * LINES_AT_ONCE, count - 1)
                sources[i] = offset_by(first, rows.distance(rows.index_of(work.row + row)))
        columns = rows.columns - lane.chunk * self.chunk_elements
        left = count - share.first
        rest = num_k_tiles % K_TILES_AT_ONCE
        for k_tile in cutlass.range(0, num_k_tiles - rest, K_TILES_AT_ONCE, unroll=1):
            for ahead in cutlass.range_constexpr(K_TILES_AT_ONCE):
                if const_expr(beside is not None):
                    beside.load(stages, state, k_tile + ahead)
                state = self._fill_stage(lane, sources, left, columns, ahead, stages, state)
            columns = self._advance(sources, columns, K_TILES_AT_ONCE)
        for k_tile in cutlass.range(num_k_tiles - rest, num_k_tiles, unroll=1):
            if const_expr(beside is not None):
                beside.load(stages, state, k_tile)
            state = self._fill_stage(lane, sources, left, columns, 0, stages, state)
            columns = self._advance(sources, columns, 1)
        return state

    @cute.jit
    def _fill_stage(
        self, lane: Lane, sources: cute.Tensor, left: Int32, columns: Int32, ahead: cutlass.Constexpr[int],
        stages: pipeline.PipelineTmaAsync, state: pipeline.PipelineState,
    ):  # fmt: skip
        """The k-tile so many ahead of `sources`. Returns the advanced state.

        `left`: rows from the warp's first on; `columns`: those from the lane's first on. Behind the last come zeros,
        since the weights' would not do: what was in the stage may be NaN.
        """
        stages.sync_object_empty.wait(state.index, state.phase)
        num_bytes = select(columns > ahead * self.line_elements, Int32(CHUNK_BYTES), Int32(0))
        if left >= cute.size(sources) * LINES_AT_ONCE:
            for i in cutlass.range_constexpr(cute.size(sources)):
                self.copy(lane, state.index, i, 0, sources[i], ahead * LINE_BYTES, num_bytes)
        else:
            for i in cutlass.range_constexpr(cute.size(sources)):
                if i * LINES_AT_ONCE < left:
                    self.copy(lane, state.index, i, 0, sources[i], ahead * LINE_BYTES, num_bytes)
        arrive(stages, state)
        state.advance()
        return state

    @cute.jit
    def _advance(self, sources: cute.Tensor, columns: Int32, k_tiles: cutlass.Constexpr[int]) -> Int32:
        for i in cutlass.range_constexpr(cute.size(sources)):
            sources[i] += k_tiles * LINE_BYTES
        return columns - k_tiles * self.line_elements


class GatherAcrossRows(Gather):
    """Of an operand that is contracted over rows: a line is one row's part of 64 columns of the tile, and those of a
    k-tile's rows follow each other. Each k-tile has rows of its own, 32 a warp: a lane reads the index of one, INDICES
    k-tiles before, and the warp's lanes tell each other.
    """

    def __init__(self, columns: int, k: int, dtype: type[cutlass.Numeric]):
        self.k = k
        super().__init__(columns * k * dtype.width // 8 // LINE_BYTES, dtype)

    @cute.jit
    def fill(
        self, rows: RowIndices, smem: cute.Tensor, rank: Int32, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile, num_k_tiles: Int32, column: Int32,
    ):  # fmt: skip
        """All rows of a group, of the columns from `column` on. Returns the advanced state."""
        lane = self.lane(smem, rank * (self.k // WARPS))
        first = column + lane.chunk * self.chunk_elements
        columns, at = rows.columns - first, rows.x + Int64(first) * (CHUNK_BYTES // self.chunk_elements)
        thread, row, end = cute.arch.lane_idx(), work.row, work.group_end
        own = lane.line + thread % LANES_A_LINE * LINES_AT_ONCE
        sources = cute.make_rmem_tensor(self.k // (WARPS * LINES_AT_ONCE), Int64)
        indices = cute.make_rmem_tensor(INDICES, Int32)
        if num_k_tiles > 0:
            for i in cutlass.range_constexpr(INDICES):
                indices[i] = rows.index_of(cutlass.min(row + i * self.k + own, end - 1))
        for _ in cutlass.range(num_k_tiles, unroll=1):
            distance = rows.distance(indices[0])
            for i in cutlass.range_constexpr(cute.size(sources)):
                sources[i] = offset_by(at, cute.arch.shuffle_sync(distance, i, mask_and_clamp=OF_A_LINE))
            for i in cutlass.range_constexpr(INDICES - 1):
                indices[i] = indices[i + 1]
            indices[INDICES - 1] = rows.index_of(cutlass.min(row + INDICES * self.k + own, end - 1))
            stages.sync_object_empty.wait(state.index, state.phase)
            if end - row >= self.k:
                self._copy_rows(lane, sources, columns, state.index, Int32(self.k))
            else:
                self._copy_rows(lane, sources, columns, state.index, end - row - lane.line)
            arrive(stages, state)
            state.advance()
            row += self.k
        return state

    @cute.jit
    def _copy_rows(
        self, lane: Lane, sources: cute.Tensor, columns: Int32, stage: Int32, rows_left: Int32
    ):  # fmt: skip
        """A k-tile of which so many rows are left behind the lane's first; the others are zeros."""
        for half in cutlass.range_constexpr(self.lines // self.k):
            has_columns = columns > half * self.line_elements
            for i in cutlass.range_constexpr(cute.size(sources)):
                is_inside = Boolean(has_columns & (i * LINES_AT_ONCE < rows_left))
                num_bytes = select(is_inside, Int32(CHUNK_BYTES), Int32(0))
                self.copy(lane, stage, i, half * self.k, sources[i], half * LINE_BYTES, num_bytes)
