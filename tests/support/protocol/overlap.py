"""Model of kernels of one stream that overlap by programmatic dependent launch. A search tries every order of steps.

A kernel that is launched early may begin when each CTA of the kernel before it has let it begin (`let_next_begin`) or
ended. Any other kernel begins when the kernel before it has ended. `wait_for_earlier` waits until the kernel before has
ended. Nothing else orders two kernels: a kernel that waits finds the results of a kernel two launches before only
because the kernel between them has waited, too. What a kernel stores may arrive at any time until the kernel has ended,
which may be later than the end of its CTAs.

A call is a list of kernels. Within a call, a buffer holds, instead of values, the number of the kernel that stored it
last. A kernel that reads a buffer must find the number of the last kernel before it that stores the buffer, and that
kernel must have ended. Two calls may share all memory (a workspace, results of one that the other takes, memory that
was freed between them), so a kernel must not touch memory before all kernels of earlier calls have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .search import Fault, Found, explore

READ, WRITE, WAIT, LET = "read", "write", "wait", "let"
UNWRITTEN = -1
NOT_BEGUN = -1


class Step(NamedTuple):
    """One step of a warp role: WAIT and LET, or READ and WRITE of all `buffers`."""

    action: str
    buffers: tuple[str, ...] = ()


def steps_of(text: str) -> tuple[Step, ...]:
    """Return steps from their text, for example "read x; wait; let; read sums; write y"."""
    words = [part.split() for part in text.split(";")]
    steps = tuple(Step(action, tuple(buffers)) for action, *buffers in words)
    assert all(step.action in ((READ, WRITE) if step.buffers else (WAIT, LET)) for step in steps), text
    return steps


class Kernel(NamedTuple):
    """A launch of a kernel.

    Attributes:
        early: True: launched by programmatic dependent launch.
        ctas: for each kind of CTA its warp roles, and for each role its steps.
    """

    name: str
    early: bool
    ctas: tuple[tuple[tuple[Step, ...], ...], ...]

    @property
    def steps(self) -> list[Step]:
        """Steps of all roles of all kinds of CTAs."""
        return [step for roles in self.ctas for role in roles for step in role]

    def has(self, action: str) -> bool:
        return any(step.action == action for step in self.steps)

    def buffers(self, action: str) -> set[str]:
        return {buffer for step in self.steps if step.action == action for buffer in step.buffers}

    def changed(self, change: Callable[[tuple[Step, ...]], Iterable[Step]]) -> Kernel:
        """Return the kernel with changed steps of each role."""
        return self._replace(ctas=tuple(tuple(tuple(change(role)) for role in roles) for roles in self.ctas))

    def without_wait(self) -> Kernel:
        return self.changed(lambda role: [step for step in role if step.action != WAIT])

    def letting_first(self) -> Kernel:
        """Return the kernel with `let_next_begin` first in each role, also in roles that had none."""
        return self.changed(lambda role: (Step(LET), *(step for step in role if step.action != LET)))


def kernel(name: str, *ctas: str, early: bool = False) -> Kernel:
    """Make a kernel.

    ctas: for each kind of CTA the steps of its warp roles, with "|" between roles. A single kind with a single role has
        two CTAs.
    """
    made = tuple(tuple(steps_of(role) for role in text.split("|")) for text in ctas)
    return Kernel(name, early, made * (2 if len(made) == 1 and len(made[0]) == 1 else 1))


class State(NamedTuple):
    """A state of the stream.

    Attributes:
        at: each role's next step; NOT_BEGUN: its kernel has not begun.
        ended: numbers of the kernels that have ended, with all that they stored.
        holds: for each buffer of each call, the number of the kernel that stored it last.
    """

    at: tuple[int, ...]
    ended: frozenset[int]
    holds: tuple[int, ...]


class _Role(NamedTuple):
    kernel: int
    cta: tuple[int, int]
    steps: tuple[Step, ...]


BEFORE = kernel("a kernel before the calls", "let; write anything")
AFTER = kernel("a kernel after the calls", "read anything; write anything")


@dataclass
class Stream:
    """Calls, one after the other, between two normal launches.

    The first of these launches lets the next kernel begin at once.
    """

    calls: Sequence[Sequence[Kernel]]
    kernels: list[Kernel] = field(init=False)

    def __post_init__(self) -> None:
        calls = [[BEFORE], *self.calls, [AFTER]]
        self.kernels = [each for call in calls for each in call]
        self.call_of = [number for number, call in enumerate(calls) for _ in call]
        self.first_of = [self.call_of.index(call) for call in self.call_of]
        self.roles = [
            _Role(number, (number, cta), role)
            for number, each in enumerate(self.kernels)
            for cta, roles in enumerate(each.ctas)
            for role in roles
        ]
        self.roles_of = [[i for i, role in enumerate(self.roles) if role.kernel == k] for k in range(len(self.kernels))]
        written = [(self.call_of[k], buffer) for k, one in enumerate(self.kernels) for buffer in one.buffers(WRITE)]
        self.places = {key: place for place, key in enumerate(dict.fromkeys(written))}
        self.sources = [
            {buffer: self._source(k, buffer) for buffer in one.buffers(READ)} for k, one in enumerate(self.kernels)
        ]

    def _source(self, reader: int, buffer: str) -> int:
        """Return the number of the last kernel of the call that stores a buffer before `reader`."""
        before = range(self.first_of[reader], reader)
        return max((k for k in before if buffer in self.kernels[k].buffers(WRITE)), default=UNWRITTEN)

    def explore(self) -> Found:
        first = State((NOT_BEGUN,) * len(self.roles), frozenset(), (UNWRITTEN,) * len(self.places))
        return explore(first, self.successors, self.end_of)

    def end_of(self, state: State) -> str | None:
        return "all kernels have ended" if len(state.ended) == len(self.kernels) else None

    def is_over(self, role: int, state: State) -> bool:
        return state.at[role] == len(self.roles[role].steps)

    def may_begin(self, number: int, state: State) -> bool:
        if number == 0 or number - 1 in state.ended:
            return True
        return self.kernels[number].early and self.lets_next_begin(number - 1, state)

    def lets_next_begin(self, number: int, state: State) -> bool:
        """Return True if each CTA of a kernel has ended, or a role of it has let the next kernel begin."""
        let, running = set(), set()
        for role in self.roles_of[number]:
            _, cta, steps = self.roles[role]
            if not self.is_over(role, state):
                running.add(cta)
            if any(step.action == LET for step in steps[: max(state.at[role], 0)]):
                let.add(cta)
        return running <= let

    def successors(self, state: State) -> Iterator[State]:
        for number, roles in enumerate(self.roles_of):
            if number in state.ended:
                continue
            if state.at[roles[0]] == NOT_BEGUN:
                if self.may_begin(number, state):
                    yield state._replace(at=tuple(0 if i in roles else at for i, at in enumerate(state.at)))
                return  # later kernels begin later
            if all(self.is_over(role, state) for role in roles):
                yield state._replace(ended=state.ended | {number})
            for role in roles:
                if not self.is_over(role, state):
                    yield from self.taken(role, state)

    def taken(self, role: int, state: State) -> Iterator[State]:
        """Yield the state after a role's next step, if the role need not wait."""
        number, _, steps = self.roles[role]
        step = steps[state.at[role]]
        if step.action == WAIT and number and number - 1 not in state.ended:
            return
        holds = self.touched(number, step, state) if step.buffers else state.holds
        yield state._replace(at=(*state.at[:role], state.at[role] + 1, *state.at[role + 1 :]), holds=holds)

    def touched(self, number: int, step: Step, state: State) -> tuple[int, ...]:
        """Return the content of buffers after a kernel's step; raise Fault if the step comes too early or too late."""
        name = self.kernels[number].name
        for earlier in range(self.first_of[number]):
            if earlier not in state.ended:
                raise Fault(f"{name} touches memory while {self.kernels[earlier].name} of a call before runs")
        holds = list(state.holds)
        for buffer in step.buffers:
            place = self.places.get((self.call_of[number], buffer))
            holder = UNWRITTEN if place is None else holds[place]
            has_ended = holder in (UNWRITTEN, number) or holder in state.ended
            if holder > number:
                other = self.kernels[holder].name
                raise Fault(f"{name} {step.action}s {buffer} after {other}, a later kernel, has written it")
            if step.action == READ:
                source = self.sources[number][buffer]
                if holder < source or not has_ended:
                    raise Fault(f"{name} reads {buffer} before {self.kernels[source].name} has ended")
            elif not has_ended:
                raise Fault(f"{name} writes {buffer} before {self.kernels[holder].name} has ended")
            else:
                assert place is not None
                holds[place] = number
        return tuple(holds)
