"""Model of warp roles that hand over data by mbarriers, in shared or tensor memory.

A search tries every order of steps.

A role is a list of steps; loops are unrolled. A memory cell holds, instead of a value, the number of the item stored
there, and a read is correct if it finds its own item's number. A copy may land any time after it was sent.

An mbarrier has a phase, which ends with the last of its arrivals; the bytes of copies count as arrivals. A wait names a
parity, and passes if the phase that ended last has this parity. So it also passes two phases too early, which is the
fault that a search looks for.

A CTA ends when its roles end; if an arrival or a copy reaches it after that, that is a fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from .search import Fault, Found, explore

WAIT, ARRIVE, WRITE, SEND, READ, SYNC = range(6)


class Step(NamedTuple):
    """One step of a role.

    WAIT: until the phase of parity `number` of a barrier has ended. ARRIVE: at a barrier. WRITE: `number` to a cell.
    SEND: start a copy that writes `number` to a cell and arrives at a barrier. READ: a cell, which must hold `number`.
    SYNC: arrive at a named barrier and wait there.
    """

    kind: int
    barrier: int = -1
    cell: int = -1
    number: int = 0


class Barrier(NamedTuple):
    """A barrier.

    Attributes:
        count: arrivals that end a phase.
        cta: the CTA in whose memory the barrier lies.
        is_named: True: a named barrier, for SYNC steps.
    """

    name: str
    count: int
    cta: int
    is_named: bool = False


class State(NamedTuple):
    """A state of the machine.

    Attributes:
        at: each role's next step.
        waiting: for each role, the phase of the named barrier at which it waits; -1: none.
        phases: for each barrier, the number of phases that have ended.
        pending: for each barrier, the arrivals that its current phase still needs.
        flying: copies that have not landed, by role and step.
    """

    at: tuple[int, ...]
    waiting: tuple[int, ...]
    phases: tuple[int, ...]
    pending: tuple[int, ...]
    cells: tuple[int, ...]
    flying: frozenset[tuple[int, int]] = frozenset()


@dataclass
class Role:
    """Steps of one warp, or of several warps that run in lockstep.

    cta: the CTA in which they run.
    """

    name: str
    cta: int
    steps: list[Step] = field(default_factory=list)

    def acquire(self, of: Pipeline, number: int, parity: int = 1) -> None:
        """Append a wait until the slot of item `number` is empty."""
        self.steps.append(Step(WAIT, of.empty(number), number=(of.round(number) + parity) % 2))

    def write(self, of: Pipeline, number: int, part: int = 0) -> None:
        self.steps.append(Step(WRITE, cell=of.cell(number, part), number=number))

    def commit(self, of: Pipeline, number: int) -> None:
        """Append an arrival at the full barrier of item `number`'s slot."""
        self.steps.append(Step(ARRIVE, of.full(number)))

    def send(self, of: Pipeline, number: int, part: int = 0) -> None:
        """Append a copy of one part of item `number` into its slot; the copy arrives at the full barrier."""
        self.steps.append(Step(SEND, of.full(number), of.cell(number, part), number))

    def await_full(self, of: Pipeline, number: int) -> None:
        self.steps.append(Step(WAIT, of.full(number), number=of.round(number) % 2))

    def read(self, of: Pipeline, number: int, part: int = 0) -> None:
        self.steps.append(Step(READ, cell=of.cell(number, part), number=number))

    def use(self, of: Pipeline, number: int) -> None:
        """Append reads of all parts of item `number`, twice: at the beginning and at the end of the item's use."""
        for _ in range(2):
            for part in range(of.parts):
                self.read(of, number, part)

    def release(self, of: Pipeline, number: int) -> None:
        """Append an arrival at the empty barrier of item `number`'s slot."""
        self.steps.append(Step(ARRIVE, of.empty(number)))

    def sync(self, barrier: int) -> None:
        self.steps.append(Step(SYNC, barrier))

    def arrive(self, barrier: int) -> None:
        self.steps.append(Step(ARRIVE, barrier))


class Pipeline(NamedTuple):
    """Slots with a full and an empty barrier each. Each slot has `parts` cells, from `first_cell` on."""

    first_barrier: int
    first_cell: int
    slots: int
    parts: int

    def round(self, number: int) -> int:
        return number // self.slots

    def full(self, number: int) -> int:
        return self.first_barrier + number % self.slots

    def empty(self, number: int) -> int:
        return self.first_barrier + self.slots + number % self.slots

    def cell(self, number: int, part: int = 0) -> int:
        return self.first_cell + number % self.slots * self.parts + part


class Machine:
    """Barriers, cells and roles of a protocol; cells are initially unwritten."""

    def __init__(self) -> None:
        self.barriers: list[Barrier] = []
        self.cells = 0
        self.roles: list[Role] = []

    def role(self, name: str, cta: int = 0) -> Role:
        self.roles.append(Role(name, cta))
        return self.roles[-1]

    def pipeline(self, name: str, slots: int, full: int, empty: int, cta: int = 0, parts: int = 1) -> Pipeline:
        """Add a pipeline. full, empty: number of arrivals at these barriers, including the bytes of copies."""
        made = Pipeline(len(self.barriers), self.cells, slots, parts)
        for what, count in (("full", full), ("empty", empty)):
            self.barriers += [Barrier(f"{name} ({what})", count, cta)] * slots
        self.cells += slots * parts
        return made

    def named(self, name: str, count: int = 2, cta: int = 0) -> int:
        """Add a named barrier with `count` arrivals; return its number."""
        self.barriers.append(Barrier(name, count, cta, is_named=True))
        return len(self.barriers) - 1

    def explore(self) -> Found:
        roles, barriers = len(self.roles), self.barriers
        first = State(
            (0,) * roles, (-1,) * roles, (0,) * len(barriers), tuple(one.count for one in barriers), (-1,) * self.cells
        )  # fmt: skip
        return explore(first, self.successors, self.end_of)

    def successors(self, state: State) -> Iterator[State]:
        for role, at in enumerate(state.at):
            if at < len(self.roles[role].steps):
                following = self.taken(state, role, self.roles[role].steps[at])
                if following is not None:
                    yield following
        for role, at in state.flying:
            step = self.roles[role].steps[at]
            landed = state._replace(flying=state.flying - {(role, at)})
            yield self.arrived(self.written(landed, step), step.barrier, state)

    def taken(self, state: State, role: int, step: Step) -> State | None:
        """Return the state after a role's next step; None: the role must wait."""
        at = state._replace(at=changed(state.at, role, state.at[role] + 1))
        if step.kind == WAIT:
            return at if (state.phases[step.barrier] - 1) % 2 == step.number else None
        if step.kind == ARRIVE:
            return self.arrived(at, step.barrier, state)
        if step.kind == WRITE:
            return self.written(at, step)
        if step.kind == SEND:
            return at._replace(flying=state.flying | {(role, state.at[role])})
        if step.kind == READ:
            if state.cells[step.cell] != step.number:
                raise Fault("a role reads what is not there yet, or not any more")
            return at
        phase = state.waiting[role]
        if phase < 0:
            came = state._replace(waiting=changed(state.waiting, role, state.phases[step.barrier]))
            return self.arrived(came, step.barrier, state)
        is_over = state.phases[step.barrier] > phase
        return at._replace(waiting=changed(state.waiting, role, -1)) if is_over else None

    def written(self, state: State, step: Step) -> State:
        return state._replace(cells=changed(state.cells, step.cell, step.number))

    def arrived(self, state: State, barrier: int, before: State) -> State:
        name, count, cta, _ = self.barriers[barrier]
        if self.has_ended(before, cta):
            raise Fault(f"{name}: an arrival at a CTA that has ended")
        pending, phase = state.pending[barrier] - 1, state.phases[barrier]
        if pending == 0:
            pending, phase = count, phase + 1
        return state._replace(
            pending=changed(state.pending, barrier, pending), phases=changed(state.phases, barrier, phase)
        )  # fmt: skip

    def has_ended(self, state: State, cta: int) -> bool:
        mine = (number for number, role in enumerate(self.roles) if role.cta == cta)
        return all(state.at[number] == len(self.roles[number].steps) for number in mine)

    def end_of(self, state: State) -> str | None:
        is_over = all(at == len(role.steps) for at, role in zip(state.at, self.roles, strict=True))
        return "all roles have ended" if is_over and not state.flying else None

    def table(self) -> dict[str, tuple[set[str], set[str]]]:
        """Return, by role, the names of the barriers that it waits for and of the barriers at which it arrives."""
        found: dict[str, tuple[set[str], set[str]]] = {}
        for role in self.roles:
            waits, signals = found.setdefault(role.name, (set(), set()))
            for step in role.steps:
                if step.barrier >= 0:
                    (waits if step.kind in (WAIT, SYNC) else signals).add(self.barriers[step.barrier].name)
        return found


def changed(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return values[:index] + (value,) + values[index + 1 :]
