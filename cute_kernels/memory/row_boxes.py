"""Rows of x in boxes: a tile loads as many of them as its group has rows for.

The rest of the tile's shared memory keeps what was there, NaN included: rows of a GEMM do not mix, and rows past a
group's end are never stored. To load them all the same takes their way from L2 and, behind the last row of all, where
TMA fills with zeros, longer: an SM gets 38 GB/s of such rows, 62 of others.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32

from ..schedule.work import WorkTile
from ..tiles import TileConfig


def num_boxes(tile: TileConfig, work: WorkTile) -> Int32:
    """Boxes of a tile that hold rows of its group; a cluster's last tile may begin behind the group's end."""
    rows = cutlass.max(cutlass.min(work.group_end - work.row, Int32(tile.m)), Int32(0))
    return cute.ceil_div(rows, tile.box_rows)


def acquire(stages: pipeline.PipelineTmaAsync, state: pipeline.PipelineState, num_bytes: Int32) -> None:
    """Wait for an empty stage and let it expect `num_bytes`, which only run time knows."""
    stages.sync_object_empty.wait(state.index, state.phase)
    stages.sync_object_full.arrive_and_expect_tx(state.index, num_bytes)
