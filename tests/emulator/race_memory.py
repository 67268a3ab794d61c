"""Shadow memory of the race check: for each granule the number of a state, which many granules share.

A state is (plain write, plain reads, strong reads, strong writes) as epochs, as in FastTrack, but with a set of reads,
and a set of writes by atomics and flags, which do not race with each other. Granules are 16 bytes as long as all
accesses to them are whole, else 4, else 1; nothing is lost, since an access never covers a part of a granule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .race_agents import ALL, SHIFT, Agent
from .race_lanes import LaneShadow

READ, WRITE, STRONG_READ, STRONG_WRITE = range(4)
STEPS = (16, 4, 1)  # bytes of a granule, by level
State = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class Conflict(Exception):
    """Raised for two accesses that nothing orders.

    Args:
        agent: the agent of the later access.
        epoch: the epoch of the earlier access. was_read: it was a read.
        row: the row of the clock in which the earlier access is missing.

    Attributes:
        offset: the offset in the shadow memory. place: the last instruction that read, or wrote, there.
        of_lanes: True: both accesses are by lanes of one warp.
    """

    def __init__(self, agent: Agent, epoch: int, was_read: bool, row: int):
        super().__init__()
        self.agent, self.epoch, self.was_read, self.row = agent, epoch, was_read, row
        self.offset = self.place = 0
        self.of_lanes = False


class States:
    """States by number; 0 is untouched memory. proxied: by agent number, True for agents of the async proxy."""

    def __init__(self, proxied: list[bool]) -> None:
        self._states: list[State] = [(0, (), (), ())]
        self._numbers: dict[State, int] = {self._states[0]: 0}
        self._proxied = proxied

    def after(self, state: int, agent: Agent, kind: int, row: int) -> int:
        """Return the state after an access; raise Conflict for a race.

        row: the row of the clock for the other proxy's writes.
        """
        write, reads, strong_reads, strong_writes = self._states[state]
        strong = kind in (STRONG_READ, STRONG_WRITE)
        for epoch in ((write,) if write else ()) + (() if strong else strong_writes):
            of = row if agent.proxied and not self._proxied[epoch >> SHIFT] else ALL
            if not agent.knows(epoch, of):
                raise Conflict(agent, epoch, False, of if agent.knows(epoch) else ALL)
        if kind in (WRITE, STRONG_WRITE):
            for epoch in reads + (() if strong else strong_reads):
                if not agent.knows(epoch):
                    raise Conflict(agent, epoch, True, ALL)
        if kind == WRITE:
            return self.number((agent.epoch, (), (), ()))
        if kind == READ:
            return self.number((write, _added(reads, agent), strong_reads, strong_writes))
        if kind == STRONG_READ:
            return self.number((write, reads, _added(strong_reads, agent), strong_writes))
        return self.number((write, (), strong_reads, _added(strong_writes, agent)))

    def number(self, state: State) -> int:
        """Return a state's number."""
        found = self._numbers.get(state)
        if found is None:
            found = self._numbers[state] = len(self._states)
            self._states.append(state)
        return found

    def before(self, to: States, launches: tuple[int, int]) -> np.ndarray:
        """Return, for each state, its state in `to` at the next launch.

        All agents of the last launch become one agent, which replaces the one for earlier launches.
        """
        last, earlier = (number << SHIFT | 1 for number in launches)

        def then(epoch: int) -> int:
            return {0: 0, last: earlier, earlier: 0}.get(epoch, last)

        out = []
        for write, *sets in self._states:
            reads, strong_reads, strong_writes = (tuple(sorted({then(one) for one in each} - {0})) for each in sets)
            out.append(to.number((then(write), reads, strong_reads, strong_writes)))
        return np.array(out, np.int32)


def _added(epochs: tuple[int, ...], agent: Agent) -> tuple[int, ...]:
    """Add an agent's epoch to a set, and drop the epochs that this agent knows, since they are implied."""
    if agent.epoch in epochs:
        return epochs
    return tuple(sorted([agent.epoch, *(epoch for epoch in epochs if not agent.knows(epoch))]))


@dataclass(frozen=True)
class Access:
    """An instruction's access by several agents; each has an equal share of the places, in order.

    row: the row of the clock for the other proxy's writes. place: the instruction's number, for reports.
    """

    kind: int
    row: int
    agents: list[Agent]
    place: int

    def by(self, agents: list[Agent]) -> Access:
        """Return the same access by other agents."""
        return Access(self.kind, self.row, agents, self.place)


class _Level:
    """Granules of one size: the numbers of their states, and of the instructions that wrote and read last."""

    def __init__(self, count: int):
        self.state, self.wrote, self.read = (np.zeros(count, np.int32) for _ in range(3))


class Shadow:
    """Shadow memory for `size` bytes from `base` on."""

    def __init__(self, size: int, base: int = 0):
        self.base = base
        chunks = (size + 15) // 16
        self._level = np.zeros(chunks, np.uint8)
        self._levels = [_Level(chunks * 16 // step) for step in STEPS]
        self.forget_lanes()

    def forget_lanes(self) -> None:
        """Drop the records of lanes, since agent numbers are about to be reused."""
        self.lanes = LaneShadow(len(self._level) * 16)

    def last(self, offset: int, was_read: bool) -> int:
        """Return the number of the last instruction that read, or wrote, at an offset."""
        number = self._level.item(offset >> 4)
        level = self._levels[number]
        return int((level.read if was_read else level.wrote)[offset // STEPS[number]])

    def replace(self, numbers: np.ndarray) -> None:
        """Replace each granule's state s by numbers[s]."""
        for level in self._levels:
            touched = np.flatnonzero(level.state)
            level.state[touched] = numbers[level.state[touched]]

    def fill(self, state: int, begin: int, end: int) -> None:
        """Set untouched granules between addresses `begin` and `end` to a state."""
        size = len(self._level) * 16
        first, last = max(begin - self.base, 0), min(end - self.base, size)
        self._levels[0].state[first // 16 : (last + 15) // 16] = state

    def access(self, states: States, access: Access, at: np.ndarray, size: int) -> None:
        """Record an access of `size` bytes, at most 16, at each offset; raise Conflict for a race."""
        parts = len(access.agents)
        if size < 16:
            at, size = _joined(at, size, parts)
        chunk = at >> 4
        wanted = 0 if size == 16 else 1 if size % 4 == 0 else 2
        levels = self._level[chunk]
        if wanted and (levels < wanted).any():
            self._refine(set(chunk[levels < wanted].tolist()), wanted)
            levels = self._level[chunk]
        first = levels.item(0)
        if (levels == first).all():
            self._at_level(states, first, access, at, size)
            return
        owners = np.repeat(np.arange(parts), at.size // parts)
        for level in set(levels.tolist()):
            for part in range(parts):
                here = at[(levels == level) & (owners == part)]
                if here.size:
                    self._at_level(states, level, access.by([access.agents[part]]), here, size)

    def _refine(self, chunks: set[int], wanted: int) -> None:
        """Split chunks of 16 bytes into granules of level `wanted`."""
        to, many = self._levels[wanted], 16 // STEPS[wanted]
        for chunk in chunks:
            old = self._level.item(chunk)
            source, few = self._levels[old], 16 // STEPS[old]
            for name in ("state", "wrote", "read"):
                values = getattr(source, name)[chunk * few : (chunk + 1) * few]
                getattr(to, name)[chunk * many : (chunk + 1) * many] = values.repeat(many // few)
                values[...] = 0
            self._level[chunk] = wanted

    def _at_level(self, states: States, number: int, access: Access, at: np.ndarray, size: int) -> None:
        step, level = STEPS[number], self._levels[number]
        index = at // step
        if size > step:
            index = (index[:, None] + np.arange(size // step)).reshape(-1)
        agents = access.agents
        if len(agents) > 1 and _at_once(states, level, access, index.reshape(len(agents), -1)):
            return
        for agent, mine in zip(agents, index.reshape(len(agents), -1), strict=True):
            _one(states, level, access, agent, mine, step)


def _after(states: States, state: int, agent: Agent, access: Access) -> int:
    key = (access.kind, access.row, state)
    found = agent.memo.get(key)
    if found is None:
        found = agent.memo[key] = states.after(state, agent, access.kind, access.row)
    return found


def _at_once(states: States, level: _Level, access: Access, index: np.ndarray) -> bool:
    """Record several agents' accesses together, if each agent finds a single state and no granule is shared.

    Return True if that was done.
    """
    old = level.state[index]
    first = old[:, :1]
    if (old != first).any():
        return False
    before = first[:, 0].tolist()
    try:
        new = [_after(states, state, agent, access) for state, agent in zip(before, access.agents, strict=True)]
    except Conflict:
        return False  # found again, and located, one by one
    if new != before:
        after = np.array(new, np.int32)[:, None]
        level.state[index] = after
        if (level.state[index] != after).any():
            level.state[index] = old
            return False
    (level.wrote if access.kind in (WRITE, STRONG_WRITE) else level.read)[index] = access.place
    return True


def _one(states: States, level: _Level, access: Access, agent: Agent, index: np.ndarray, step: int) -> None:
    """Record one agent's access to granules of `step` bytes."""
    old = level.state[index]
    first = old.item(0)
    groups = [(first, index)]
    if (old != first).any():
        groups = [(state, index[old == state]) for state in set(old.tolist())]
    for state, where in groups:
        try:
            new = _after(states, state, agent, access)
        except Conflict as conflict:
            conflict.offset = where.item(0) * step
            conflict.place = int((level.read if conflict.was_read else level.wrote)[where.item(0)])
            raise
        if new != state:
            level.state[where] = new
    (level.wrote if access.kind in (WRITE, STRONG_WRITE) else level.read)[index] = access.place


def _joined(at: np.ndarray, size: int, parts: int) -> tuple[np.ndarray, int]:
    """Join adjacent accesses by the same one of `parts` agents to accesses of whole 16-byte chunks, if possible."""
    count = 16 // size
    if 16 % size or at.size % (count * parts):
        return at, size
    rows = at.reshape(-1, count)
    first = rows[:, 0]
    if first.item(0) & 15 or (rows[:, -1] - first != 16 - size).any() or (first & 15).any():
        return at, size
    if count > 2 and (rows != first[:, None] + np.arange(0, 16, size)).any():
        return at, size
    return np.ascontiguousarray(first), 16
