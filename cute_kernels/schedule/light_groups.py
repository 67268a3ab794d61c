"""Light groups and heavy ones, with a cursor for each kind, so that tiles of both can be in work at the same time.

A light group's tiles wait for memory, a heavy one's for the tensor cores. In the order of experts all SMs would come to
one kind at once, and wait for the one while the other idles.
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


class Cursor(NamedTuple):
    """A position among groups of one kind: the 32 groups that its last tile lay in, and the tiles before them."""

    window: GroupWindow
    tiles_before: Int32


def new_cursor() -> Cursor:
    """Before the first groups."""
    return Cursor(GroupWindow(Int32(-32), Int32(0), Int32(0), Int32(0)), Int32(0))


class LightGroupScheduler(GroupTileScheduler):
    """A light group has at most `light_rows` rows. A subclass says in which order tiles of both kinds come."""

    def __init__(self, tile: TileConfig, groups: Groups, grid: TileGrid, light_rows: int):
        super().__init__(tile, groups, grid)
        self.light_rows = light_rows

    def _is_of(self, kind: str, rows: Int32) -> Boolean:
        return (rows <= self.light_rows) if kind == LIGHT else (rows > self.light_rows)

    @cute.jit
    def _rows_of(self, group: Int32) -> Int32:
        """Rows of a group as walks find them, also where sizes exceed the buffer."""
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
        """Tile number `tile` of the groups of a kind, none where there are fewer; numbers grow from call to call."""
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
        if work.expert >= 0:
            ring.put(state, work)
            state.advance()
        return state
