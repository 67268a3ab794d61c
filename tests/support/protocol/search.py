"""Search of every state that a model can reach."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple, TypeVar

State = TypeVar("State", bound=Hashable)


class Fault(Exception):
    """Raised by a model if its protocol is broken; the search collects the faults."""


class Found(NamedTuple):
    """Result of a search: the number of states, the faults, and the ends that the model can reach."""

    states: int
    faults: set[str]
    ends: set[str]


def explore(
    first: State, successors: Callable[[State], Iterable[State]], end_of: Callable[[State], str | None]
) -> Found:
    """Visit each state reachable from `first` once; do not continue from a state with a fault.

    A state that is no end (end_of returns None) must have a successor.
    """
    seen, todo = {first}, [first]
    found = Found(0, set(), set())
    while todo:
        state = todo.pop()
        try:
            following = set(successors(state))
            end = end_of(state)
            if end is None and not following:
                raise Fault("a live rank waits for ever")
        except Fault as fault:
            found.faults.add(str(fault))
            continue
        if end is not None:
            found.ends.add(end)
        todo += following - seen
        seen |= following
    return found._replace(states=len(seen))
