"""Tickets: a cluster draws its next tile when it is ready for it.

Tiles take different times: some have few rows, some wait for memory. If each cluster's tiles are fixed from the start,
clusters that began in step drift apart, and weights that several clusters could share in L2 are read from memory once
for each: 22.6 GB instead of 16 GB for DeepSeek-V3's 256 experts with 256 rows on average (Dirichlet 0.5). If clusters
draw tickets, neighbouring tiles begin together, and in the last round no cluster waits for a slow one.

The counter is an int32 in device memory, 0 before and after the kernel. A kernel of n cluster tiles draws n tickets, as
its schedulers count them; the cluster that draws the last ticket sets the counter to 0. Kernels that may run at the
same time have different counters.

If a cluster has two CTAs, the first CTA draws a ticket and broadcasts it to a slot of the second:

    full    in the second CTA, of a slot: the ticket's bytes, by transaction; 1 arrival (that CTA, which expects them)
    empty   in the first CTA, of a slot: 1 arrival (the second CTA, which has read it)
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from ..device.gmem import vector_at
from ..device.invariant import Invariant
from ..device.select import select

BROADCAST_SLOTS = 2
TICKET_BYTES = 4
COUNTER_BYTES = 4
NUM_BARRIERS = 2 * BROADCAST_SLOTS


def counter(tickets: Int64, position: Int32) -> Int64:
    """Return the address of the counter of kernel number `position` of a call, which may begin before the kernel before
    it has ended; 0 without tickets."""
    return select(tickets != 0, tickets + COUNTER_BYTES * position, Int64(0))


class Tickets(Invariant):
    """The tickets of a cluster's scheduler warps: the first CTA's warp draws, and sends the ticket to the second's."""

    def __init__(self, counter: Int64, barriers: cute.Pointer, broadcast: cute.Pointer, cluster_size: int):
        self.counter = counter
        self.full = barriers
        self.empty = barriers + BROADCAST_SLOTS
        self.broadcast = broadcast
        self.is_pair = cluster_size > 1

    @cute.jit
    def make_barriers(self):
        """Initialise the barriers; called by one warp before the cluster's CTAs see each other's barriers."""
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(NUM_BARRIERS):
                cute.arch.mbarrier_init(self.full + i, 1)

    @cute.jit
    def take(self, number: Int32, num_tickets: Int32) -> Int32:
        """Return the cluster's ticket number `number` (0, 1, ...) to every lane of its scheduler warps."""
        slot, phase = number % BROADCAST_SLOTS, number // BROADCAST_SLOTS % 2
        ticket = Int32(0)
        if cute.arch.block_idx_in_cluster() == 0:
            ticket = self._take(num_tickets)
            if const_expr(self.is_pair):
                cute.arch.mbarrier_wait(self.empty + slot, phase ^ 1)
                with cute.arch.elect_one():
                    cute.arch.store_async_dsmem(self.broadcast + slot, ticket, self.full + slot, 1)
        else:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(self.full + slot, TICKET_BYTES)
            cute.arch.mbarrier_wait(self.full + slot, phase)
            ticket = cute.make_tensor(self.broadcast + slot, cute.make_layout(1))[0]
            cute.arch.sync_warp()
        return ticket

    @cute.jit
    def release(self, number: Int32):
        """Free a ticket's slot, which was read. Not called for the last ticket, after which the first CTA may have
        ended."""
        if const_expr(self.is_pair):
            if cute.arch.block_idx_in_cluster() > 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(self.empty + number % BROADCAST_SLOTS, 0)

    @cute.jit
    def _take(self, num_tickets: Int32) -> Int32:
        ticket = Int32(0)
        if cute.arch.lane_idx() == 0:
            counter = vector_at(Int32, self.counter)
            ticket = cute.arch.atomic_add(counter.iterator, Int32(1), sem="relaxed", scope="gpu")
            if ticket == num_tickets - 1:
                # A strong store, like the atomics of other clusters: a plain store would not be ordered after them.
                cute.arch.store(counter.iterator, Int32(0), sem="relaxed", scope="gpu")
        return cute.arch.shuffle_sync(ticket, 0)
