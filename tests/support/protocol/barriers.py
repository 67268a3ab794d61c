"""Roles of a CTA or of a cluster that hand over what lies in shared or tensor memory, and every order of their steps.

A role is a list of steps; loops are written out. In place of a value, a cell holds the number of what was stored there,
and a read is right if it finds its own. A copy lands any time after it was sent. An mbarrier has a phase, which ends
with the last of its arrivals, bytes of a copy among them; a wait names a parity, and passes if the phase of that parity
is the one that ended last. So it also passes two phases too early: that is what a search is to find.

A CTA ends when its roles have; to arrive or to land there after that is a fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from .search import Fault, Found, explore

WAIT, ARRIVE, WRITE, SEND, READ, SYNC = range(6)


class Step(NamedTuple):
    """WAIT: for the phase of parity `number` of a barrier. ARRIVE: at it. WRITE: `number` to a cell. SEND: a copy,
    which writes `number` to a cell and arrives at a barrier. READ: a cell, which must hold `number`. SYNC: arrive at a
    named barrier and wait there.
    """

    kind: int
    barrier: int = -1
    cell: int = -1
    number: int = 0


class Barrier(NamedTuple):
    """`count`: of arrivals that end a phase. cta: where it lies. is_named: one of those that a SYNC waits at."""

    name: str
    count: int
    cta: int
    is_named: bool = False


class State(NamedTuple):
    """at: each role's next step. waiting: the phase of the named barrier at which a role stands, or -1. phases: how
    many of each barrier have ended. pending: arrivals that the current one still needs. flying: copies, by role and
    step.
    """

    at: tuple[int, ...]
    waiting: tuple[int, ...]
    phases: tuple[int, ...]
    pending: tuple[int, ...]
    cells: tuple[int, ...]
    flying: frozenset[tuple[int, int]] = frozenset()


@dataclass
class Role:
    """Steps of one warp, or of warps that take them together. cta: where it runs."""

    name: str
    cta: int
    steps: list[Step] = field(default_factory=list)

    def acquire(self, of: Pipeline, number: int, parity: int = 1) -> None:
        """Wait until the slot of a number is empty."""
        self.steps.append(Step(WAIT, of.empty(number), number=(of.round(number) + parity) % 2))

    def write(self, of: Pipeline, number: int, part: int = 0) -> None:
        self.steps.append(Step(WRITE, cell=of.cell(number, part), number=number))

    def commit(self, of: Pipeline, number: int) -> None:
        """Arrive at a slot's full barrier."""
        self.steps.append(Step(ARRIVE, of.full(number)))

    def send(self, of: Pipeline, number: int, part: int = 0) -> None:
        """Start a copy of a part of a slot's content; its bytes arrive."""
        self.steps.append(Step(SEND, of.full(number), of.cell(number, part), number))

    def await_full(self, of: Pipeline, number: int) -> None:
        self.steps.append(Step(WAIT, of.full(number), number=of.round(number) % 2))

    def read(self, of: Pipeline, number: int, part: int = 0) -> None:
        self.steps.append(Step(READ, cell=of.cell(number, part), number=number))

    def use(self, of: Pipeline, number: int) -> None:
        """Read all parts, once when it begins and once when it ends."""
        for _ in range(2):
            for part in range(of.parts):
                self.read(of, number, part)

    def release(self, of: Pipeline, number: int) -> None:
        """Arrive at a slot's empty barrier."""
        self.steps.append(Step(ARRIVE, of.empty(number)))

    def sync(self, barrier: int) -> None:
        self.steps.append(Step(SYNC, barrier))

    def arrive(self, barrier: int) -> None:
        self.steps.append(Step(ARRIVE, barrier))


class Pipeline(NamedTuple):
    """Slots with a full and an empty barrier each. first_cell: of `parts` in each slot."""

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
    """Barriers, cells and roles. Nothing is written yet."""

    def __init__(self) -> None:
        self.barriers: list[Barrier] = []
        self.cells = 0
        self.roles: list[Role] = []

    def role(self, name: str, cta: int = 0) -> Role:
        self.roles.append(Role(name, cta))
        return self.roles[-1]

    def pipeline(self, name: str, slots: int, full: int, empty: int, cta: int = 0, parts: int = 1) -> Pipeline:
        """full, empty: arrivals, bytes of copies among them."""
        made = Pipeline(len(self.barriers), self.cells, slots, parts)
        for what, count in (("full", full), ("empty", empty)):
            self.barriers += [Barrier(f"{name} ({what})", count, cta)] * slots
        self.cells += slots * parts
        return made

    def named(self, name: str, count: int = 2, cta: int = 0) -> int:
        """Make a named barrier, of so many arrivals."""
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
        """After a role's next step; None where it has to wait."""
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
        """Of each role, the names of barriers that it waits for and of those that it signals."""
        found: dict[str, tuple[set[str], set[str]]] = {}
        for role in self.roles:
            waits, signals = found.setdefault(role.name, (set(), set()))
            for step in role.steps:
                if step.barrier >= 0:
                    (waits if step.kind in (WAIT, SYNC) else signals).add(self.barriers[step.barrier].name)
        return found


def changed(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return values[:index] + (value,) + values[index + 1 :]
