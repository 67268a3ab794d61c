"""Agents of the race check and their vector clocks: warps, copies of cp.async, operations of the async proxy."""

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
    """Return the elementwise maximum of two clocks, in `to` where it is long enough; None is a clock of zeros."""
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
    """One thread of ordered work: a warp, or work that it has started.

    Attributes:
        now: its clock, which goes up when others may learn of it. clock: what it knows of others, and of itself.
        memo: (kind of access, state of memory) -> state after it, as long as `clock` and `now` stay.
        proxied: it is the async proxy's, which sees writes of the generic proxy after proxy fences only.
    """

    proxied = False

    def __init__(self, number: int, now: int, clock: np.ndarray):
        self.number, self.now = number, now
        self.clock = longer(clock, number + 1)
        self.memo: dict[tuple, int] = {}

    @property
    def epoch(self) -> int:
        """Return the agent's number and clock in one number."""
        return self.number << SHIFT | self.now

    def learn(self, clock: np.ndarray | None) -> None:
        """Acquire a clock."""
        if clock is not None:
            self.clock = join(self.clock, clock)
            self.memo = {}

    def knows(self, epoch: int, row: int = ALL) -> bool:
        """Say whether what an agent did in an epoch is ordered before what this one does now."""
        number = epoch >> SHIFT
        return epoch == self.epoch or (number < self.clock.shape[1] and self.clock.item(row, number) >= epoch & CLOCK)


class Warp(Agent):
    """A warp. `cta` and `index` name it.

    What one lane does alone is its `lone`'s, so that this lane may hand it on without the others'.

    Attributes:
        lone: the lane that acts alone. synced: the clock at the last synchronisation of all lanes.
        lanes_know: up to which clock of the warp, of its copies and of `lone` all lanes know what the others did.
        before_fence: the clock at the last fence; relaxed stores and atomics hand it on.
        unfenced: clocks that relaxed loads received; the next fence takes them.
        copier: the agent number of this warp's cp.async copies; copies: their clock; groups: the clock of each commit.
        slots: agent numbers of issued operations, with their last clock. A number is used again once its last use is
            ordered before the new one.
        last: the last operation of a kind that runs in order: wgmma, tcgen05.
        issued: by instruction, when the warp last issued an operation, and as which agent.
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
        """Begin a new epoch, of which nobody knows yet."""
        self.now += 1
        self.clock[ALL, [self.number, self.lone.number]] = self.now
        self.memo = {}

    def synchronise(self) -> None:
        """Order all that the warp's lanes did before all that they do."""
        self.synced = self.now
        self.lanes_know = [self.now, self.clock.item(ALL, self.copier), self.now]
        self.tick()

    def learn_of_lanes(self, clock: np.ndarray | None) -> None:
        """Acquire a clock that lanes of this warp handed on, too."""
        for place, number in enumerate((self.number, self.copier, self.lone.number)):
            if clock is not None and number < clock.shape[1]:
                self.lanes_know[place] = max(self.lanes_know[place], clock.item(ALL, number))

    def handed_on(self, alone: bool) -> np.ndarray:
        """Return what the warp's lanes hand on; one lane alone: nothing that others did since they synchronised."""
        if not alone:
            return self.clock
        clock = self.clock.copy()
        np.minimum(clock[:, self.number], self.synced, out=clock[:, self.number])
        return clock

    def fence_rows(self, rows: tuple[int, ...]) -> None:
        """Let the async proxy, or uses of mbarriers, be ordered after all that the warp knows."""
        for row in rows:
            np.maximum(self.clock[row], self.clock[ALL], out=self.clock[row])
        self.tick()


class LoneLane(Agent):
    """A lane that acts without the others of its warp, whatever lane it is: an agent that knows what the warp knows."""

    def __init__(self, warp: Warp, number: int):
        self.warp, self.number, self.cta = warp, number, warp.cta

    @property
    def now(self) -> int:
        """Return the warp's clock."""
        return self.warp.now

    @property
    def clock(self) -> np.ndarray:
        """Return what the warp knows."""
        return self.warp.clock

    @property
    def memo(self) -> dict[tuple, int]:
        """Return the states after this lane's accesses, which the warp forgets with its own."""
        return self.warp.memo.setdefault(LoneLane, {})


class Copying(Agent):
    """Copies of a warp's cp.async instruction: of the generic proxy, ordered by groups only."""

    def __init__(self, warp: Warp):
        super().__init__(warp.copier, warp.copies, warp.clock.copy())


class Operating(Agent):
    """An operation of the async proxy: begins with its issuer's clock, and is known to who waits for it."""

    proxied = True

    def __init__(self, number: int, now: int, clock: np.ndarray, issuer: Warp, place: int):
        super().__init__(number, now, clock)
        self.clock[ALL, number] = now
        self.issuer, self.place = issuer, place

    def tick(self) -> None:
        """Do nothing: an operation does not go on after its completion."""
