"""A CTA's output tiles, and the ring in shared memory through which the scheduler warp hands tiles to the other
warps."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32

from ..device.invariant import Invariant

# Four slots: two tiles that pingpong warpgroups work on, one whose operands are being loaded, one in reserve. With
# tickets two slots: then tickets are drawn late, and tiles that begin together are neighbours (1 % of DeepSeek-V3's FC1
# under skew).
STAGES, TICKET_STAGES = 4, 2
SLOT_WORDS = 6


class WorkTile(NamedTuple):
    """A CTA's output tile.

    Attributes:
        expert: the group; negative: the end mark, after which there are no tiles.
        row: in a GEMM the tile's first row; in a weight gradient the group's first row.
        group_end: the row after the group's last row.
        m_tile: in a GEMM the index of the row tile in the group; in a weight gradient the index of the tile along dw's
            rows.
        n_tile: the index of the tile along the columns.
        pairs_columns: for adaptive clusters. Not 0: the two CTAs have the same rows and neighbouring columns; 0: they
            have the same columns and neighbouring rows.
    """

    expert: Int32
    row: Int32
    group_end: Int32
    m_tile: Int32
    n_tile: Int32
    pairs_columns: Int32


def no_work() -> WorkTile:
    """Make the end mark: a tile with expert < 0, after which there are no tiles."""
    return WorkTile(*[Int32(word) for word in (-1, 0, 0, 0, 0, 0)])


class TileGrid(NamedTuple):
    """Number of cluster tiles of one expert's output, along m (rows) and n (columns). A GEMM ignores `num_m`, since the
    group's rows determine it."""

    num_m: Int32
    num_n: Int32


class WorkRing(Invariant):
    """Ring of `stages` slots in shared memory; a slot holds one tile, six words. The scheduler warp writes tiles to it
    for `num_consumer_warps` other warps of its CTA. Every one of these warps reads every tile.

    Args:
        barriers: the mbarriers of the ring's pipeline.
        slots: shared memory for the tiles.
    """

    def __init__(self, barriers: cute.Pointer, slots: cute.Pointer, num_consumer_warps: int, stages: int = STAGES):
        self.stages = stages
        self.pipeline = pipeline.PipelineAsync.create(
            barrier_storage=barriers,
            num_stages=stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 1),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, num_consumer_warps),
            defer_sync=True,
        )
        self.slots = cute.make_tensor(slots, cute.make_layout((SLOT_WORDS, stages)))

    def producer_state(self) -> pipeline.PipelineState:
        """Make the scheduler warp's state of the ring, before its first tile."""
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)

    def consumer_state(self) -> pipeline.PipelineState:
        """Make a consumer warp's state of the ring, before its first tile."""
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)

    @cute.jit
    def put(self, state: pipeline.PipelineState, work: WorkTile):
        """Put one tile into the ring, once a slot is free. All lanes of the scheduler warp call this."""
        self.pipeline.producer_acquire(state)
        with cute.arch.elect_one():
            for word in cutlass.range_constexpr(SLOT_WORDS):
                self.slots[word, state.index] = work[word]
            self.pipeline.producer_commit(state)

    @cute.jit
    def get(self, state: pipeline.PipelineState) -> WorkTile:
        """Wait for the next tile, copy it and free its slot. All lanes of a consumer warp call this."""
        self.pipeline.consumer_wait(state)
        work = WorkTile(*[cute.arch.make_warp_uniform(self.slots[word, state.index]) for word in range(SLOT_WORDS)])
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            self.pipeline.consumer_release(state)
        return work
