"""Base classes of mainloops: TMA fills a ring of shared-memory stages with k-tiles of A and B, and wgmma warpgroups
multiply them.

If the CTAs of a cluster share an operand's tile, each CTA loads a slice and multicasts it to all of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass import Boolean, Float32, Int16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from ...device.invariant import Invariant
from ...device.select import select
from ...device.warps import WARP
from ...epilogue.fragments import TileShare
from ...epilogue.sizes import THREADS
from ...schedule.work import WorkTile
from ...tiles import TileConfig
from ..turns import Turns
from .gathered_rows import WARPS, RowIndices

WARPS_PER_GROUP = 4
MMA_K = 16


AFTER_EPILOGUE, AFTER_MMA, BEFORE_MMA = "after epilogue", "after MMA", "before MMA"
"""Values of `Mainloop.looks_ahead`, which says when a warpgroup reads its next tile from the scheduler's ring.

A warpgroup that reads early (before the MMA) can fetch the next tile's scales during the current tile. A warpgroup that
reads late needs fewer registers. It also waits less, since tickets hand out tiles as late as possible
(schedule/tickets.py).
"""


class MmaTile(NamedTuple):
    """A tile that a warpgroup multiplies.

    Attributes:
        work: the output tile.
        next_work: the next tile in the scheduler's ring; the same as `work` if the next tile is not known yet.
        share: which slabs (64 rows each) of the tile the warpgroup multiplies.
        num_k_tiles: number of k-tiles of the contraction.
    """

    work: WorkTile
    next_work: WorkTile
    share: TileShare
    num_k_tiles: Int32


class NoScales(Invariant):
    """Stand-in for the scales object of a mainloop that multiplies by no scales."""

    def begin(self, work: WorkTile) -> None:
        """Do nothing. Classes that have scales start loading a tile's first scales here."""


class Loop(NamedTuple):
    """A loop of an MMA warpgroup over k-tiles; a tile is computed by one or several loops, one after the other.

    Attributes:
        num_k_tiles: number of k-tiles of the loop; 0: the loop does nothing for this tile.
        slabs: how many of the warpgroup's slabs (64 rows each) the loop multiplies.
        depth: how many elements of each k-tile's depth the loop multiplies.
        before: number of k-tiles that earlier loops of the tile multiply.
    """

    num_k_tiles: Int32
    slabs: int
    depth: int
    before: Int32 | int = 0


class Operands(NamedTuple):
    """Inputs of a mainloop.

    Attributes:
        atom_a, a: TMA copy and coordinate tensor of A.
        atom_b, b: TMA copy and coordinate tensor of B.
        extra: further data, different for each class of mainloop.
        rows: indices of an operand's rows; address 0: rows lie in order.
        scales: address of the scales, or a tuple that locates them, for a mainloop that multiplies by scales.
    """

    atom_a: cute.CopyAtom
    a: cute.Tensor
    atom_b: cute.CopyAtom
    b: cute.Tensor
    extra: tuple
    rows: RowIndices
    scales: Int64 = Int64(0)


class Source(Invariant):
    """A TMA load of one operand.

    If the two CTAs of a cluster share the load, each CTA loads half of a tile and multicasts it to both.

    Args:
        atom: the TMA copy.
        tensor: coordinate tensor of the operand in global memory.
        sharers: number of CTAs that share the load, 1 or 2.
    """

    def __init__(self, atom: cute.CopyAtom, tensor: cute.Tensor, sharers: int):
        self.atom = atom
        self.tensor = tensor
        self.sharers = sharers
        self.rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if sharers > 1 else Int32(0)
        self.mask = Int16(2**sharers - 1) if sharers > 1 else 0

    def partition(self, smem: cute.Tensor, gmem: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
        """Return the views (target, source) of `smem` and `gmem` that `copy` takes.

        The first two modes of both arguments are (rows, k) of a tile; they become one mode of the views.
        """
        sharers = cute.make_layout(self.sharers)
        return cpasync.tma_partition(
            self.atom, self.rank, sharers, cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
        )

    def copy(
        self, source: cute.Tensor, target: cute.Tensor, barrier: cute.Pointer, policy: Int64 | None = None
    ) -> None:  # fmt: skip
        cute.copy(self.atom, source, target, tma_bar_ptr=barrier, mcast_mask=self.mask, cache_policy=policy)


class Mainloop(Invariant):
    """Base of mainloops. The TMA warp calls `load`, MMA warpgroups call `mma`; the pipeline "stages" connects them.

        barrier of a stage    arrivals
        full                  1 thread of the TMA warp, which sets the transaction count; TMA completes the bytes
        empty                 one lane of each MMA warp in each CTA that shares the stage, once the warp's wgmmas have
                              read the stage

    Args:
        dtype: element type of A and B as the MMA reads them.
        tile: the kernel's tile.
        a_major, b_major: the direction in which an operand is contiguous in memory: K, or MN (rows of A, columns of B).
        stages: number of stages.
    """

    # True: a tile may have no k-tiles at all; its accumulators are then zeros.
    may_be_empty = False
    # True: an operand's rows may come by index.
    gathers = True
    looks_ahead = AFTER_EPILOGUE
    # True: the previous kernel does not write the scales, so that they can be read before it has ended.
    scales_are_ready = False
    # Bytes of shared memory for weights before they are decoded. slots_bytes: of each decoding warpgroup; narrow_bytes:
    # in all.
    slots_bytes = 0
    narrow_bytes = 0
    # Slots of a ring of decoded weights, whose barriers follow those of the stages.
    decoded_stages = 0

    def __init__(
        self, dtype: type[cutlass.Numeric], tile: TileConfig, a_major: OperandMajorMode, b_major: OperandMajorMode,
        stages: int,
    ):  # fmt: skip
        self.dtype = self.a_dtype = self.b_dtype = dtype
        self.tile = tile
        self.stages = stages
        self.a_major = a_major
        self.b_major = b_major
        self.a_layout = self._smem_layout(self.a_major, tile.m, stages)
        self.b_layout = self._smem_layout(self.b_major, tile.n, stages)

    def _smem_layout(self, major: OperandMajorMode, rows: int, *stages: int) -> cute.ComposedLayout:
        """Make the layout (rows, k[, stages]) with 128-byte swizzle."""
        kinds = warpgroup.SmemLayoutAtomKind
        is_k_major = major == OperandMajorMode.K
        atom = warpgroup.make_smem_layout_atom(kinds.K_SW128 if is_k_major else kinds.MN_SW128, self.dtype)
        order = (0, 1, 2) if is_k_major else (1, 0, 2)
        return cute.tile_to_shape(atom, (rows, self.tile.k, *stages), order=order[: 2 + len(stages)])

    @property
    def stage_bytes(self) -> int:
        """Bytes of A and B that a stage receives for each k-tile."""
        return (self.tile.m + self.tile.n) * self.tile.k * self.dtype.width // 8

    def tiled_mma(self) -> cute.TiledMma:
        """Make the MMA: wgmmas of 64 x tile.n; the warpgroups that share a tile are stacked along rows."""
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
        """Make the pipeline of stages.

        Args:
            barriers: shared memory of the pipeline's barriers.
            gathers: True: gathering warps fill stages, too, and each of their threads arrives at the full barrier.
        """
        producers = self.producers(gathers)
        peers = self.tile.cluster_m + self.tile.cluster_n - 1
        consumers = peers * self.tile.stage_readers * WARPS_PER_GROUP
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, producers),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, consumers),
            tx_count=self.stage_bytes,
            cta_layout_vmnk=cute.make_layout((1, self.tile.cluster_m, self.tile.cluster_n, 1)),
            defer_sync=True,
        )

    def producers(self, gathers: Boolean) -> Int32:
        """Return how many threads arrive at a stage's full barrier. gathers: True: gathering warps fill stages, too."""
        return select(gathers, Int32(1 + WARP * WARPS), Int32(1))

    def after_wait(self) -> None:
        """If rows may come by index, fence between the wait for a full stage and the wgmmas that read it.

        Rows that come by index are copied by cp.async. Its writes belong to the generic proxy, and wgmma sees them only
        after a fence. If rows lie in order, the fence costs nothing that could be measured.
        """
        if self.gathers:
            cute.arch.fence_view_async_shared()

    def producer_state(self) -> pipeline.PipelineState:
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)

    def consumer_state(self) -> pipeline.PipelineState:
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)

    def num_k_tiles(self, operands: Operands, work: WorkTile) -> Int32:
        """Return the number of k-tiles of an output tile."""
        raise NotImplementedError

    def load_ahead(
        self, operands: Operands, sA: cute.Tensor, sB: cute.Tensor, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile,
    ) -> Int32:  # fmt: skip
        """Start the loads of the CTA's first tile that do not depend on the previous kernel, such as weights.

        Returns the number of k-tiles whose loads have begun: here 0.

        Args:
            state: pipeline state of the tile's first stage.
            work: the first tile.
        """
        return Int32(0)

    def load(
        self, operands: Operands, sA: cute.Tensor, sB: cute.Tensor, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile, ahead: Int32,
    ) -> pipeline.PipelineState:  # fmt: skip
        """Fill stages with all k-tiles of one output tile; called by the TMA warp.

        Returns the pipeline state after these k-tiles.

        Args:
            sA, sB: shared memory of all stages.
            state: pipeline state of the tile's first stage.
            work: the output tile.
            ahead: number of k-tiles that `load_ahead` has begun.
        """
        raise NotImplementedError

    def gather(
        self, operands: Operands, sA: cute.Tensor, sB: cute.Tensor, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile, rank: Int32,
    ) -> pipeline.PipelineState:  # fmt: skip
        """Fill stages with the rows that come by index, for one output tile; called by both gathering warps.

        Returns the pipeline state after the tile's k-tiles.

        Args:
            sA, sB: shared memory of all stages.
            state: pipeline state of the tile's first stage.
            work: the output tile.
            rank: 0 or 1, the index of the gathering warp.
        """
        raise NotImplementedError

    def lines(self, operands: Operands) -> Any:
        """Make the weight decoder of a thread of a decoding warpgroup, which passes it to `decode` for every tile."""
        raise NotImplementedError

    def decoding_state(self) -> pipeline.PipelineState:
        """Make a decoding warpgroup's pipeline state of the stages: here a producer's, which fills stages."""
        return self.producer_state()

    def decode(
        self, lines: Any, operands: Operands, sB: cute.Tensor, slots: Int32, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile, rank: Int32,
    ) -> pipeline.PipelineState:  # fmt: skip
        """Decode the weights of one output tile; called by all threads of decoding warpgroup `rank`.

        Returns the pipeline state after the tile's k-tiles.

        Args:
            lines: the thread's decoder, from `lines`.
            sB: shared memory that receives the decoded weights.
            slots: shared-memory address of the packed weights, before they are decoded.
            state: pipeline state of the tile's first k-tile.
            work: the output tile.
            rank: the index of this decoding warpgroup.
        """
        raise NotImplementedError

    def fragments(self, sA: cute.Tensor, sB: cute.Tensor, slab: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """Return A and B of all stages as wgmma descriptors.

        Args:
            sA, sB: shared memory of all stages.
            slab: number of the first slab (64 rows of the tile) that the calling warpgroup multiplies.
        """
        mma = self.tiled_mma()
        thread_mma = mma.get_slice(slab * THREADS)
        return mma.make_fragment_A(thread_mma.partition_A(sA)), mma.make_fragment_B(thread_mma.partition_B(sB))

    def scales(self, operands: Operands, share: TileShare) -> Any:
        """Make the object that holds a thread's scales; it serves all tiles of the warpgroup.

        Its `begin` starts loading the first scales of a tile.
        """
        return NoScales()

    def loops(self, work: WorkTile, num_k_tiles: Int32) -> list[Loop]:
        """Return the loops over k-tiles that `mma` runs one after the other for a tile.

        Tiles may differ in the slabs or the depth that must be multiplied. Each such case has a loop of its own, and
        loops of cases that do not apply to a tile run zero times. A branch within or around one common loop would make
        ptxas wait for each wgmma.
        """
        return [Loop(num_k_tiles, self.tile.slabs, self.tile.k)]

    def accumulators(self) -> cute.Tensor:
        """Allocate a thread's accumulators: (registers of a wgmma, slab, 1). A slab is 64 rows of the tile."""
        return cute.make_rmem_tensor(self.tiled_mma().partition_shape_C((self.tile.m, self.tile.n)), Float32)

    @cute.jit
    def mma(
        self, acc: cute.Tensor, fragments: tuple, scales: NoScales, tile: MmaTile, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, turns: Turns,
    ):  # fmt: skip
        """Compute acc = A B^T for a tile, over the whole contraction; called by a whole warpgroup.

        Returns the pipeline state after the tile's k-tiles. The wgmmas of one k-tile stay in flight: while they run,
        the stage of the previous k-tile is released.

        Args:
            fragments: descriptors of A and B, from `fragments`.
            scales: the thread's scales, from `scales`.
            tile: the tile to multiply.
            state: pipeline state of the tile's first stage.
            turns: turns of pingpong warpgroups at the tensor cores (turns.py).
        """
        release = state.clone()
        if const_expr(self.may_be_empty):
            acc.fill(0.0)
        turns.wait()
        for loop in self.loops(tile.work, tile.num_k_tiles):
            state, release = self._k_tiles(acc, *fragments, *loop, stages, state, release)
        turns.pass_on()
        warpgroup.wait_group(0)
        if tile.num_k_tiles > 0:
            stages.consumer_release(release)
        return state

    @cute.jit
    def _k_tiles(
        self, acc: cute.Tensor, tCrA: cute.Tensor, tCrB: cute.Tensor, num_k_tiles: Int32,
        slabs: cutlass.Constexpr[int], depth: cutlass.Constexpr[int], before: Int32 | cutlass.Constexpr[int],
        stages: pipeline.PipelineTmaAsync, state: pipeline.PipelineState, release: pipeline.PipelineState,
    ):  # fmt: skip
        """Multiply the k-tiles of one `Loop` and leave the last k-tile's wgmmas in flight.

        Returns the state of the next stage, and the state of the next stage to release.

        Args:
            tCrA, tCrB: descriptors of A and B, from `fragments`.
            num_k_tiles: number of k-tiles of the loop.
            slabs: how many of the warpgroup's slabs (64 rows each) the loop multiplies.
            depth: how many elements of each k-tile's depth the loop multiplies.
            before: number of k-tiles that earlier loops of the tile multiply.
            state: pipeline state of the loop's first stage.
            release: pipeline state of the next stage to release.
        """
        tiled_mma = self.tiled_mma()
        for k_tile in cutlass.range(num_k_tiles, unroll=1):
            stages.consumer_wait(state)
            self.after_wait()
            warpgroup.fence()
            has_begun = before + k_tile > 0
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
