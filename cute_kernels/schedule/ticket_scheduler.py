"""The scheduler of clusters that draw tickets (tickets.py). It spreads tiles of light groups between tiles of heavy
groups."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..device.select import select
from ..device.warps import warp_sum
from ..tiles import TileConfig
from .groups import Groups
from .light_groups import HEAVY, LIGHT, LightGroupScheduler, new_cursor
from .tickets import Tickets
from .work import TileGrid, WorkRing, no_work

# Light tiles come last, together, if light groups have less than 1/FEW of the heavy groups' tiles.
FEW = 16


class TicketScheduler(LightGroupScheduler):
    """Scheduler that draws tickets. A ticket is a number that stands for a cluster tile (the tiles that the CTAs of a
    cluster make together). With C clusters, the first tile of cluster c has number c, and ticket t stands for number C
    + t.

    A light group has at most `light_rows` rows: loading its weights takes longer than multiplying them. In the order of
    experts, all SMs would wait for memory at light groups, and leave memory idle at heavy ones (gpt-oss-120b, Dirichlet
    0.5: 5 % of the time). So light and heavy tiles are mixed in the same proportion from begin to end.

    Without a counter (`groups.tickets` is 0), each CTA's tiles are fixed, in the order of experts.
    """

    def __init__(self, tile: TileConfig, groups: Groups, grid: TileGrid, light_rows: int, tickets: Tickets):
        super().__init__(tile, groups, grid, light_rows)
        self.tickets = tickets

    @cute.jit
    def _count(self) -> tuple[Int32, Int32]:
        """Return two numbers of cluster tiles (tiles that a cluster's CTAs make together): of all light groups, and of
        all heavy groups."""
        light, heavy = Int32(0), Int32(0)
        for group in cutlass.range(cute.arch.lane_idx(), self.groups.count, 32):
            rows = self._rows_of(group)
            tiles = self._num_clusters(rows)
            of_light = select(self._is_of(LIGHT, rows), tiles, Int32(0))
            light += of_light
            heavy += tiles - of_light
        return warp_sum(light), warp_sum(heavy)

    def _light_before(self, number: Int32, num_light: Int32, num_heavy: Int32, num_clusters: Int32) -> Int32:
        """Return how many of the cluster tiles with numbers below `number` are tiles of light groups.

        The first C numbers (C = num_clusters) belong to heavy tiles, as far as there are any, then to light tiles. From
        number C on, light tiles are spread evenly among heavy tiles; if there are few light tiles (FEW), they come
        last.

        Args:
            number: at least C.
            num_light, num_heavy: cluster tiles of all light groups, and of all heavy groups.
            num_clusters: C, the number of clusters.
        """
        first_heavy = cutlass.min(num_heavy, num_clusters)
        first_light = cutlass.min(num_light, num_clusters - first_heavy)
        count, light, heavy = number - num_clusters, num_light - first_light, num_heavy - first_heavy
        in_proportion = Int32(Int64(count) * light // cutlass.max(light + heavy, Int32(1)))
        come_last = cutlass.max(count - heavy, Int32(0))
        return first_light + select(light * FEW < heavy, come_last, in_proportion)

    @cute.jit
    def run(self, ring: WorkRing):
        """Put this cluster's tiles into the ring, by tickets if there is a counter."""
        if self.groups.tickets == 0:
            self.run_static(ring)
        else:
            self.run_dynamic(ring)

    @cute.jit
    def run_dynamic(self, ring: WorkRing):
        """Draw tickets until none is left, and put each ticket's tile into the ring. Then put the end mark.

        Each ticket stands for a tile; one counter serves all clusters.
        """
        number, num_clusters = self._cluster()
        heavy, light = new_cursor(), new_cursor()
        state, taken = ring.producer_state(), Int32(0)
        # Heavy tiles have the first numbers, so that no cluster waits for groups to be counted, which takes 2 us.
        work, heavy = self._find(heavy, HEAVY, number)
        state = self._hand_over(ring, state, work)

        num_light, num_heavy = self._count()
        total = num_light + num_heavy
        if (number >= num_heavy) & (number < total):
            work, light = self._find(light, LIGHT, number - num_heavy)
            state = self._hand_over(ring, state, work)
        while number < total:
            number = num_clusters + self.tickets.take(taken, total)
            if number < total:
                self.tickets.release(taken)
                taken += 1
                of_light = self._light_before(number, num_light, num_heavy, num_clusters)
                if self._light_before(number + 1, num_light, num_heavy, num_clusters) > of_light:
                    work, light = self._find(light, LIGHT, of_light)
                else:
                    work, heavy = self._find(heavy, HEAVY, number - of_light)
                state = self._hand_over(ring, state, work)
        ring.put(state, no_work())
