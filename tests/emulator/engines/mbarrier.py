"""mbarriers: objects in shared memory that count arrivals and bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..faults import Fault

MOST_COUNT = (1 << 20) - 1


class Mbarrier:
    """A phase's pending arrivals and bytes (PTX ISA, "mbarrier: Contents of the mbarrier object").

    A phase ends when no arrival and no byte is pending; the next one expects `count` arrivals again.
    """

    def __init__(self, count: int, name: str, observer: Any):
        if not 1 <= count <= MOST_COUNT:
            raise Fault(f"{name}: a count of {count} is not in [1, {MOST_COUNT}]")
        self.count = self.pending = count
        self.bytes = 0
        self.phase = 0  # how many have ended
        self.name, self.observer = name, observer

    def __str__(self) -> str:
        pending = f"{self.pending} of {self.count} arrivals and {self.bytes} bytes pending"
        return f"{self.name}: phase {self.phase}, {pending}"

    def expect_arrivals(self, count: int) -> None:
        """Add arrivals to this phase."""
        self.pending += count

    def expect(self, size: int) -> None:
        """Add bytes to this phase (PTX ISA, "mbarrier.expect_tx")."""
        self.bytes += size
        self._settle()

    def arrive(self, agent: Any, count: int = 1, size: int = 0) -> int:
        """Expect `size` bytes, then arrive `count` times; return the phase."""
        phase = self.phase
        self.bytes += size
        self.pending -= count
        if self.observer is not None:
            self.observer.release(agent, ("mbarrier", self, phase))
        if self.pending < 0:
            raise Fault(f"{self.name}: {-self.pending} arrivals more than the {self.count} expected")
        self._settle()
        return phase

    def complete(self, agent: Any, size: int) -> None:
        """Subtract bytes that were copied (PTX ISA, "mbarrier.complete_tx")."""
        self.bytes -= size
        if self.observer is not None:
            self.observer.release(agent, ("mbarrier", self, self.phase))
        self._settle()

    def _settle(self) -> None:
        if abs(self.bytes) > MOST_COUNT:
            raise Fault(f"{self.name}: {self.bytes} bytes pending are more than {MOST_COUNT}")
        if not self.pending and not self.bytes:
            self.phase += 1
            self.pending = self.count


class Mbarriers:
    """mbarrier instructions, run for each active lane (PTX ISA, "Parallel Synchronization: mbarrier").

    "mbarrier.init", "mbarrier.inval", "mbarrier.arrive" with ".expect_tx" and in the cluster, "mbarrier.expect_tx",
    "mbarrier.complete_tx", "mbarrier.test_wait / mbarrier.try_wait" with and without ".parity". The object is stored
    outside of shared memory, so loads of its 8 bytes do not show its state. try_wait never suspends: it returns at
    once.
    """

    def begin(self) -> None:
        """Do nothing: there is no state to set up."""

    def end(self) -> None:
        """Do nothing: an mbarrier may be in any phase when its CTA ends."""

    def mbarrier(self, address: int) -> Mbarrier:
        """Return the mbarrier at a shared address."""
        cta, at = self.cta.owner(address)
        found = cta.mbarriers.get(at)
        if found is None:
            raise Fault(f"mbarrier at {address:#x} was not initialised")
        return found

    def mbar_init(self, address, count, m) -> None:
        """Initialise an mbarrier. Raises Fault if there is one already, which must be invalidated first."""
        for a, c in zip(*self.active(m, address, count), strict=True):
            cta, at = self.cta.owner(int(a))
            if cta is not self.cta:
                raise Fault(f"mbarrier.init at {int(a):#x}, in another CTA")
            if at % 8 or not 0 <= at <= cta.size - 8:
                raise Fault(f"mbarrier.init at {int(a):#x}: misaligned, or outside of shared memory")
            if at in cta.mbarriers:
                raise Fault(f"mbarrier.init at {int(a):#x}, where one is and was not invalidated: {cta.mbarriers[at]}")
            cta.mbarriers[at] = Mbarrier(int(c), f"mbarrier {int(a):#x}", self.observer)
            if self.observer is not None:
                self.observer.release(self, ("init", cta.mbarriers[at]))

    def mbar_inval(self, address, m) -> None:
        """Invalidate an mbarrier, so that its memory can be used otherwise."""
        for (a,) in zip(*self.active(m, address), strict=True):
            cta, at = self.cta.owner(int(a))
            self.mbarrier(int(a))
            del cta.mbarriers[at]

    def mbar_arrive(self, address, count, tx: bool, m, remote: bool = False) -> np.ndarray:
        """Arrive at an mbarrier; return the phases as states.

        tx: False: arrive `count` times. True: arrive once and expect `count` bytes.
        """
        states = np.zeros(self.n, np.uint64)
        lanes = self.lanes(m)
        addresses, counts = self.full(address), self.full(count)
        for lane in lanes:
            barrier, c = self.mbarrier(int(addresses[lane])), int(counts[lane])
            states[lane] = barrier.arrive(self, 1, c) if tx else barrier.arrive(self, c)
        return states

    def mbar_expect(self, address, count, m) -> None:
        """Expect bytes without an arrival."""
        for a, c in zip(*self.active(m, address, count), strict=True):
            self.mbarrier(int(a)).expect(int(c))

    def mbar_complete(self, address, count, m) -> None:
        """Complete bytes without a copy."""
        for a, c in zip(*self.active(m, address, count), strict=True):
            self.mbarrier(int(a)).complete(self, int(c))

    def mbar_try(self, address, parity, m) -> np.ndarray:
        """Return for each lane True if the phase with this parity (0 or 1) has ended."""
        highest = int(np.max(parity if m is True else self.full(parity)[m]))
        if highest > 1:
            raise Fault(f"an mbarrier's phase of parity {highest}: parities are 0 and 1")
        return self._try(address, parity, m, lambda barrier, parity: barrier.phase & 1 != parity & 1)

    def mbar_test(self, address, state, m) -> np.ndarray:
        """Return for each lane True if the phase that an arrival returned as `state` has ended."""
        return self._try(address, state, m, lambda barrier, state: barrier.phase > state)

    def _try(self, address, key, m, ended) -> np.ndarray:
        self.acting = m
        out = np.zeros(self.n, bool)
        addresses, keys = self.full(address), self.full(key)
        seen: dict[tuple[int, int], bool] = {}
        if (m is True or m.all()) and (addresses == addresses[0]).all() and (keys == keys[0]).all():
            lanes = (0,)
        else:
            lanes = self.lanes(m)
        for lane in lanes:
            pair = int(addresses[lane]), int(keys[lane])
            if pair not in seen:
                barrier = self.mbarrier(pair[0])
                seen[pair] = bool(ended(barrier, pair[1]))
                if not seen[pair]:
                    self.spun, self.waits_for = True, barrier
                elif self.observer is not None:
                    self.observer.acquire(self, ("mbarrier", barrier, barrier.phase - 1))
            out[lane] = seen[pair]
        if len(lanes) == 1 and self.n > 1 and (m is True or m.all()):
            out[:] = out[0]
        return out
