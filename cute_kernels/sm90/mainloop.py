"""Mainloops: TMA fills a ring of shared-memory stages with A and B tiles, wgmma warpgroups empty it.

In a cluster, CTAs that share a tile each load a slice and multicast it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass import Boolean, Float32, Int16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from ..chosen import chosen
from ..invariant import Invariant
from ..tiles import TileConfig
from .budget import ROWS
from .gathered_rows import LINES_AT_ONCE, WARPS, GatherAcrossRows, GatherAlongRows, RowIndices, Share, row_indices
from .ragged import clipped, ragged_rows
from .row_boxes import acquire, num_boxes
from .tile_scheduler import WorkTile
from .turns import THREADS, Turns
from .warps import WARP
from .weights import EVICT_FIRST, EVICT_LAST, ExpertAddress, expert_offset, leave_first, lo_hi, part_offset

WARPS_PER_GROUP = 4
MMA_K = 16


class Loop(NamedTuple):
    """One of the loops over k-tiles that a tile's MMAs are made of.

    `slabs`, `depth`: how much of a k-tile it multiplies. `begun`: k-tiles of the tile that the loops before had.
    """

    num_k_tiles: Int32
    slabs: int
    depth: int
    begun: Int32 | int = 0


class Operands(NamedTuple):
    """What the producer reads: TMA atoms and coordinate tensors of A and B, and more that the mainloop needs.

    scales: their address, for a mainloop that multiplies by them.
    """

    atom_a: cute.CopyAtom
    a: cute.Tensor
    atom_b: cute.CopyAtom
    b: cute.Tensor
    extra: tuple
    rows: RowIndices
    scales: Int64 = Int64(0)


class _Source(Invariant):
    """A TMA load. Where the two CTAs of a cluster share it, each loads its half of a tile, for both."""

    def __init__(self, atom: cute.CopyAtom, tensor: cute.Tensor, sharers: int):
        self.atom = atom
        self.tensor = tensor
        self.sharers = sharers
        self.rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if sharers > 1 else Int32(0)
        self.mask = Int16(2**sharers - 1) if sharers > 1 else 0

    def partition(self, smem: cute.Tensor, gmem: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
        """Shared and global memory of tiles whose first two modes are (rows, k)."""
        sharers = cute.make_layout(self.sharers)
        return cpasync.tma_partition(
            self.atom, self.rank, sharers, cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
        )

    def copy(
        self, source: cute.Tensor, target: cute.Tensor, barrier: cute.Pointer, policy: Int64 | None = None
    ) -> None:  # fmt: skip
        cute.copy(self.atom, source, target, tma_bar_ptr=barrier, mcast_mask=self.mask, cache_policy=policy)


class _Weights(Invariant):
    """The weights of an output tile, k-tile by k-tile. ahead: those that are on their way. num_bytes: of a stage, as
    far as TMA brings it. places: of each of its parts.
    """

    def __init__(
        self, source: _Source, tiles: tuple[cute.Tensor, cute.Tensor], ahead: Int32, num_bytes: Int32, n_tile: Int32,
        places: list[tuple[Int32, Int32]], policy: Int64 | None,
    ):  # fmt: skip
        self.source = source
        self.smem, self.gmem = tiles
        self.ahead = ahead
        self.num_bytes = num_bytes
        self.n_tile = n_tile
        self.places = places
        self.policy = policy

    @cute.jit
    def load(self, stages: pipeline.PipelineTmaAsync, state: pipeline.PipelineState, k_tile: Int32):
        if k_tile >= self.ahead:
            acquire(stages, state, self.num_bytes)
            barrier = stages.producer_get_barrier(state)
            for part in cutlass.range_constexpr(self.num_parts):
                k, lo, hi = self.place(part, k_tile)
                source = self.gmem[None, self.n_tile, k, lo, hi]
                self.source.copy(source, self.smem[None, part, 0, state.index], barrier, self.policy)

    @property
    def num_parts(self) -> int:
        return len(self.places)

    def place(self, part: int, k_tile: Int32) -> tuple[Int32, Int32, Int32]:
        """Of a k-tile of a part: which one there, and the address."""
        lo, hi = self.places[part]
        return k_tile, lo, hi


class _WeightsInHalves(_Weights):
    """Of one part, and a contraction in two halves: its `places` are theirs, and either has `half` k-tiles."""

    half: Int32
    num_parts = 1

    def place(self, part: int, k_tile: Int32) -> tuple[Int32, Int32, Int32]:
        is_second = k_tile >= self.half
        (first_lo, first_hi), (lo, hi) = self.places
        k_tile -= chosen(is_second, self.half, Int32(0))
        return k_tile, chosen(is_second, lo, first_lo), chosen(is_second, hi, first_hi)


class Mainloop(Invariant):
    """Compile-time shape of a mainloop, and its two halves: `load` for the TMA warp, `mma` for a warpgroup.

    Pipeline "stages": the producer, 1 thread of the TMA warp, arms a stage's transaction count and TMA arrives. The
    consumers, one lane of each MMA warp of each CTA that shares the stage, arrive when their wgmma have read it.
    """

    # Whether a tile may have no k-tiles at all; its accumulators are then zeros.
    may_be_empty = False
    # Whether an operand's rows may come by index.
    gathers = True

    def __init__(
        self, dtype: type[cutlass.Numeric], tile: TileConfig, a_major: OperandMajorMode, b_major: OperandMajorMode,
        stages: int,
    ):  # fmt: skip
        self.dtype = dtype
        self.tile = tile
        self.stages = stages
        self.a_major = a_major
        self.b_major = b_major
        self.a_layout = self._smem_layout(self.a_major, tile.m, stages)
        self.b_layout = self._smem_layout(self.b_major, tile.n, stages)

    def _smem_layout(self, major: OperandMajorMode, rows: int, *stages: int) -> cute.ComposedLayout:
        """(rows, k[, stages]) with 128-byte swizzle."""
        kinds = warpgroup.SmemLayoutAtomKind
        is_k_major = major == OperandMajorMode.K
        atom = warpgroup.make_smem_layout_atom(kinds.K_SW128 if is_k_major else kinds.MN_SW128, self.dtype)
        order = (0, 1, 2) if is_k_major else (1, 0, 2)
        return cute.tile_to_shape(atom, (rows, self.tile.k, *stages), order=order[: 2 + len(stages)])

    @property
    def stage_bytes(self) -> int:
        return (self.tile.m + self.tile.n) * self.tile.k * self.dtype.width // 8

    def tiled_mma(self) -> cute.TiledMma:
        """64 x tile.n wgmmas, the warpgroups of a tile stacked along rows."""
        return sm90_utils.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            self.a_major,
            self.b_major,
            Float32,
            (self.tile.warpgroups_per_tile, 1, 1),
            (64, self.tile.n),
        )

    def _tma(self, tensor: cute.Tensor, major: OperandMajorMode, rows: int, num_multicast: int):
        one_cta = num_multicast == 1
        op = cpasync.CopyBulkTensorTileG2SOp() if one_cta else cpasync.CopyBulkTensorTileG2SMulticastOp()
        layout = self._smem_layout(major, rows)
        return cpasync.make_tiled_tma_atom(op, tensor, layout, (rows, self.tile.k), num_multicast=num_multicast)

    def make_pipeline(self, barriers: cute.Pointer, gathers: Boolean) -> pipeline.PipelineTmaAsync:
        """`gathers`: whether warps fill stages beside the TMA thread. Each of their threads arrives."""
        producers = chosen(gathers, Int32(1 + WARP * WARPS), Int32(1))
        peers = self.tile.cluster_m + self.tile.cluster_n - 1
        consumers = peers * self.tile.warpgroups_per_tile * WARPS_PER_GROUP
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, producers),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, consumers),
            tx_count=self.stage_bytes,
            cta_layout_vmnk=cute.make_layout((1, self.tile.cluster_m, self.tile.cluster_n, 1)),
            defer_sync=True,
        )

    def after_wait(self) -> None:
        """What a stage that is full still needs before wgmma reads it: rows that were copied, not loaded by TMA, are
        writes of the generic proxy. Where none were, the fence costs nothing that could be measured.
        """
        if self.gathers:
            cute.arch.fence_view_async_shared()

    def producer_state(self) -> pipeline.PipelineState:
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)

    def consumer_state(self) -> pipeline.PipelineState:
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)

    def num_k_tiles(self, operands: Operands, work: WorkTile) -> Int32:
        raise NotImplementedError

    def load_ahead(
        self, operands: Operands, sA: cute.Tensor, sB: cute.Tensor, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile,
    ) -> Int32:  # fmt: skip
        """Load what does not depend on the kernel before; returns how many k-tiles of the first tile have it."""
        return Int32(0)

    def load(
        self, operands: Operands, sA: cute.Tensor, sB: cute.Tensor, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile, ahead: Int32,
    ) -> pipeline.PipelineState:  # fmt: skip
        """Fill stages with all of K for one output tile; called by the TMA warp. Returns the advanced state.

        `ahead`: the k-tiles that `load_ahead` has begun.
        """
        raise NotImplementedError

    def gather(
        self, operands: Operands, sA: cute.Tensor, sB: cute.Tensor, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile, rank: Int32,
    ) -> pipeline.PipelineState:  # fmt: skip
        """As `load`, of rows that come by index; called by the first or second of the warps that gather."""
        raise NotImplementedError

    def fragments(self, sA: cute.Tensor, sB: cute.Tensor, slab: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """A and B as wgmma's descriptors, for a warpgroup whose share of the tile begins at a slab."""
        mma = self.tiled_mma()
        thread_mma = mma.get_slice(slab * THREADS)
        return mma.make_fragment_A(thread_mma.partition_A(sA)), mma.make_fragment_B(thread_mma.partition_B(sB))

    def loops(self, work: WorkTile, num_k_tiles: Int32) -> list[Loop]:
        """Those that `mma` is made of. At a branch within or around a loop ptxas would wait for each wgmma: where there
        is a choice, there is a loop for each, of which others have no rounds.
        """
        return [Loop(num_k_tiles, self.tile.slabs, self.tile.k)]

    def accumulators(self) -> cute.Tensor:
        """A thread's accumulators: (wgmma's own, slab, 1)."""
        return cute.make_rmem_tensor(self.tiled_mma().partition_shape_C((self.tile.m, self.tile.n)), Float32)

    @cute.jit
    def mma(
        self, acc: cute.Tensor, tCrA: cute.Tensor, tCrB: cute.Tensor, work: WorkTile, num_k_tiles: Int32,
        stages: pipeline.PipelineTmaAsync, state: pipeline.PipelineState, turns: Turns,
    ):  # fmt: skip
        """acc = A B^T over all of K; called by a whole warpgroup, in its turn. Returns the advanced state.

        One k-tile of wgmma stays in flight: the stage before it is released while it runs.
        """
        release = state.clone()
        if const_expr(self.may_be_empty):
            acc.fill(0.0)
        turns.wait()
        for loop in self.loops(work, num_k_tiles):
            state, release = self._k_tiles(acc, tCrA, tCrB, *loop, stages, state, release)
        turns.pass_on()
        warpgroup.wait_group(0)
        if num_k_tiles > 0:
            stages.consumer_release(release)
        return state

    @cute.jit
    def _k_tiles(
        self, acc: cute.Tensor, tCrA: cute.Tensor, tCrB: cute.Tensor, num_k_tiles: Int32,
        slabs: cutlass.Constexpr[int], depth: cutlass.Constexpr[int], begun: Int32 | cutlass.Constexpr[int],
        stages: pipeline.PipelineTmaAsync, state: pipeline.PipelineState, release: pipeline.PipelineState,
    ):  # fmt: skip
        """The k-tiles of a Loop, the last in flight. Returns the next stage, and one to release."""
        tiled_mma = self.tiled_mma()
        for k_tile in cutlass.range(num_k_tiles, unroll=1):
            stages.consumer_wait(state)
            self.after_wait()
            warpgroup.fence()
            has_begun = begun + k_tile > 0
            for k_block in cutlass.range_constexpr(depth // MMA_K):
                first = const_expr(k_block == 0 and not self.may_be_empty)
                tiled_mma.set(warpgroup.Field.ACCUMULATE, Boolean(has_begun) if first else True)
                b = tCrB[None, None, k_block, state.index]
                for slab in cutlass.range_constexpr(slabs):
                    a = cute.append_ones(tCrA[None, slab, k_block, state.index], 2)
                    c = cute.append_ones(acc[None, slab, 0], 3)
                    cute.gemm(tiled_mma, c, a, b, c)
            warpgroup.commit_group()
            state.advance()
            if has_begun:
                warpgroup.wait_group(1)
                stages.consumer_release(release)
                release.advance()
        return state, release


class WeightsFirst(Mainloop):
    """A mainloop whose weights depend on nothing that the kernel before writes: it begins with those of all stages.

    `evicts_weights`: weights that are read once are the first to leave L2, so that what is read again stays: the data
    gradient of gpt-oss-120b, 128 rows an expert, reads 4.4 GB of memory instead of 5.0.
    """

    evicts_weights: bool

    def weight_row_bytes(self, operands: Operands) -> Int32:
        """The distance of an expert's weight rows."""
        raise NotImplementedError

    def num_stages(self, operands: Operands, work: WorkTile) -> Int32:
        """Stages that a tile takes: here a k-tile is one."""
        return self.num_k_tiles(operands, work)

    @cute.jit
    def load_ahead(
        self, operands: Operands, sA: cute.Tensor, sB: cute.Tensor, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile,
    ):  # fmt: skip
        """The weights of as many stages as there are."""
        count = Int32(0)
        if work.expert >= 0:
            count = cutlass.min(self.num_stages(operands, work), Int32(self.stages))
            self._load(operands, sA, sB, stages, state.clone(), work, Int32(0), count, False)
        return count

    @cute.jit
    def load(
        self, operands: Operands, sA: cute.Tensor, sB: cute.Tensor, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile, ahead: Int32,
    ):  # fmt: skip
        return self._load(operands, sA, sB, stages, state, work, ahead, self.num_stages(operands, work), True)

    @cute.jit
    def _load(
        self, operands: Operands, sA: cute.Tensor, sB: cute.Tensor, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile, ahead: Int32, count: Int32,
        with_rows: cutlass.Constexpr[bool],
    ):  # fmt: skip
        """Fill `count` stages, the first `ahead` of which have their weights; `with_rows`: with rows of x as well.

        A branch, because a load with a policy, be it the usual one, costs up to 1 %.
        """
        tiles = (operands, sA, sB, stages)
        rest = (work, ahead, count, with_rows)
        if const_expr(self.evicts_weights):
            if leave_first(work, self.tile.m, self.weight_row_bytes(operands)):
                state = self._fill(*tiles, state, *rest, Int64(EVICT_FIRST))
            else:
                state = self._fill(*tiles, state, *rest, None)
        else:
            state = self._fill(*tiles, state, *rest, None)
        return state

    def _fill(
        self, operands: Operands, sA: cute.Tensor, sB: cute.Tensor, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile, ahead: Int32, count: Int32, with_rows: bool,
        policy: Int64 | None,
    ) -> pipeline.PipelineState:  # fmt: skip
        """The same, with L2's policy for the weights. Returns the advanced state."""
        raise NotImplementedError


class GemmMainloop(WeightsFirst):
    """A: `tile.m` rows of x at any row, or by index (gathered_rows.py); groups need no alignment, rows past a group's
    end are computed, not stored, and loaded only where their box (row_boxes.py) has others.
    B: `parts` ranges of an expert's weight rows (weights.py); `transposed`: w holds rows of k.

    `load_warp_gathers`: the TMA warp is the first of the warps that gather, since another one is taken.

    A warpgroup with a tile of its own leaves out the second slab where that has no rows. Not where w is transposed,
    though: contractions are longer there, and CTAs that leave step share less of their operands in L2 (0.92 of the
    speed on gpt-oss-120b, Dirichlet 0.5).
    """

    def __init__(
        self, dtype: type[cutlass.Numeric], tile: TileConfig, parts: int, transposed: bool, stages: int,
        evicts_weights: bool, load_warp_gathers: bool,
    ):  # fmt: skip
        self.evicts_weights = evicts_weights
        self.skips_slabs = tile.takes_turns and tile.slabs == 2 and not transposed
        self.parts = parts
        self.part_n = tile.n // parts
        b_major = OperandMajorMode.MN if transposed else OperandMajorMode.K
        super().__init__(dtype, tile, OperandMajorMode.K, b_major, stages)
        self.load_warp_gathers = load_warp_gathers
        # Fewer than the other warp: what TMA takes has registers, too.
        self.tma_warp_rows = tile.m * 5 // 16
        self.rows = GatherAlongRows(tile.m, dtype)

    def operands(
        self, x: cute.Tensor, w: cute.Tensor, address: ExpertAddress, rows: Int64, scales: Int64
    ) -> Operands:  # fmt: skip
        """Host side: the TMA descriptors of x (rows, k) and of the weights (n, k, lo, hi)."""
        atom_a, a = self._tma(x, self.a_major, self.tile.box_rows, self.tile.row_sharers)
        atom_b, b = self._tma(w, self.b_major, self.part_n, self.tile.cluster_m)
        extra: tuple = (address,)
        if self.tile.adaptive:
            extra += self._tma(w, self.b_major, self.part_n, 1), self._tma(x, self.a_major, self.tile.box_rows, 1)
        return Operands(atom_a, a, atom_b, b, extra, row_indices(rows, x), scales)

    def gather(
        self, operands: Operands, sA: cute.Tensor, sB: cute.Tensor, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile, rank: Int32,
    ) -> pipeline.PipelineState:  # fmt: skip
        num_k_tiles = self.num_k_tiles(operands, work)
        share = Share(self.tma_warp_rows, (self.tile.m - self.tma_warp_rows) // LINES_AT_ONCE)
        share = share if self.load_warp_gathers else self.rows.half(rank)
        return self.rows.fill(operands.rows, sA, share, stages, state, work, num_k_tiles)

    def _row_sources(self, operands: Operands) -> tuple[_Source, _Source | None]:
        """Rows that a cluster's CTAs share, and rows that they do not, where a tile has both kinds."""
        shared = _Source(operands.atom_a, operands.a, self.tile.row_sharers)
        if not self.tile.adaptive:
            return shared, None
        atom, tensor = operands.extra[2]
        return shared, _Source(atom, tensor, 1)

    def weight_row_bytes(self, operands: Operands) -> Int32:
        along = 1 if self.b_major == OperandMajorMode.K else 0
        return cute.size(operands.b, mode=[along]) * (self.dtype.width // 8)

    def num_k_tiles(self, operands: Operands, work: WorkTile) -> Int32:
        return cute.ceil_div(cute.size(operands.a, mode=[1]), self.tile.k)

    def loops(self, work: WorkTile, num_k_tiles: Int32) -> list[Loop]:
        if not self.skips_slabs:
            return super().loops(work, num_k_tiles)
        is_short = work.group_end - work.row <= ROWS
        of_one = chosen(is_short, num_k_tiles, Int32(0))
        return [Loop(num_k_tiles - of_one, self.tile.slabs, self.tile.k), Loop(of_one, 1, self.tile.k)]

    @cute.jit
    def _fill(
        self, operands: Operands, sA: cute.Tensor, sB: cute.Tensor, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile, ahead: Int32, count: Int32,
        with_rows: cutlass.Constexpr[bool], policy: Int64 | None,
    ):  # fmt: skip
        address, *alone = operands.extra
        a_shared, a_alone = self._row_sources(operands)
        b_shared = _Source(operands.atom_b, operands.b, self.tile.cluster_m)
        tiles = (address, sA, sB, stages)
        rest = (operands.rows, work, ahead, count, with_rows, policy)
        if const_expr(self.tile.adaptive):
            # Where columns are paired, the CTAs have the same rows of A; else the same columns of B.
            atom, tensor = alone[0]
            b_alone = _Source(atom, tensor, 1)
            if work.pairs_columns > 0:
                state = self._load_from(a_shared, b_alone, *tiles, state, *rest)
            else:
                state = self._load_from(a_alone, b_shared, *tiles, state, *rest)
        else:
            state = self._load_from(a_shared, b_shared, *tiles, state, *rest)
        return state

    @cute.jit
    def _load_from(
        self, a: _Source, b: _Source, address: ExpertAddress, sA: cute.Tensor, sB: cute.Tensor,
        stages: pipeline.PipelineTmaAsync, state: pipeline.PipelineState, rows: RowIndices, work: WorkTile,
        ahead: Int32, count: Int32, with_rows: cutlass.Constexpr[bool], policy: Int64 | None,
    ):  # fmt: skip
        tile = self.tile
        boxes = chosen(rows.address == 0, num_boxes(tile, work), Int32(0))
        x_box, w_box = (tile.box_rows, tile.k), (self.part_n, tile.k)
        gB = cute.local_tile(b.tensor, w_box, (None, None, None, None))
        tBsB, tBgB = b.partition(cute.flat_divide(sB, w_box), gB)
        first = expert_offset(address, work.expert)
        gA = self.row_tiles(a.tensor, work.row, x_box)
        tAsA, tAgA = a.partition(cute.flat_divide(sA, x_box), gA)
        num_bytes = (boxes * tile.box_rows + tile.n) * (tile.k * self.dtype.width // 8)
        places = [lo_hi(first + part_offset(address, part)) for part in range(self.num_places)]
        weights = self.weights(a.tensor, b, (tBsB, tBgB), ahead, num_bytes, work.n_tile, places, policy)
        in_order = count
        if const_expr(with_rows and self.load_warp_gathers):
            if rows.address != 0:
                share = Share(0, self.tma_warp_rows // LINES_AT_ONCE)
                state = self.rows.fill(rows, sA, share, stages, state, work, count, weights)
                in_order = Int32(0)
        for k_tile in cutlass.range(in_order, unroll=1):
            weights.load(stages, state, k_tile)
            if const_expr(with_rows):
                for box in cutlass.range(boxes, unroll=1):
                    barrier = stages.producer_get_barrier(state)
                    a.copy(self.row_tile(a.tensor, tAgA, box, k_tile), tAsA[None, box, 0, state.index], barrier)
            state.advance()
        return state

    @property
    def num_places(self) -> int:
        """Parts of an expert's weights that a tile reads."""
        return self.parts

    def weights(self, x: cute.Tensor, *of: Any) -> _Weights:
        return _Weights(*of)

    def row_tiles(self, x: cute.Tensor, row: Int32, box: tuple[int, int]) -> cute.Tensor:
        """x from a row on, in boxes."""
        return cute.local_tile(cute.domain_offset((row, 0), x), box, (None, None))

    def row_tile(self, x: cute.Tensor, tiles: cute.Tensor, box: Int32, k_tile: Int32) -> cute.Tensor:
        return tiles[None, box, k_tile]


class HalvesMainloop(GemmMainloop):
    """Of x in two halves of columns, each with weights of its own, contracted one behind the other.

    x is (row, k, half), so that both operands are clipped where a half ends: its last k-tile is filled with zeros.
    """

    gathers = False
    num_places = 2

    def operands(
        self, x: cute.Tensor, w: cute.Tensor, address: ExpertAddress, rows: Int64, scales: Int64
    ) -> Operands:  # fmt: skip
        rows_of_x, columns = x.shape
        half = Int64(columns) // 2
        layout = cute.make_layout((rows_of_x, columns // 2, 2), stride=(x.stride[0], 1, half))
        return super().operands(cute.make_tensor(x.iterator, layout), w, address, rows, scales)

    def half(self, x: cute.Tensor) -> Int32:
        """k-tiles of one."""
        return cute.ceil_div(cute.size(x, mode=[1]), self.tile.k)

    def num_k_tiles(self, operands: Operands, work: WorkTile) -> Int32:
        return 2 * self.half(operands.a)

    def weights(self, x: cute.Tensor, *of: Any) -> _Weights:
        weights = _WeightsInHalves(*of)
        weights.half = self.half(x)
        return weights

    def row_tiles(self, x: cute.Tensor, row: Int32, box: tuple[int, int]) -> cute.Tensor:
        return cute.local_tile(cute.domain_offset((row, 0, 0), x), box, (None, None, None))

    def row_tile(self, x: cute.Tensor, tiles: cute.Tensor, box: Int32, k_tile: Int32) -> cute.Tensor:
        half = self.half(x)
        is_second = k_tile >= half
        return tiles[
            None, box, k_tile - chosen(is_second, half, Int32(0)), chosen(is_second, Int32(1), Int32(0))
        ]  # fmt: skip


class WgradMainloop(Mainloop):
    """A: columns of dy, B: columns of x, contracted over a group's rows. The rows of one may come by index.

    Rows past the group's end would reach the result, so both loads clip there and fill with zeros (`ragged_rows`);
    zeros in one alone would not do, since the other may hold NaN. The last k-tile is multiplied as deep as it has rows,
    in steps of a wgmma's: whole k-tiles are 3, 14, 8 and 27 % more MMAs than rows on Mixtral, Qwen3-30B, DeepSeek-V3
    EP8 and gpt-oss-120b (Dirichlet 0.5), these 1, 3, 2 and 6 %.

    `keeps_operands`: they are the last to leave L2, where results push them out: 5 to 15 % of the time of Qwen3-30B's
    gradients of 32 bits, 1 to 6 % of gpt-oss-120b's. Of 16 bits, with half as many bytes, -1 to 2 % (once 6).
    """

    may_be_empty = True

    def __init__(
        self, dtype: type[cutlass.Numeric], tile: TileConfig, stages: int, keeps_operands: bool
    ):  # fmt: skip
        super().__init__(dtype, tile, OperandMajorMode.MN, OperandMajorMode.MN, stages)
        self.keeps_operands = keeps_operands
        self.rows_of_a = GatherAcrossRows(tile.m, tile.k, dtype)
        self.rows_of_b = GatherAcrossRows(tile.n, tile.k, dtype)

    def operands(self, dy: cute.Tensor, x: cute.Tensor, dy_rows: Int64, x_rows: Int64) -> Operands:
        """Host side: the TMA descriptors of dy and x as (column, row, ...). At most one has rows by index."""
        atom_a, a = self._tma(_columns(dy), self.a_major, self.tile.m, self.tile.cluster_n)
        atom_b, b = self._tma(_columns(x), self.b_major, self.tile.n, self.tile.cluster_m)
        rows = RowIndices(
            *(chosen(dy_rows != 0, *of) for of in zip(row_indices(dy_rows, dy), row_indices(x_rows, x), strict=True))
        )
        return Operands(atom_a, a, atom_b, b, (Boolean(dy_rows == 0), Boolean(x_rows == 0)), rows)

    def num_k_tiles(self, operands: Operands, work: WorkTile) -> Int32:
        return cute.ceil_div(work.group_end - work.row, self.tile.k)

    def loops(self, work: WorkTile, num_k_tiles: Int32) -> list[Loop]:
        slabs, k = self.tile.slabs, self.tile.k
        rows = work.group_end - work.row
        rest = cute.ceil_div(rows % k, MMA_K) * MMA_K
        whole = num_k_tiles - chosen((rest > 0) & (rest < k), Int32(1), Int32(0))
        parts = [(depth, chosen(rest == depth, Int32(1), Int32(0))) for depth in range(MMA_K, k, MMA_K)]
        return [Loop(whole, slabs, k), *(Loop(count, slabs, depth, whole) for depth, count in parts)]

    @cute.jit
    def load(
        self, operands: Operands, sA: cute.Tensor, sB: cute.Tensor, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile, ahead: Int32,
    ):  # fmt: skip
        tile = self.tile
        a = _Source(operands.atom_a, clipped(operands.a, work.row, work.group_end, row_mode=1), tile.cluster_n)
        b = _Source(operands.atom_b, clipped(operands.b, work.row, work.group_end, row_mode=1), tile.cluster_m)
        tAsA, tAgA = a.partition(sA, cute.local_tile(a.tensor, (tile.m, tile.k), (None, None)))
        tBsB, tBgB = b.partition(sB, cute.local_tile(b.tensor, (tile.n, tile.k), (None, None)))
        policy = Int64(EVICT_LAST) if const_expr(self.keeps_operands) else None
        loads_a, loads_b = operands.extra
        columns = chosen(loads_a, Int32(tile.m), Int32(0)) + chosen(loads_b, Int32(tile.n), Int32(0))
        num_bytes = columns * (tile.k * self.dtype.width // 8)
        for k_tile in cutlass.range(self.num_k_tiles(operands, work), unroll=1):
            acquire(stages, state, num_bytes)
            barrier = stages.producer_get_barrier(state)
            if loads_a:
                a.copy(tAgA[None, work.m_tile, k_tile], tAsA[None, state.index], barrier, policy)
            if loads_b:
                b.copy(tBgB[None, work.n_tile, k_tile], tBsB[None, state.index], barrier, policy)
            state.advance()
        return state

    @cute.jit
    def gather(
        self, operands: Operands, sA: cute.Tensor, sB: cute.Tensor, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile, rank: Int32,
    ):  # fmt: skip
        to = (rank, stages, state, work, self.num_k_tiles(operands, work))
        loads_a, _ = operands.extra
        if loads_a:
            state = self.rows_of_b.fill(operands.rows, sB, *to, work.n_tile * self.tile.n)
        else:
            state = self.rows_of_a.fill(operands.rows, sA, *to, work.m_tile * self.tile.m)
        return state


def _columns(tensor: cute.Tensor) -> cute.Tensor:
    """[T, C] as a ragged view (column, row, wrap, end)."""
    ragged = ragged_rows(tensor)
    return cute.make_tensor(ragged.iterator, cute.select(ragged.layout, mode=[1, 0, 2, 3]))
