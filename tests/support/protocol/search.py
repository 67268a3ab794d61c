"""Every state that a model can come to."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple, TypeVar

State = TypeVar("State", bound=Hashable)


class Fault(Exception):
    """What a broken protocol is found by."""


class Found(NamedTuple):
    """How many states there are, the faults among them, and the ways to end."""

    states: int
    faults: set[str]
    ends: set[str]


def explore(
    first: State, successors: Callable[[State], Iterable[State]], end_of: Callable[[State], str | None]
) -> Found:
    """All that can come after `first`, each once, and nothing that comes after a fault. A state that is no end (None)
    must have a successor.
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
