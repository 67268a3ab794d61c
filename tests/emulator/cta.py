"""A cluster of CTAs: shared memory with bounds checks, named barriers, and the cluster barrier."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .engines.mbarrier import Mbarrier
from .faults import Fault
from .lanes import SHARED_BASE
from .memory import SHIFTS
from .warps import Unit

if TYPE_CHECKING:
    from .machine import Machine

RANK_SHIFT = 24  # shared addresses have the CTA's rank in the cluster above this bit
OFFSET_MASK = (1 << RANK_SHIFT) - 1
MOST_BARRIERS = 16
SM_REGISTERS, MOST_REGISTERS = 65536, 256


class NamedBarrier:
    """One of a CTA's 16 named barriers: the number of arrivals, and the waiting units."""

    def __init__(self) -> None:
        self.arrived = 0
        self.wanted: int | None = None  # None: all threads of the CTA
        self.waiting: list[tuple] = []  # unit, block to go on at, lanes, result


class Cta:
    """A CTA: units of warps, shared memory, barriers.

    `words[size]` is shared memory as words of `size` bytes. Offsets in it count from SHARED_BASE, the lowest address
    that a kernel may use. Memory is initially filled with 0xFF, which is NaN in every floating-point format.
    """

    def __init__(self, machine: Machine, cluster: Cluster, linear: int, unit_warps: int):
        self.machine, self.kernel, self.cluster, self.linear = machine, machine.kernel, cluster, linear
        self.id = machine.coordinates(linear)
        shape = machine.cluster
        self.in_cluster = tuple(i % c for i, c in zip(self.id, shape, strict=True))
        self.cluster_id = tuple(i // c for i, c in zip(self.id, shape, strict=True))
        self.rank = self.in_cluster[0] + shape[0] * (self.in_cluster[1] + shape[1] * self.in_cluster[2])
        self.size = (self.kernel.shared_bytes + machine.dynamic + 15) // 16 * 16
        self.smem = np.full(self.size, 0xFF, np.uint8)
        self.words = {size: self.smem.view(f"u{size}") for size in SHIFTS}
        self.chunks = self.smem.reshape(-1, 16)
        self.unfenced = np.zeros(self.size // 16, bool)  # 16 bytes that the generic proxy wrote, and no fence followed
        warps = int(np.prod(machine.block)) // 32
        step = unit_warps or warps
        self.units = [Unit(self, first, min(step, warps - first)) for first in range(0, warps, step)]
        self.warps = warps
        self.threads = warps * 32  # number of threads that have not exited
        self.launch_registers = min(SM_REGISTERS // (self.threads * self.kernel.ctas_per_sm) // 8 * 8, MOST_REGISTERS)
        self.barriers: dict[int, NamedBarrier] = {}
        self.mbarriers: dict[int, Mbarrier] = {}
        self.registers: dict[int, int] = {}  # by warp, since its setmaxnreg
        self.tensor_memory: np.ndarray | None = None  # words of 128 lanes x 512 columns
        self.tensor_columns: list[tuple[int, int]] = []  # allocated, as [begin, end)
        self.may_allocate = True
        self.tensor_queue: list = []  # tcgen05 operations that were not done, in order

    @property
    def shared_base(self) -> int:
        """The shared::cluster address of the CTA's first byte."""
        return SHARED_BASE + (self.rank << RANK_SHIFT)

    def params(self, offset: int, dtype):
        """Read a kernel parameter."""
        return np.frombuffer(self.machine.params, dtype, 1, offset)[0]

    def peer(self, rank: int) -> Cta:
        """Return the CTA of a rank in this cluster, which must not have ended."""
        if rank == self.rank:
            return self
        if rank >= len(self.cluster.ctas):
            raise Fault(f"shared address of rank {rank} in a cluster of {len(self.cluster.ctas)}")
        found = self.cluster.ctas[rank]
        if not found.threads:
            raise Fault(f"access to the shared memory of rank {rank}, all of whose threads have exited")
        return found

    def owner(self, address: int) -> tuple[Cta, int]:
        """Return (CTA, offset) for a shared-memory address of the cluster."""
        return self.peer(address >> RANK_SHIFT), (address & OFFSET_MASK) - SHARED_BASE

    def place(self, addresses: np.ndarray, size: int, write: bool = False) -> list[tuple[Cta, object, np.ndarray]]:
        """Check shared-memory addresses of accesses of `size` bytes.

        Returns:
            For each CTA: (the CTA, the indices of its addresses, their offsets).
        """
        if not addresses.size:
            return []
        rank = addresses.item(0) >> RANK_SHIFT
        offset = addresses - np.uint32((rank << RANK_SHIFT) + SHARED_BASE)
        room = self.size - size
        bits = int(np.bitwise_or.reduce(offset, axis=None))
        if not bits & (size - 1) and (bits <= room or int(offset.max()) <= room):
            cta = self.peer(rank)
            if write:
                cta.unfenced[offset >> 4] = True
            return [(cta, slice(None), offset)]
        return self._place_by_rank(addresses, size, write)

    def _place_by_rank(self, addresses: np.ndarray, size: int, write: bool) -> list[tuple[Cta, object, np.ndarray]]:
        out = []
        for rank in np.unique(addresses >> RANK_SHIFT):
            which = np.flatnonzero(addresses >> RANK_SHIFT == rank)
            offset = (addresses[which] & np.uint32(OFFSET_MASK)).astype(np.int64) - SHARED_BASE
            beyond = (offset < 0) | (offset > self.size - size)
            if beyond.any():
                bad = int(addresses[which[beyond][0]])
                end = SHARED_BASE + self.size
                raise Fault(f"shared address {bad:#x}, {size} bytes: outside of [{SHARED_BASE:#x}, {end:#x})")
            if (offset & (size - 1)).any():
                bad = int(addresses[which[offset & (size - 1) != 0][0]])
                raise Fault(f"shared address {bad:#x} is not a multiple of {size}")
            cta = self.peer(int(rank))
            if write:
                cta.unfenced[offset >> 4] = True
            out.append((cta, which, offset))
        return out

    # named barriers
    def arrive(self, unit: Unit, number: int, wanted: int | None, lanes: np.ndarray, wait: tuple | None) -> None:
        """Count arrivals of `lanes` at a named barrier, in whole warps as PTX does.

        PTX ISA, "Parallel Synchronization and Communication Instructions: bar, barrier".

        Args:
            wait: (block to continue at, result). None: the lanes do not wait.
        """
        if not 0 <= number < MOST_BARRIERS:
            raise Fault(f"named barrier {number}: there are {MOST_BARRIERS}")
        if wanted is not None and (wanted <= 0 or wanted % 32):
            raise Fault(f"named barrier {number}: {wanted} threads are not a positive multiple of 32")
        barrier = self.barriers.setdefault(number, NamedBarrier())
        if barrier.arrived and barrier.wanted != wanted:
            raise Fault(f"named barrier {number}: used with {wanted} threads while others wait for {barrier.wanted}")
        barrier.wanted = wanted
        barrier.arrived += int(lanes.reshape(-1, 32).any(1).sum()) * 32
        if self.machine.observer is not None:
            unit.acting = lanes
            self.machine.observer.release(unit, barrier)
        if wait is not None:
            barrier.waiting.append((unit, lanes, *wait))
            unit.blocked.append(("named barrier", number))
        self.settle(number)

    def settle(self, number: int) -> None:
        """Release the waiting units of a named barrier if all arrivals have come."""
        barrier = self.barriers.get(number)
        if not barrier or not barrier.arrived or barrier.arrived < (barrier.wanted or self.threads):
            return
        if barrier.wanted and barrier.arrived > barrier.wanted:
            raise Fault(f"named barrier {number}: {barrier.arrived} arrivals of {barrier.wanted}")
        del self.barriers[number]
        reductions = [result for *_, result in barrier.waiting if result is not None]
        for reduction in reductions:
            reduction(reductions)
        for unit, lanes, at, _ in barrier.waiting:
            unit.groups.append([at, lanes])
            unit.blocked.remove(("named barrier", number))
            if self.machine.observer is not None:
                unit.acting = lanes
                self.machine.observer.acquire(unit, barrier)

    def exited(self, unit: Unit, lanes: np.ndarray) -> None:
        """Count exited threads, for which barriers no longer wait."""
        self.threads -= int(lanes.sum())
        unit.exited |= lanes
        for number in list(self.barriers):
            self.settle(number)
        self.cluster.settle()

    def check_registers(self) -> None:
        """Raise a Fault if setmaxnreg asked for more registers than the launch reserved: it would hang."""
        launch = self.launch_registers
        total = sum(self.registers.get(warp, launch) for warp in range(self.warps))
        if self.registers and total > launch * self.warps:
            per_warp = [self.registers.get(warp, launch) for warp in range(self.warps)]
            raise Fault(f"setmaxnreg: warps ask for {per_warp} registers; the launch reserved {launch} for each")

    def check_end(self) -> None:
        """Raise Fault if a CTA whose threads have exited left pending work or allocations."""
        if self.tensor_columns:
            raise Fault(f"TMEM columns {self.tensor_columns} were not freed")
        for unit in self.units:
            unit.check_end()
        self.check_registers()


class Cluster:
    """CTAs that can access each other's shared memory by rank. Without clusters, each CTA is a cluster of its own."""

    def __init__(self, machine: Machine, linears: list[int], unit_warps: int):
        self.machine = machine
        self.ctas: list[Cta] = []
        ctas = [Cta(machine, self, linear, unit_warps) for linear in linears]
        self.ctas = sorted(ctas, key=lambda cta: cta.rank)
        self.units = [unit for cta in self.ctas for unit in cta.units]
        self.waiting: list[tuple] = []  # unit, block to go on at, lanes, phase

    def arrive(self, unit: Unit, lanes: np.ndarray) -> None:
        """Arrive at the cluster's barrier (PTX ISA, "barrier.cluster")."""
        if (unit.cluster_phase[lanes] != unit.cluster_waited[lanes]).any():
            raise Fault("barrier.cluster.arrive twice without a wait between")
        if self.machine.observer is not None:
            unit.acting = lanes
            for phase in np.unique(unit.cluster_phase[lanes]):
                self.machine.observer.release(unit, ("cluster", self, int(phase)))
        unit.cluster_phase[lanes] += 1
        self.settle()

    def wait(self, unit: Unit, at: int, lanes: np.ndarray) -> None:
        """Wait until all threads of the cluster have arrived, or exited."""
        if (unit.cluster_phase[lanes] == unit.cluster_waited[lanes]).any():
            raise Fault("barrier.cluster.wait without an arrive before")
        for phase in np.unique(unit.cluster_waited[lanes]):
            self.waiting.append((unit, at, lanes & (unit.cluster_waited == phase), int(phase)))
            unit.blocked.append(("cluster barrier", int(phase)))
        self.settle()

    def settle(self) -> None:
        """Release units that wait for a phase at which all threads have arrived."""
        for item in list(self.waiting):
            unit, at, lanes, phase = item
            if all(((u.cluster_phase > phase) | u.exited).all() for u in self.units):
                self.waiting.remove(item)
                unit.cluster_waited[lanes] += 1
                unit.groups.append([at, lanes])
                unit.blocked.remove(("cluster barrier", phase))
                if self.machine.observer is not None:
                    unit.acting = lanes
                    self.machine.observer.acquire(unit, ("cluster", self, phase))

    def dissolve(self) -> None:
        """Break reference cycles, so that memory and registers are freed at once.

        Otherwise a later garbage collection would free them.
        """
        for cta in self.ctas:
            cta.units.clear()
        self.units.clear()
        self.ctas.clear()
