"""Model of the CTAs of one rank's launches: the CTA that draws the last ticket publishes the op's word.

Each CTA reads the epoch, stores its rows (or gives up, if the preceding exchange of `enter` times out) and adds to a
ticket counter. A launch adds WHOLE in total: each CTA adds 1, except CTA 0, which adds the rest. So the counter is a
multiple of WHOLE exactly after the last CTA, whatever their number, and never needs a reset.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from .search import Fault, Found, explore

WHOLE = 16
"""The tickets of a launch; 2^20 in the kernels."""
START, TICKET, TICKET_THEN_ERROR, ERROR, OVER = range(5)
"""The kinds of a CTA's next step."""


@dataclass(frozen=True)
class LaunchRules:
    """Rules that the kernels follow. With any one of them switched off, a search must find a fault."""

    last_advances: bool = True  # the epoch; not CTA 0 at its start
    last_publishes: bool = True  # not CTA 0 at its end
    whole_tickets: bool = True  # a launch adds WHOLE, not the number of its CTAs
    error_then_ticket: bool = True  # a CTA that gives up says so before its ticket


class State(NamedTuple):
    """A state of the rank.

    `word`: the published word. `rows`: for each CTA, the epoch of the rows that it stored last.
    """

    launch: int
    epoch: int
    tickets: int
    word: int
    failed: bool
    steps: tuple[int, ...]
    rows: tuple[int, ...]


def changed(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return values[:index] + (value,) + values[index + 1 :]


@dataclass
class Launches:
    """Successive launches with these numbers of CTAs.

    may_give_up: any CTA may give up instead of storing its rows.
    """

    grids: tuple[int, ...] = (3, 2, 3)
    may_give_up: bool = False
    rules: LaunchRules = field(default_factory=LaunchRules)

    def explore(self) -> Found:
        first = State(1, 0, 0, 0, False, (START,) * self.grids[0], (0,) * max(self.grids))
        return explore(first, self.successors, self.end_of)

    def successors(self, state: State) -> Iterator[State]:
        for cta, step in enumerate(state.steps):
            if step == START:
                yield from self.start(cta, state)
            elif step in (TICKET, TICKET_THEN_ERROR):
                yield self.take_ticket(cta, state)
            elif step == ERROR:
                yield state._replace(steps=changed(state.steps, cta, OVER), failed=True)
        if set(state.steps) == {OVER} and not state.failed and state.launch < len(self.grids):
            self.check_word(state)
            yield state._replace(launch=state.launch + 1, steps=(START,) * self.grids[state.launch])

    def start(self, cta: int, state: State) -> Iterator[State]:
        if state.failed:
            yield state._replace(steps=changed(state.steps, cta, OVER))
            return
        if state.epoch != state.launch - 1:
            raise Fault("CTAs of one launch read two epochs")
        if self.may_give_up:
            step = TICKET if self.rules.error_then_ticket else TICKET_THEN_ERROR
            yield state._replace(steps=changed(state.steps, cta, step), failed=self.rules.error_then_ticket)
        advanced = state.epoch + (cta == 0 and not self.rules.last_advances)
        rows = changed(state.rows, cta, state.epoch + 1)
        yield state._replace(steps=changed(state.steps, cta, TICKET), rows=rows, epoch=advanced)

    def take_ticket(self, cta: int, state: State) -> State:
        ctas = len(state.steps)
        tickets = state.tickets + (WHOLE - ctas + 1 if cta == 0 and self.rules.whole_tickets else 1)
        step = OVER if state.steps[cta] == TICKET else ERROR
        state = state._replace(steps=changed(state.steps, cta, step), tickets=tickets)
        is_last = tickets % (WHOLE if self.rules.whole_tickets else ctas) == 0
        if state.failed or not (is_last if self.rules.last_publishes else cta == 0):
            return state
        if set(state.rows[:ctas]) != {state.launch}:
            raise Fault("a word is published before all rows are stored")
        return state._replace(word=state.launch, epoch=state.launch)

    def check_word(self, state: State) -> None:
        if state.word != state.launch:
            raise Fault("a word is never published")

    def end_of(self, state: State) -> str | None:
        if set(state.steps) != {OVER}:
            return None
        if not state.failed:
            self.check_word(state)
        return "error" if state.failed else "ok"
