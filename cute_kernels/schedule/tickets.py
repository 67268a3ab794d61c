"""Tickets: numbers of tiles. A cluster draws a ticket from a counter when it is ready for its next tile.

Tiles take different times: some have few rows, some wait for memory. If each cluster's tiles were fixed from the start,
clusters that began in step would drift apart. Then weights that several clusters could share in L2 would be read from
memory once for each cluster: 22.6 GB instead of 16 GB for DeepSeek-V3's 256 experts with 256 rows on average (Dirichlet
0.5). If clusters draw tickets, neighbouring tiles begin together, and in the last round no cluster waits for a slow
one.

The counter is an int32 in device memory, 0 before and after the kernel. A kernel of n cluster tiles draws n tickets, as
its schedulers count them. The cluster that draws the last ticket sets the counter to 0. Kernels that may run at the
same time have different counters.

If a cluster has two CTAs, the first CTA draws a ticket and sends it to the second CTA, into one of BROADCAST_SLOTS
slots in shared memory. Each slot has two mbarriers:

    full    in the second CTA: the ticket's bytes, by transaction; 1 arrival (the second CTA, which expects the bytes)
    empty   in the first CTA: 1 arrival (the second CTA, which has read the slot)
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
    """Return the address of the ticket counter of kernel number `position` of a call. Each kernel of a call has its own
    counter, since a kernel may begin before the previous one has ended.

    tickets: the address of the first counter; 0: no tickets, and the result is 0.
    """
    return select(tickets != 0, tickets + COUNTER_BYTES * position, Int64(0))


class Tickets(Invariant):
    """The source of tickets for a cluster's scheduler warps. The scheduler warp of the first CTA draws a ticket and
    sends it to the second CTA's scheduler warp.

    Args:
        counter: the address of the counter.
        barriers: NUM_BARRIERS mbarriers, the full ones first.
        broadcast: BROADCAST_SLOTS slots of an int32 in shared memory.
        cluster_size: CTAs of a cluster.
    """

    def __init__(self, counter: Int64, barriers: cute.Pointer, broadcast: cute.Pointer, cluster_size: int):
        self.counter = counter
        self.full = barriers
        self.empty = barriers + BROADCAST_SLOTS
        self.broadcast = broadcast
        self.is_pair = cluster_size > 1

    @cute.jit
    def make_barriers(self):
        """Initialise the barriers. One warp calls this, before the cluster's CTAs see each other's barriers."""
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(NUM_BARRIERS):
                cute.arch.mbarrier_init(self.full + i, 1)

    @cute.jit
    def take(self, number: Int32, num_tickets: Int32) -> Int32:
        """Draw the cluster's next ticket, and return it in every lane of the cluster's scheduler warps. All lanes of
        these warps (one warp in each CTA) call this.

        Tickets are 0, 1, 2, ... over all clusters. With C clusters, ticket t stands for cluster tile C + t. If there is
        no such tile, the cluster has no more work and must not draw again.

        Args:
            number: how many tickets the cluster drew before; it determines the slot and the phase of the barriers by
                which the second CTA gets the ticket.
            num_tickets: number of tickets that all clusters of the kernel draw together, including the last ticket of
                each cluster, which finds no tile. The cluster that draws ticket `num_tickets` - 1 sets the counter to
                0.
        """
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
        """Free the slot (an int32 in the second CTA's shared memory) of the cluster's ticket number `number`, after the
        ticket was read. Do not call this for the last ticket, since the first CTA may have ended after it."""
        if const_expr(self.is_pair):
            if cute.arch.block_idx_in_cluster() > 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(self.empty + number % BROADCAST_SLOTS, 0)

    @cute.jit
    def _take(self, num_tickets: Int32) -> Int32:
        """Draw a ticket from the counter, and set the counter to 0 if the ticket is the last one. Return the ticket in
        all lanes of the warp.

        num_tickets: number of tickets that all clusters of the kernel draw together.
        """
        ticket = Int32(0)
        if cute.arch.lane_idx() == 0:
            counter = vector_at(Int32, self.counter)
            ticket = cute.arch.atomic_add(counter.iterator, Int32(1), sem="relaxed", scope="gpu")
            if ticket == num_tickets - 1:
                # A strong store, like the atomics of other clusters: a plain store would not be ordered after them.
                cute.arch.store(counter.iterator, Int32(0), sem="relaxed", scope="gpu")
        return cute.arch.shuffle_sync(ticket, 0)
