"""The scheduler of tile_scheduler.py for clusters that draw tickets, with light groups' tiles between heavy ones'."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..device.chosen import chosen
from ..device.warps import warp_sum
from ..tiles import TileConfig
from .groups import Groups
from .light_groups import HEAVY, LIGHT, LightGroupScheduler, start
from .tickets import Tickets
from .work import TileGrid, WorkRing, no_work

# Light groups with fewer tiles than this share of the others' come last, together.
FEW = 16


class TicketScheduler(LightGroupScheduler):
    """Cluster tiles have places: first as many as there are clusters, whose place is the cluster's own, then by ticket.

    A light group has at most `light_rows` rows: its weights take longer to come from memory than to be multiplied. In
    the order of experts all SMs wait for memory at such a group, and leave memory alone at others (gpt-oss-120b,
    Dirichlet 0.5: 5 % of the time). So light tiles and heavy ones come in the same proportion from begin to end.

    Without a counter to draw from, tiles are dealt in the order of experts.
    """

    def __init__(self, tile: TileConfig, groups: Groups, grid: TileGrid, light_rows: int, tickets: Tickets):
        super().__init__(tile, groups, grid, light_rows)
        self.tickets = tickets

    @cute.jit
    def _count(self) -> tuple[Int32, Int32]:
        """Cluster tiles of light groups and of heavy ones."""
        light, heavy = Int32(0), Int32(0)
        for group in cutlass.range(cute.arch.lane_idx(), self.groups.count, 32):
            rows = self._rows_of(group)
            tiles = self._num_clusters(rows)
            of_light = chosen(self._is_of(LIGHT, rows), tiles, Int32(0))
            light += of_light
            heavy += tiles - of_light
        return warp_sum(light), warp_sum(heavy)

    def _light_before(self, place: Int32, num_light: Int32, num_heavy: Int32, num_clusters: Int32) -> Int32:
        """How many tiles before a place by ticket are light."""
        first_heavy = cutlass.min(num_heavy, num_clusters)
        first_light = cutlass.min(num_light, num_clusters - first_heavy)
        count, light, heavy = place - num_clusters, num_light - first_light, num_heavy - first_heavy
        in_proportion = Int32(Int64(count) * light // cutlass.max(light + heavy, Int32(1)))
        come_last = cutlass.max(count - heavy, Int32(0))
        return first_light + chosen(light * FEW < heavy, come_last, in_proportion)

    @cute.jit
    def run(self, ring: WorkRing):
        if self.groups.tickets == 0:
            self.deal(ring)
        else:
            self._draw(ring)

    @cute.jit
    def _draw(self, ring: WorkRing):
        """Find the cluster's tiles and put them into the ring, then the end mark."""
        place, num_clusters = self._cluster()
        heavy, light = start(), start()
        state, drawn = ring.producer_state(), Int32(0)
        # The first places go to heavy tiles, so that nobody waits for groups to be counted, which takes 2 us.
        work, heavy = self._find(heavy, HEAVY, place)
        state = self._hand_over(ring, state, work)

        num_light, num_heavy = self._count()
        total = num_light + num_heavy
        if (place >= num_heavy) & (place < total):
            work, light = self._find(light, LIGHT, place - num_heavy)
            state = self._hand_over(ring, state, work)
        while place < total:
            place = num_clusters + self.tickets.draw(drawn, total)
            if place < total:
                self.tickets.release(drawn)
                drawn += 1
                of_light = self._light_before(place, num_light, num_heavy, num_clusters)
                if self._light_before(place + 1, num_light, num_heavy, num_clusters) > of_light:
                    work, light = self._find(light, LIGHT, of_light)
                else:
                    work, heavy = self._find(heavy, HEAVY, place - of_light)
                state = self._hand_over(ring, state, work)
        ring.put(state, no_work())
