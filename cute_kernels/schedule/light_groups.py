"""Base of the schedulers that mix tiles of light groups (few rows) with tiles of heavy groups (many rows).

Tiles of light groups wait for memory; tiles of heavy groups wait for the tensor cores. In the order of experts, all SMs
would reach groups of one kind at the same time, so either memory or the tensor cores would be idle. So a scheduler has
two cursors, one among light groups and one among heavy groups, and walks both kinds at the same time.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Int32

from ..device.select import select
from ..device.warps import last_lane
from ..tiles import TileConfig
from .groups import Groups, are_offs, clamp, group_size, int32_at
from .tile_scheduler import GroupTileScheduler, GroupWindow
from .work import TileGrid, WorkRing, WorkTile, no_work

LIGHT, HEAVY = "light", "heavy"
"""The two kinds of groups."""


class Cursor(NamedTuple):
    """A position in the sequence of all tiles of groups of one kind: LIGHT (few rows) or HEAVY.

    Attributes:
        window: the 32 groups that held the cursor's last tile.
        tiles_before: number of tiles of this kind before the window.
    """

    window: GroupWindow
    tiles_before: Int32


def new_cursor() -> Cursor:
    """Make a cursor that stands before the first group."""
    return Cursor(GroupWindow(Int32(-32), Int32(0), Int32(0), Int32(0)), Int32(0))


class LightGroupScheduler(GroupTileScheduler):
    """Scheduler that distinguishes light groups (at most `light_rows` rows) from heavy groups. A subclass decides the
    order of light and heavy tiles."""

    def __init__(self, tile: TileConfig, groups: Groups, grid: TileGrid, light_rows: int):
        super().__init__(tile, groups, grid)
        self.light_rows = light_rows

    def _is_of(self, kind: str, rows: Int32) -> Boolean:
        """Return True if a group of `rows` rows is of a kind, LIGHT or HEAVY."""
        return (rows <= self.light_rows) if kind == LIGHT else (rows > self.light_rows)

    @cute.jit
    def _rows_of(self, group: Int32) -> Int32:
        """Return the number of rows of a group: end - begin as `group_rows` returns them. So it is right even if the
        sizes add up to more than `groups.rows`."""
        groups = self.groups
        rows = Int32(0)
        if are_offs(groups):
            before = int32_at(groups, cutlass.max(group - 1, Int32(0)))
            begin = clamp(select(group > 0, before, Int32(0)), Int32(0), groups.rows)
            rows = cutlass.max(clamp(int32_at(groups, group), Int32(0), groups.rows) - begin, Int32(0))
        else:
            rows = group_size(groups, group)
        return rows

    @cute.jit
    def _find(self, cursor: Cursor, kind: cutlass.Constexpr[str], tile: Int32) -> tuple[WorkTile, Cursor]:
        """Find tile number `tile` among the tiles of all groups of a kind (LIGHT or HEAVY). Return the tile and the
        advanced cursor.

        Past the last tile, return `no_work()`, the end mark. For each kind, numbers must increase from call to call.
        """
        window, tiles_before = cursor
        window_end = last_lane(window.tiles_end)
        while (tile >= window_end) & (window.base + 32 < self.groups.count):
            tiles_before = window_end
            window = self._load_window(window.base + 32, last_lane(window.end), tiles_before, kind)
            window_end = last_lane(window.tiles_end)
        work = no_work()
        if tile < window_end:
            work = self._tile_in_window(window, tile, tiles_before)
        return work, Cursor(window, tiles_before)

    @cute.jit
    def _hand_over(self, ring: WorkRing, state: pipeline.PipelineState, work: WorkTile) -> pipeline.PipelineState:
        """Put a tile into the ring, through which the scheduler warp hands tiles to the other warps. Return the ring's
        advanced state. For `no_work()`, do nothing."""
        if work.expert >= 0:
            ring.put(state, work)
            state.advance()
        return state
