"""TMA loads of rows of x in boxes of `TileConfig.box_rows` rows. A tile loads only the boxes that hold rows of its
group.

The remaining shared memory of the tile keeps its old content, possibly NaN. This is harmless: rows of a GEMM do not
mix, and rows past a group's end are never stored. Loading the other boxes would cost L2 traffic. Past the last row of
x, where TMA fills with zeros, loads are even slower: an SM gets 38 GB/s of such rows, 62 GB/s of others.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32

from ..schedule.work import WorkTile
from ..tiles import TileConfig


def num_boxes(tile: TileConfig, work: WorkTile) -> Int32:
    """Return how many of a tile's TMA boxes (`TileConfig.box_rows` rows of x each) hold rows of the tile's group.

    It is 0 for a tile that begins after the group's end. Such tiles exist because a cluster has a whole number of
    tiles, so its last tile may be past the end.
    """
    rows = cutlass.max(cutlass.min(work.group_end - work.row, Int32(tile.m)), Int32(0))
    return cute.ceil_div(rows, tile.box_rows)


def acquire(stages: pipeline.PipelineTmaAsync, state: pipeline.PipelineState, num_bytes: Int32) -> None:
    """Wait until the stage of `state` is empty, then let the stage's full barrier expect `num_bytes` bytes. The number
    may be a run-time value."""
    stages.sync_object_empty.wait(state.index, state.phase)
    stages.sync_object_full.arrive_and_expect_tx(state.index, num_bytes)
