"""Agents of the race check and their vector clocks: warps, cp.async copies, operations of the async proxy."""

from __future__ import annotations

import numpy as np

# Rows of a vector clock. An entry says up to which of an agent's clocks its accesses are ordered before what follows
ALL = 0  # accesses by one's own proxy;
ASYNC_SHARED, ASYNC_GLOBAL = 1, 2  # writes of the generic proxy, before accesses of the async proxy (proxy fences);
INITS = 3  # mbarrier.init alone (fence.mbarrier_init).
ROWS = 4
FOREVER = np.iinfo(np.int64).max
SHIFT = 32  # an epoch is an agent's number << SHIFT | its clock; 0 is none
CLOCK = (1 << SHIFT) - 1
FEWEST = 64


def join(to: np.ndarray | None, other: np.ndarray | None) -> np.ndarray | None:
    """Return the elementwise maximum of two clocks, written to `to` if it is long enough; None is a clock of zeros."""
    if other is None:
        return to
    if to is None:
        return other.copy()
    if other.shape[1] > to.shape[1]:
        to = longer(to, other.shape[1])
    np.maximum(to[:, : other.shape[1]], other, out=to[:, : other.shape[1]])
    return to


def longer(clock: np.ndarray, count: int) -> np.ndarray:
    """Return a clock with room for at least `count` agents."""
    if count <= clock.shape[1]:
        return clock
    out = np.zeros((ROWS, 1 << (count - 1).bit_length()), np.int64)  # lengths are powers of two, so that few differ
    out[:, : clock.shape[1]] = clock
    return out


class Agent:
    """One sequence of ordered accesses: a warp, or asynchronous work that it issued.

    Attributes:
        now: its own clock, increased when others may learn of it.
        clock: the latest clock of each agent that this agent knows.
        memo: (kind of access, memory state) -> state after the access, valid while `clock` and `now` are unchanged.
        proxied: True for the async proxy, which sees writes of the generic proxy only after proxy fences.
    """

    proxied = False

    def __init__(self, number: int, now: int, clock: np.ndarray):
        self.number, self.now = number, now
        self.clock = longer(clock, number + 1)
        self.memo: dict[tuple, int] = {}

    @property
    def epoch(self) -> int:
        """The agent's number and clock, combined in one number."""
        return self.number << SHIFT | self.now

    def learn(self, clock: np.ndarray | None) -> None:
        """Acquire a clock."""
        if clock is not None:
            self.clock = join(self.clock, clock)
            self.memo = {}

    def knows(self, epoch: int, row: int = ALL) -> bool:
        """Return True if another agent's accesses in an epoch are ordered before this agent's next access."""
        number = epoch >> SHIFT
        return epoch == self.epoch or (number < self.clock.shape[1] and self.clock.item(row, number) >= epoch & CLOCK)


class Warp(Agent):
    """A warp, named by `cta` and `index`.

    Accesses by a single lane belong to `lone`, so that this lane can release its accesses alone.

    Attributes:
        lone: the agent of a lane that acts alone.
        synced: the clock at the last synchronisation of all lanes.
        lanes_know: for the warp, its copies and `lone`, the clock up to which all lanes know each other's accesses.
        before_fence: the clock at the last fence, which later relaxed stores and atomics release.
        unfenced: clocks received by relaxed loads; the next fence acquires them.
        copier: agent number of this warp's cp.async copies.
        copies: the clock of these copies.
        groups: the clock of the copies at each commit.
        slots: agent numbers of issued operations, with their last clocks. A number is reused after its last use is
            ordered before the new one.
        last: by kind of operation that runs in order (wgmma, tcgen05), the last one.
        issued: by instruction, the clock and agent number of the warp's last issue.
    """

    def __init__(self, number: int, copier: int, lone: int, clock: np.ndarray, cta, index: int):
        super().__init__(number, 1, longer(clock, max(copier, lone) + 1))
        self.cta, self.index = cta, index
        self.lone, self.synced, self.lanes_know = LoneLane(self, lone), 0, [0, 0, 0]
        self.clock[ALL, [number, lone]] = 1
        self.before_fence: np.ndarray | None = None
        self.unfenced: np.ndarray | None = None
        self.copier, self.copies, self.groups = copier, 1, []
        self.slots: dict[int, int] = {}
        self.last: dict[str, Operating] = {}
        self.issued: dict[str, tuple] = {}

    def tick(self) -> None:
        """Begin a new epoch, which no other agent knows yet."""
        self.now += 1
        self.clock[ALL, [self.number, self.lone.number]] = self.now
        self.memo = {}

    def synchronise(self) -> None:
        """Order all earlier accesses of the warp's lanes before all later ones."""
        self.synced = self.now
        self.lanes_know = [self.now, self.clock.item(ALL, self.copier), self.now]
        self.tick()

    def learn_of_lanes(self, clock: np.ndarray | None) -> None:
        """Acquire a clock that includes accesses of this warp's own lanes."""
        for place, number in enumerate((self.number, self.copier, self.lone.number)):
            if clock is not None and number < clock.shape[1]:
                self.lanes_know[place] = max(self.lanes_know[place], clock.item(ALL, number))

    def handed_on(self, alone: bool) -> np.ndarray:
        """Return the clock that the warp's lanes release.

        If a lane acts alone, the clock leaves out the other lanes' accesses since the lanes last synchronised.
        """
        if not alone:
            return self.clock
        clock = self.clock.copy()
        np.minimum(clock[:, self.number], self.synced, out=clock[:, self.number])
        return clock

    def fence_rows(self, rows: tuple[int, ...]) -> None:
        """Order later accesses of the async proxy, or uses of mbarriers, after everything that the warp knows."""
        for row in rows:
            np.maximum(self.clock[row], self.clock[ALL], out=self.clock[row])
        self.tick()


class LoneLane(Agent):
    """Agent for a single active lane of a warp, whichever it is; it knows everything that the warp knows."""

    def __init__(self, warp: Warp, number: int):
        self.warp, self.number, self.cta = warp, number, warp.cta

    @property
    def now(self) -> int:
        """The warp's clock."""
        return self.warp.now

    @property
    def clock(self) -> np.ndarray:
        """The warp's known clocks."""
        return self.warp.clock

    @property
    def memo(self) -> dict[tuple, int]:
        """States after this lane's accesses; the warp clears them with its own."""
        return self.warp.memo.setdefault(LoneLane, {})


class Copying(Agent):
    """Agent for the copies of a warp's cp.async instruction: generic proxy, ordered only by groups."""

    def __init__(self, warp: Warp):
        super().__init__(warp.copier, warp.copies, warp.clock.copy())


class Operating(Agent):
    """Agent for an operation of the async proxy.

    It begins with its issuer's clock; agents that wait for the operation learn its clock.
    """

    proxied = True

    def __init__(self, number: int, now: int, clock: np.ndarray, issuer: Warp, place: int):
        super().__init__(number, now, clock)
        self.clock[ALL, number] = now
        self.issuer, self.place = issuer, place

    def tick(self) -> None:
        """Do nothing: an operation has no accesses after its completion."""
