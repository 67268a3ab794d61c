"""Asynchronous operations, which run at any time between their issue and a wait for them; cp.async."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..faults import Fault

if TYPE_CHECKING:
    from ..machine import Machine


class Operation:
    """One operation of the async proxy. It runs once: at a random time, or when a thread waits for it.

    A Fault that it raises names the place of its issue.
    """

    def __init__(self, unit: Any, what: str, run: Callable[[Operation], None]):
        self.unit, self.what, self.block = unit, what, unit.block
        self._run: Callable[[Operation], None] | None = run
        if unit.observer is not None:
            unit.observer.release(unit, self)
            unit.observer.acquire(self, self)

    @property
    def done(self) -> bool:
        """Return True if the operation has run."""
        return self._run is None

    def __call__(self) -> None:
        if self._run is None:
            return
        run, self._run = self._run, None
        try:
            run(self)
        except Fault as fault:
            raise fault.located(f"{self.what}, issued by {self.unit.machine.place(self.unit, self.block)}") from None
        if self.unit.observer is not None:
            self.unit.observer.release(self, self)


def post(unit: Any, what: str, run: Callable[[Operation], None]) -> Operation:
    """Issue an operation that may run at any time from now on."""
    operation = Operation(unit, what, run)
    unit.machine.pending.append(operation)
    return operation


def finish(operation: Operation, unit: Any) -> None:
    """Run an operation that `unit` waits for, unless it has already run."""
    operation()
    if unit.observer is not None:
        unit.observer.acquire(unit, operation)


def advance(machine: Machine) -> None:
    """Run one random pending operation; from a tensor core's queue, the first one."""
    pending = machine.pending
    at = machine.random.randrange(len(pending))
    pending[at], pending[-1] = pending[-1], pending[at]
    pending.pop()()


class _Copy:
    """The copies of one cp.async: lane `lanes[i]` copies `size` bytes, of which the first `read[i]` come from
    `source[i]`.
    """

    def __init__(self, lanes, groups, to, source, size: int, read):
        self.lanes, self.groups, self.to, self.source, self.size, self.read = lanes, groups, to, source, size, read
        self.due = np.ones(lanes.size, bool)
        self.unit: Any = None  # for the observer, which hears of copies when they are issued,
        self.acting = lanes  # and of these lanes

    def tell(self, unit: Any) -> None:
        """Report all accesses to the observer, lanes with equal byte counts together."""
        self.unit = unit
        for count in np.unique(self.read):
            here = self.read == count
            self.acting = self.lanes[here]
            if count:
                unit.observer.read("global", None, self.source[here], int(count), self)
            for cta, which, at in unit.cta.place(self.to[here], self.size):
                self.acting = self.lanes[here][which]
                unit.observer.write("shared", cta, at, self.size, self)

    def do(self, unit: Any, which: np.ndarray) -> None:
        """Run the copies of the lanes `which` that have not run yet."""
        which = which & self.due
        if not which.any():
            return
        self.due &= ~which
        to, source, read = self.to[which], self.source[which], self.read[which]
        memory = unit.machine.memory
        ((cta, _, at),) = unit.cta.place(to, self.size, write=True)
        full = read == self.size
        if full.all():
            view, index = memory.place(source, self.size, "cp.async", width=4)
            for j in range(self.size // 4):
                cta.words[4][(at >> 2) + j] = view[index + j]
            return
        for j in range(self.size):
            value = np.zeros(to.size, np.uint8)
            there = read > j
            if there.any():
                view, index = memory.place(source[there] + np.uint64(j), 1, "cp.async")
                value[there] = view[index]
            cta.words[1][at + j] = value


class Copies:
    """cp.async: copies of 4, 8 or 16 bytes from global to shared memory, in groups of each thread.

    PTX ISA, "Data Movement and Conversion Instructions: Non-bulk copy": "cp.async", "cp.async.commit_group",
    "cp.async.wait_group / cp.async.wait_all"; "mbarrier: cp.async.mbarrier.arrive". A copy runs at its issue or as late
    as the thread waits for it, as the machine's schedule decides. Its writes belong to the generic proxy (PTX ISA,
    "Async proxy", does not list cp.async).
    """

    def begin(self) -> None:
        """Start without copies."""
        self.copies: list[_Copy] = []
        self.copy_group = np.zeros(self.n, np.int64)

    def end(self) -> None:
        """Raise Fault if a thread ended without waiting for its copies."""
        if any(copy.due.any() for copy in self.copies):
            raise Fault("cp.async was not waited for")

    def cp_async(self, to, source, size: int, read, m) -> None:
        """Issue a copy of `size` bytes for each lane; bytes from `read` on are zeros."""
        lanes = self.lanes(m)
        to, source = self.full(to)[lanes], self.full(source)[lanes]
        read = self.full(read)[lanes].astype(np.int64)
        if (read > size).any():
            raise Fault(f"cp.async of {size} bytes reads {int(read.max())}")
        if (source[read > 0] & np.uint64(size - 1)).any():
            raise Fault(f"cp.async of {size} bytes from {int(source[0]):#x}: misaligned")
        copy = _Copy(lanes, self.copy_group[lanes].copy(), to, source, size, read)
        if self.observer is not None:
            copy.tell(self)
        if self.machine.happens_at_once():
            copy.do(self, copy.due)
        else:
            self.copies.append(copy)

    def cp_commit(self, m) -> None:
        """Close the current group of each lane."""
        self.copy_group[m if m is not True else slice(None)] += 1
        self.acting = m
        if self.observer is not None:
            self.observer.release(self, ("copies",))

    def cp_wait(self, n: int, m, all_copies: bool = False) -> None:
        """Wait until all groups except the last `n` are copied; with `all_copies`, also for copies in no closed group.

        cp.async.wait_group 0 does not wait for copies of the open group; cp.async.wait_all does.
        """
        acts = np.ones(self.n, bool) if m is True else m
        for copy in self.copies:
            closed = copy.groups < self.copy_group[copy.lanes] - n
            copy.do(self, acts[copy.lanes] & (True if all_copies else closed))
        self.copies = [copy for copy in self.copies if copy.due.any()]
        self.acting = m
        if self.observer is not None:
            self.observer.acquire(self, ("copies", None if all_copies else n))

    def cp_mbarrier_arrive(self, address, m, noinc: bool = True) -> None:
        """Arrive at an mbarrier after the lanes' earlier copies; unless `noinc`, first raise the expected count by
        one.
        """
        lanes = self.lanes(m)
        self.copies = [copy for copy in self.copies if copy.due.any()]
        copies = list(self.copies)
        groups: dict[int, list[int]] = {}
        for lane in lanes:
            groups.setdefault(int(self.full(address)[lane]), []).append(int(lane))
        for at, members in groups.items():
            barrier = self.mbarrier(at)
            if not noinc:
                barrier.expect_arrivals(len(members))

            def run(operation: Operation, barrier=barrier, members=members) -> None:
                which = np.zeros(self.n, bool)
                which[members] = True
                for copy in copies:
                    copy.do(self, which[copy.lanes])
                barrier.arrive(operation, len(members))

            post(self, "cp.async.mbarrier.arrive", run)
