"""The mainloop: TMA fills a ring of shared-memory stages with A and B tiles, wgmma warpgroups empty it.

A is a tile of `tile_m` rows of x, at any row: groups need no alignment, and rows past a group's end are computed and
never stored. B is a tile of an expert's weights (weights.py). In a cluster, CTAs that share a tile each load a slice
and multicast it.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from ..invariant import Invariant
from ..specs import TileConfig
from .tile_scheduler import WorkTile
from .weights import ExpertAddress, expert_offset, lo_hi

WARPS_PER_GROUP = 4
MMA_K = 16


class Operands(NamedTuple):
    """What the producer reads: TMA atoms and coordinate tensors of x (rows, k) and of the weights (n, k, lo, hi)."""

    atom_a: cute.CopyAtom
    x: cute.Tensor
    atom_b: cute.CopyAtom
    w: cute.Tensor
    address: ExpertAddress


class Mainloop(Invariant):
    """Compile-time shape of the mainloop, and its two halves: `load` for the TMA warp, `mma` for a warpgroup.

    Pipeline "stages": the producer, 1 thread of the TMA warp, arms a stage's transaction count and TMA arrives. The
    consumers, one lane of each MMA warp of each CTA that shares the stage, arrive when their wgmma have read it.
    """

    def __init__(self, dtype: type[cutlass.Numeric], tile: TileConfig, parts: int, transposed: bool, stages: int):
        self.dtype = dtype
        self.tile = tile
        self.parts = parts
        self.stages = stages
        self.num_mma_warpgroups = tile.m // 64
        self.part_n = tile.n // parts
        self.b_major = OperandMajorMode.MN if transposed else OperandMajorMode.K
        self.cluster = cute.make_layout((tile.cluster_m, tile.cluster_n))
        self.a_layout = self._smem_layout(OperandMajorMode.K, tile.m, stages)
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
        """One 64 x tile.n wgmma a warpgroup, warpgroups stacked along rows."""
        return sm90_utils.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            self.b_major,
            Float32,
            (self.num_mma_warpgroups, 1, 1),
            (64, self.tile.n),
        )

    def operands(self, x: cute.Tensor, w: cute.Tensor, address: ExpertAddress) -> Operands:
        """Host side: the TMA descriptors."""
        atom_a, x_tma = self._tma(x, OperandMajorMode.K, self.tile.m, self.tile.cluster_n)
        atom_b, w_tma = self._tma(w, self.b_major, self.part_n, self.tile.cluster_m)
        return Operands(atom_a, x_tma, atom_b, w_tma, address)

    def _tma(self, tensor: cute.Tensor, major: OperandMajorMode, rows: int, num_multicast: int):
        one_cta = num_multicast == 1
        op = cpasync.CopyBulkTensorTileG2SOp() if one_cta else cpasync.CopyBulkTensorTileG2SMulticastOp()
        layout = self._smem_layout(major, rows)
        return cpasync.make_tiled_tma_atom(op, tensor, layout, (rows, self.tile.k), num_multicast=num_multicast)

    def make_pipeline(self, barriers: cute.Pointer) -> pipeline.PipelineTmaAsync:
        peers = self.tile.cluster_m + self.tile.cluster_n - 1
        consumers = peers * self.num_mma_warpgroups * WARPS_PER_GROUP
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, consumers),
            tx_count=self.stage_bytes,
            cta_layout_vmnk=cute.make_layout((1, self.tile.cluster_m, self.tile.cluster_n, 1)),
            defer_sync=True,
        )

    def producer_state(self) -> pipeline.PipelineState:
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)

    def consumer_state(self) -> pipeline.PipelineState:
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)

    @cute.jit
    def load(
        self, operands: Operands, sA: cute.Tensor, sB: cute.Tensor, stages: pipeline.PipelineTmaAsync,
        state: pipeline.PipelineState, work: WorkTile,
    ):  # fmt: skip
        """Fill stages with all of K for one output tile; called by the TMA warp. Returns the advanced state."""
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        rank_m, rank_n = rank % self.tile.cluster_m, rank // self.tile.cluster_m
        coord = (rank_m, rank_n)
        a_mask = cute.make_layout_image_mask(self.cluster, coord, mode=1) if self.tile.cluster_n > 1 else 0
        b_mask = cute.make_layout_image_mask(self.cluster, coord, mode=0) if self.tile.cluster_m > 1 else 0

        x = cute.domain_offset((work.row, 0), operands.x)
        gA = cute.local_tile(x, (self.tile.m, self.tile.k), (0, None))
        tAsA, tAgA = cpasync.tma_partition(
            operands.atom_a, rank_n, cute.make_layout(self.tile.cluster_n), cute.group_modes(sA, 0, 2),
            cute.group_modes(gA, 0, 2),
        )  # fmt: skip
        gB = cute.local_tile(operands.w, (self.part_n, self.tile.k), (None, None, None, None))
        sB_parts = cute.flat_divide(sB, (self.part_n, self.tile.k))
        tBsB, tBgB = cpasync.tma_partition(
            operands.atom_b, rank_m, cute.make_layout(self.tile.cluster_m), cute.group_modes(sB_parts, 0, 2),
            cute.group_modes(gB, 0, 2),
        )  # fmt: skip

        first = expert_offset(operands.address, work.expert)
        for k_tile in cutlass.range(cute.size(gA, mode=[2]), unroll=1):
            stages.producer_acquire(state)
            barrier = stages.producer_get_barrier(state)
            cute.copy(
                operands.atom_a, tAgA[None, k_tile], tAsA[None, state.index], tma_bar_ptr=barrier, mcast_mask=a_mask
            )
            for part in cutlass.range_constexpr(self.parts):
                lo, hi = lo_hi(first + part * operands.address.part_units)
                cute.copy(
                    operands.atom_b, tBgB[None, work.n_tile, k_tile, lo, hi], tBsB[None, part, 0, state.index],
                    tma_bar_ptr=barrier, mcast_mask=b_mask,
                )  # fmt: skip
            state.advance()
        return state

    @cute.jit
    def mma(
        self, tiled_mma: cute.TiledMma, acc: cute.Tensor, tCrA: cute.Tensor, tCrB: cute.Tensor, num_k_tiles: Int32,
        stages: pipeline.PipelineTmaAsync, state: pipeline.PipelineState,
    ):  # fmt: skip
        """acc = A B^T over all of K; called by a whole warpgroup. Returns the advanced state.

        One k-tile of wgmma stays in flight: the stage before it is released while it runs.
        """
        release = state.clone()
        for k_tile in cutlass.range(num_k_tiles, unroll=1):
            stages.consumer_wait(state)
            warpgroup.fence()
            for k_block in cutlass.range_constexpr(self.tile.k // MMA_K):
                tiled_mma.set(warpgroup.Field.ACCUMULATE, Boolean(k_tile > 0) if const_expr(k_block == 0) else True)
                at = (None, None, k_block, state.index)
                cute.gemm(tiled_mma, acc, tCrA[at], tCrB[at], acc)
            warpgroup.commit_group()
            state.advance()
            if k_tile > 0:
                warpgroup.wait_group(1)
                stages.consumer_release(release)
                release.advance()
        warpgroup.wait_group(0)
        stages.consumer_release(release)
        return state
