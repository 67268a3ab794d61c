"""Tickets: cluster tiles go to clusters in the order in which those come for them.

Tiles take different times: some have few rows, some wait for memory. Where each cluster has its tiles from the start,
clusters that began in step drift apart, and weights that several of them read at once come from memory once for each:
22.6 GB instead of 16 for DeepSeek-V3's 256 experts with 256 rows on average (Dirichlet 0.5). Where they draw tickets,
neighbouring tiles begin together, whoever has them, and in the last round nobody waits for a cluster that fell behind.

The counter is an int32 in device memory, 0 before the kernel and after it: a kernel of n cluster tiles draws n tickets,
as the scheduler counts them, and who gets the last one puts it back. Two kernels that may run at once have one each.

A broadcast, where a cluster has two CTAs: the first draws, and sends the ticket to a slot of the second.

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
    """The counter of the kernel at a position in its call: it may begin before the one before it has ended."""
    return select(tickets != 0, tickets + COUNTER_BYTES * position, Int64(0))


class Tickets(Invariant):
    """What the scheduler warps of a cluster draw from: the first CTA's does, and sends it to the second's."""

    def __init__(self, counter: Int64, barriers: cute.Pointer, broadcast: cute.Pointer, cluster_size: int):
        self.counter = counter
        self.full = barriers
        self.empty = barriers + BROADCAST_SLOTS
        self.broadcast = broadcast
        self.is_pair = cluster_size > 1

    @cute.jit
    def make_barriers(self):
        """Called by one warp, before the cluster's CTAs see each other's barriers."""
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(NUM_BARRIERS):
                cute.arch.mbarrier_init(self.full + i, 1)

    @cute.jit
    def take(self, number: Int32, num_tickets: Int32) -> Int32:
        """The cluster's ticket number `number` (0, 1, ...), for every lane of its scheduler warps."""
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
        """A ticket's slot was read. Not that of the last one: the first CTA may have ended."""
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
                # Strong, as the atomics of other clusters are: nothing orders those before a plain store.
                cute.arch.store(counter.iterator, Int32(0), sem="relaxed", scope="gpu")
        return cute.arch.shuffle_sync(ticket, 0)
