"""Gathering of rows by index: an operand's row t is x[rows[t]]. Two warps of the load warpgroup copy rows by cp.async.

Hopper's TMA loads only boxes of neighbouring rows. To gather rows, each lane copies 16 bytes at a time, so that 8 lanes
copy a line of 128 bytes, in the swizzle that wgmma reads. The other operand still comes by TMA, in clusters by
multicast; each CTA gathers its own rows. A kernel chooses at run time whether rows come by index or in order.

A stage is full when TMA's bytes and every lane's copies have arrived (cp.async.mbarrier.arrive). Copies are writes of
the generic proxy, so a warpgroup that waited for a stage needs a fence before its wgmmas.

A copy occupies the registers of its address until it is issued. So a lane has separate address registers for all its
lines of a stage. When addresses were computed anew for each copy, copies shared registers, and FC1 took 1.27 times as
long as with neighbouring rows. For the same reason `GatherAlongRows` advances its addresses only once in
K_TILES_AT_ONCE k-tiles.
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
LINES_AT_ONCE = WARP // LANES_A_LINE
SWIZZLE_PERIOD = 2 * LINES_AT_ONCE  # lines after which the swizzle repeats
K_TILES_AT_ONCE = 4  # k-tiles of GatherAlongRows between two steps of its addresses
INDICES = 4  # k-tiles by which GatherAcrossRows reads row indices ahead
OF_A_LINE = WARP - LANES_A_LINE << 8 | WARP - 1
"""Mask and clamp of a shuffle among the 8 lanes that copy one line."""


class RowIndices(NamedTuple):
    """Indices of rows, and the tensor x that they select from.

    Attributes:
        address: address of the indices, int32 [T]: row t is x[indices[t]]. 0: rows lie in order.
        x: address of x.
        pitch: distance between x's consecutive rows, in units of 16 bytes.
        num_rows, columns: shape of x.
    """

    address: Int64
    x: Int64
    pitch: Int32
    num_rows: Int32
    columns: Int32

    def index_of(self, row: Int32) -> Int32:
        """Read indices[row], the row of x that becomes row number `row` of the operand. It may be out of range."""
        return vector_at(Int32, self.address)[row]

    def clamped(self, index: Int32) -> Int32:
        """Clamp an index into the range of x's rows."""
        return clamp(index, Int32(0), self.num_rows - 1)

    def distance(self, index: Int32) -> Int32:
        """Return the distance of row `index` of x from x's first row, in units of 16 bytes; `index` is clamped.

        The distance is an unsigned 32-bit number, so x may have at most 64 GiB.
        """
        return self.clamped(index) * self.pitch


NO_ROWS = RowIndices(Int64(0), Int64(0), Int32(0), Int32(0), Int32(0))


def row_indices(address: Int64, x: cute.Tensor) -> RowIndices:
    """Host side: make the RowIndices of x. address: address of the indices; 0: rows lie in order."""
    pitch = Int32(x.stride[0] // (CHUNK_BYTES * 8 // x.element_type.width))
    return RowIndices(address, x.iterator.toint(), pitch, Int32(x.shape[0]), Int32(x.shape[1]))


class Share(NamedTuple):
    """The lines (128 bytes each) of a stage that a warp copies.

    Attributes:
        first: index of the first line, a multiple of SWIZZLE_PERIOD.
        times: number of lines, in units of LINES_AT_ONCE (4 lines, which a warp copies at once).
    """

    first: Int32 | int
    times: int


class Lane(NamedTuple):
    """A lane's part of the copies: one 16-byte chunk of every LINES_AT_ONCE-th line of its warp.

    Attributes:
        line: index, in the stage, of the lane's first line.
        chunk: index of the chunk that the lane copies of each of its lines.
        targets: shared-memory addresses of the lane's chunks in its first and in its second line of the first stage.
            The second line lies half a swizzle period further.
    """

    line: Int32
    chunk: Int32
    targets: tuple[Int32, Int32]


class Gather(Invariant):
    """Copies of gathered rows into an operand's part of a stage.

    Args:
        lines: number of lines of 128 bytes of the operand in a stage.
        dtype: element type.
    """

    def __init__(self, lines: int, dtype: type[cutlass.Numeric]):
        self.lines = lines
        self.line_elements = LINE_BYTES * 8 // dtype.width
        self.chunk_elements = self.line_elements // LANES_A_LINE

    def half(self, rank: Int32) -> Share:
        """Return the lines of a stage that warp `rank` (0 or 1) copies if two warps copy equal halves."""
        return Share(rank * (self.lines // WARPS), self.lines // (WARPS * LINES_AT_ONCE))

    def lane(self, smem: cute.Tensor, first: Int32 | int) -> Lane:
        """Return this lane's part of the copies.

        Args:
            smem: the operand's shared memory.
            first: index of the warp's first line, a multiple of SWIZZLE_PERIOD.
        """
        assert not isinstance(first, int) or first % SWIZZLE_PERIOD == 0
        thread = cute.arch.lane_idx()
        line, chunk = thread // LANES_A_LINE, thread % LANES_A_LINE
        target = smem.iterator.toint() + (first + line) * LINE_BYTES + (chunk ^ line) * CHUNK_BYTES
        second = (target ^ LINES_AT_ONCE * CHUNK_BYTES) + LINES_AT_ONCE * LINE_BYTES
        return Lane(first + line, chunk, (target, second))

    def copy(
        self, lane: Lane, stage: Int32, i: int, lines_before: int, source: Int64, offset: int, num_bytes: Int32
    ) -> None:  # fmt: skip
        """Start copying 16 bytes into a stage: to the lane's i-th line, counted from line `lines_before` on.

        The first `num_bytes` bytes come from address `source` + `offset`; the other bytes become zeros.

        Args:
            lane: the lane's part of the copies, from `lane`.
            stage: index of the stage.
        """
        first = lane.targets[i % 2] + stage * (self.lines * LINE_BYTES)
        target = first + (lines_before + i // 2 * 2 * LINES_AT_ONCE) * LINE_BYTES
        cute.arch.inline_ptx(
            f"cp.async.cg.shared.global.L2::128B [{{$r0}}], [{{$r1}} + {offset}], {CHUNK_BYTES}, {{$r2}};",
            read_only_args=[target, source, num_bytes],
        )


def arrive(stages: pipeline.PipelineTmaAsync, state: pipeline.PipelineState) -> None:
    """Make the stage's full barrier receive an arrival of this lane as soon as all its copies so far are done."""
    cute.arch.cp_async_mbarrier_arrive_noinc(stages.sync_object_full.get_barrier(state.index))


class GatherAlongRows(Gather):
    """Copies of an operand that is contracted along its rows, as in a GEMM: each line holds one row's part of a
    k-tile."""

    @cute.jit
    def fill(
        self, rows: RowIndices, smem: cute.Tensor, share: Share, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile, num_k_tiles: Int32, beside: Any = None,
    ):  # fmt: skip
        """Copy all k-tiles of the rows of one output tile. Returns the advanced state.

        Args:
            rows: indices of the rows.
            smem: the operand's shared memory.
            share: the lines that this warp copies.
            num_k_tiles: number of k-tiles of the output tile.
            beside: object whose `load(stages, state, k_tile)` starts this warp's TMA loads; None: the warp has no TMA
                loads.
        """
        lane = self.lane(smem, share.first)
        sources = cute.make_rmem_tensor(share.times, Int64)
        count = clamp(work.group_end - work.row, Int32(0), Int32(self.lines))
        first = rows.x + Int64(lane.chunk * CHUNK_BYTES)
        if count > 0:  # lines past the last row take its address
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
        """Copy one k-tile into a stage: the k-tile that is `ahead` k-tiles after the addresses `sources`. Returns the
        advanced state.

        Columns past the last column become zeros. Zeros in the weights alone would not suffice, since the stage may
        hold NaN from before.

        Args:
            sources: for each of the lane's lines, the address of its chunk.
            left: number of the group's rows from the warp's first row on.
            columns: number of x's columns from the lane's first column on.
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
        """Move the addresses `sources` by `k_tiles` k-tiles. Return `columns` less the columns of these k-tiles."""
        for i in cutlass.range_constexpr(cute.size(sources)):
            sources[i] += k_tiles * LINE_BYTES
        return columns - k_tiles * self.line_elements


class GatherAcrossRows(Gather):
    """Copies of an operand that is contracted over its rows, as in a weight gradient.

    A line holds 64 columns of one row; the lines of a k-tile's rows follow each other. Each k-tile has different rows,
    32 for each warp. So each lane reads the index of one of these rows, INDICES k-tiles ahead, and lanes exchange the
    row addresses by shuffles.

    Args:
        columns: number of columns of a tile of the operand.
        k: rows of a k-tile.
        dtype: type of the elements.
    """

    def __init__(self, columns: int, k: int, dtype: type[cutlass.Numeric]):
        self.k = k
        super().__init__(columns * k * dtype.width // 8 // LINE_BYTES, dtype)

    @cute.jit
    def fill(
        self, rows: RowIndices, smem: cute.Tensor, rank: Int32, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile, num_k_tiles: Int32, column: Int32,
    ):  # fmt: skip
        """Copy all rows of a group, k-tile by k-tile. Returns the advanced state.

        Args:
            rows: indices of the rows.
            smem: the operand's shared memory.
            rank: 0 or 1, the index of the gathering warp.
            num_k_tiles: number of k-tiles that the group's rows make.
            column: first of the operand's columns that are copied.
        """
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
        """Copy the lane's chunks of one k-tile into a stage.

        Args:
            sources: for each of the lane's rows, the address of its first chunk.
            columns: number of x's columns from the lane's first column on; columns past the last become zeros.
            stage: index of the stage.
            rows_left: number of the group's rows from the lane's first row on; rows past them become zeros.
        """
        for half in cutlass.range_constexpr(self.lines // self.k):
            has_columns = columns > half * self.line_elements
            for i in cutlass.range_constexpr(cute.size(sources)):
                is_inside = Boolean(has_columns & (i * LINES_AT_ONCE < rows_left))
                num_bytes = select(is_inside, Int32(CHUNK_BYTES), Int32(0))
                self.copy(lane, stage, i, half * self.k, sources[i], half * LINE_BYTES, num_bytes)
