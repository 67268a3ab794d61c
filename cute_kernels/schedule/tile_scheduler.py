"""The tile scheduler. It finds a CTA's next output tile from group sizes that only the device knows.

A *cluster tile* is the tiles that the CTAs of a cluster make together. In a persistent grid of C clusters, cluster c
takes cluster tiles c, c + C, c + 2C, ... of one linear order. The order has experts outermost; inside an expert, bands
of RASTER_BAND row tiles; inside a band, one weight tile after the other, each with all row tiles of the band. So CTAs
that run at the same time share a few weight tiles and a few row tiles, both in L2.

One warp of each CTA walks the groups, 32 experts a step, one in each lane. It hands each tile to the other warps
through a small ring in shared memory. Only this warp reads group sizes, and the MMAs of the previous tile hide its
latency. ticket_scheduler.py is the variant for clusters that draw tickets, wgrad_scheduler.py the variant for weight
gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from ..device.invariant import Invariant
from ..device.select import select
from ..device.warps import inclusive_scan, last_lane
from ..tiles import TileConfig
from .groups import Groups, group_rows
from .work import TileGrid, WorkRing, WorkTile, no_work

# Row tiles that sweep the weight tiles side by side: 8 x 128 rows of K = 7168 are 15 MB, a quarter of an H200's L2,
# and a weight tile is read from memory once for 8 uses.
RASTER_BAND = 8


class GroupWindow(NamedTuple):
    """A window of 32 consecutive groups, one in each lane of a warp.

    Attributes:
        base: index of the first group.
        begin, end: the first row of the lane's group, and the row after its last row.
        tiles_end: number of cluster tiles of all groups from group 0 up to and including the lane's group.
    """

    base: Int32
    begin: Int32
    end: Int32
    tiles_end: Int32


class GroupTileScheduler(Invariant):
    """Scheduler of one CTA's tiles. The top of this file has the order of tiles.

    Args:
        tile: the CTA's tile and cluster, known at compile time.
        groups: group sizes.
        grid: number of cluster tiles of an expert's output.
    """

    def __init__(self, tile: TileConfig, groups: Groups, grid: TileGrid):
        self.tile_m = tile.m
        self.cluster_m = tile.cluster_m
        self.cluster_n = tile.cluster_n
        self.adaptive = tile.adaptive
        self.groups = groups
        self.grid = grid

    def _num_m_clusters(self, rows: Int32) -> Int32:
        """Return the number of cluster tiles that cover `rows` rows. A cluster tile is the tiles that a cluster's CTAs
        make together."""
        rows_per_cluster = self.tile_m * self.cluster_m
        return (rows + rows_per_cluster - 1) // rows_per_cluster

    def _num_clusters(self, rows: Int32) -> Int32:
        """Return the number of cluster tiles of a group of `rows` rows.

        In an adaptive cluster, the two CTAs share either weights or rows. Two row tiles make a cluster tile for each
        weight tile. If the number of row tiles is odd, the last one makes a cluster tile for each two weight tiles.
        """
        if not self.adaptive:
            return self._num_m_clusters(rows) * self.grid.num_n
        row_tiles = (rows + self.tile_m - 1) // self.tile_m
        return row_tiles // 2 * self.grid.num_n + row_tiles % 2 * ((self.grid.num_n + 1) // 2)

    def _first_row(self, begin: Int32, m_tile: Int32) -> Int32:
        """Return the first row of row tile `m_tile` of a group that begins at row `begin`. It becomes
        `WorkTile.row`."""
        return begin + m_tile * self.tile_m

    def _is_of(self, kind: str, rows: Int32) -> Boolean:
        """Return True if a group of `rows` rows is of a kind: LIGHT (few rows) or HEAVY. `LightGroupScheduler` defines
        this method."""
        raise NotImplementedError

    @cute.jit
    def _load_window(
        self, base: Int32, rows_before: Int32, tiles_before: Int32, kind: cutlass.Constexpr[str | None] = None
    ) -> GroupWindow:
        """Load the window of groups base .. base + 31 from memory. Lanes past the last group hold empty groups.

        Args:
            base: index of the first group.
            rows_before, tiles_before: rows and cluster tiles of earlier groups.
            kind: count only the tiles of groups of this kind (light_groups.py); None: count all tiles.
        """
        present, begin, end = group_rows(self.groups, base, rows_before)
        tiles = Int32(0)
        if present:
            tiles = self._num_clusters(end - begin)
            if const_expr(kind is not None):
                tiles = select(self._is_of(kind, end - begin), tiles, Int32(0))
        return GroupWindow(base, begin, end, tiles_before + inclusive_scan(tiles, cute.arch.lane_idx()))

    @cute.jit
    def _tile_in_window(self, window: GroupWindow, tile: Int32, tiles_before: Int32) -> WorkTile:
        """Return this CTA's tile of cluster tile `tile`, which lies in one of the window's groups.

        Args:
            window: 32 consecutive groups.
            tile: number of the cluster tile, counted over all groups.
            tiles_before: number of cluster tiles before the window.
        """
        lane = cute.arch.popc(cute.arch.vote_ballot_sync(window.tiles_end <= tile))
        begin = cute.arch.shuffle_sync(window.begin, lane)
        end = cute.arch.shuffle_sync(window.end, lane)
        first_tile = tiles_before
        before = cute.arch.shuffle_sync(window.tiles_end, cutlass.max(lane - 1, Int32(0)))
        if lane > 0:
            first_tile = before

        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        tile_at = self._adaptive_tile_at if const_expr(self.adaptive) else self._tile_at
        return WorkTile(window.base + lane, *tile_at(tile - first_tile, begin, end, rank))

    def _in_bands(self, index: Int32, banded: Int32, swept: Int32) -> tuple[Int32, Int32]:
        """Return the coordinates of cluster tile `index` in a grid of `banded` x `swept` cluster tiles.

        The first side, of length `banded`, is cut into bands of RASTER_BAND tiles. The order goes through one band
        after the other, and through each band along the second side.
        """
        band = index // (RASTER_BAND * swept)
        in_band = index - band * RASTER_BAND * swept
        height = cutlass.max(cutlass.min(banded - band * RASTER_BAND, Int32(RASTER_BAND)), Int32(1))
        column = in_band // height
        return band * RASTER_BAND + in_band - column * height, column

    def _cluster_tile_at(self, index: Int32, rows: Int32) -> tuple[Int32, Int32]:
        """Return the coordinates (row and column, in cluster tiles) of cluster tile `index` of a group of `rows`
        rows."""
        return self._in_bands(index, self._num_m_clusters(rows), self.grid.num_n)

    def _tile_at(self, index: Int32, begin: Int32, end: Int32, rank: Int32) -> tuple[Int32, ...]:
        """Return this CTA's tile of cluster tile `index` of a group: the fields of `WorkTile` from `row` on.

        Args:
            index: number of the cluster tile in its group.
            begin, end: the group's first row, and the row after its last row.
            rank: the CTA's rank in its cluster, 0 or 1.
        """
        m_cluster, n_cluster = self._cluster_tile_at(index, end - begin)
        m_tile = m_cluster * self.cluster_m + rank % self.cluster_m
        n_tile = n_cluster * self.cluster_n + rank // self.cluster_m
        return self._first_row(begin, m_tile), end, m_tile, n_tile, Int32(0)

    @cute.jit
    def _adaptive_tile_at(self, index: Int32, begin: Int32, end: Int32, rank: Int32):
        """Return this CTA's tile in an adaptive cluster, as `_tile_at` does. The CTAs of an adaptive cluster share
        either weights or rows: they have neighbouring row tiles or, at a group's odd row tile, neighbouring weight
        tiles.

        The odd row tile belongs to the last band. Its cluster tile comes directly after the cluster tiles of the same
        two weight tiles, so that these are read from memory once. If only one weight tile is left, each CTA has half of
        the odd row tile's rows.
        """
        row_tiles = (end - begin + self.tile_m - 1) // self.tile_m
        pairs, odd = row_tiles // 2, row_tiles % 2
        last_band = cutlass.max(pairs - 1, Int32(0)) // RASTER_BAND
        band = cutlass.min(index // (RASTER_BAND * self.grid.num_n), last_band)
        in_band = index - band * RASTER_BAND * self.grid.num_n
        height = cutlass.min(pairs - band * RASTER_BAND, Int32(RASTER_BAND))
        joined = Int32(0)
        if band == last_band:
            joined = odd
        of_two = 2 * height + joined
        two = in_band // of_two
        in_two = in_band - two * of_two
        column = in_two // cutlass.max(height, Int32(1))
        m_tile = (band * RASTER_BAND + in_two - column * height) * 2 + rank
        n_tile = two * 2 + column
        pairs_columns = Int32(0)
        half = Int32(0)
        if (joined > 0) & ((column > 1) | (n_tile >= self.grid.num_n) | (height == 0)):
            m_tile, n_tile, pairs_columns = row_tiles - 1, two * 2 + rank, Int32(1)
            if two * 2 + 1 == self.grid.num_n:
                n_tile, pairs_columns, half = two * 2, Int32(0), Int32(self.tile_m // 2)
        row = self._first_row(begin, m_tile)
        if (half > 0) & (rank == 0):
            end = cutlass.min(end, row + half)
        return row + rank * half, end, m_tile, n_tile, pairs_columns

    def _cluster(self) -> tuple[Int32, Int32]:
        """Return the index of this CTA's cluster, and the number of clusters in the grid."""
        cluster_size = self.cluster_m * self.cluster_n
        bidx, _, _ = cute.arch.block_idx()
        gdim, _, _ = cute.arch.grid_dim()
        return bidx // cluster_size, gdim // cluster_size

    def run(self, ring: WorkRing) -> None:
        """Put all of this CTA's tiles into the ring. The scheduler warp calls this."""
        self.run_static(ring)

    @cute.jit
    def run_static(self, ring: WorkRing):
        """Put this CTA's tiles into the ring in a fixed order: every C-th cluster tile, for C clusters. Then put the
        end mark."""
        tile, num_clusters = self._cluster()
        state = ring.producer_state()
        tiles_before = Int32(0)
        window = self._load_window(Int32(0), Int32(0), tiles_before)
        window_end = last_lane(window.tiles_end)
        more = Boolean(True)
        while more:
            while (tile >= window_end) & (window.base + 32 < self.groups.count):
                tiles_before = window_end
                window = self._load_window(window.base + 32, last_lane(window.end), tiles_before)
                window_end = last_lane(window.tiles_end)
            more = tile < window_end
            work = no_work()
            if more:
                work = self._tile_in_window(window, tile, tiles_before)
            ring.put(state, work)
            state.advance()
            tile += num_clusters
