"""Rules of the symmetric transport, and the steps of a rank's stream that follow from them.

They are equal on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

X, Y, IDS, DATA, SUMS, ENTER, ABORT, COUNT = range(8)
"""Cells that a source rank has in a window; COUNT is a flag word that only a broken rule needs."""


@dataclass(frozen=True)
class Rules:
    """Rules that the transport follows. With any one of them switched off, a search must find a fault."""

    release: bool = True  # a word lands after what it stands for
    wait_then_read: bool = True
    count_in_word: bool = True  # the number of tokens is a part of `data`, and no word of its own
    count_in_handle: bool = True  # combine has it from the handle: `data` may be of a later dispatch
    tokens_in_handle: bool = True  # backward sends forward's tokens, whatever the caller's tensors hold by then
    wait_for_sums: bool = True  # a combine waits before the next dispatch stores
    empty_sums: bool = True  # `sums` go also where no rows go
    enter: bool = True
    enter_after_older: bool = True  # the kind of the op before does not decide alone: it may combine an older dispatch
    backward_is_latest: bool = True  # after B its handle is the latest, as after D
    read_before_combine: bool = True  # whoever needs rows of X later has a copy
    epochs_go_on: bool = True  # a replayed graph does not start them again
    long_enter: bool = True  # `enter` is compared whole: the last may be older than half the epochs of other words
    time_out: bool = True
    sticky: bool = True  # after an error a rank stores nothing more
    abort_words: bool = True


class Op(NamedTuple):
    """One operation.

    `source`: number of the dispatch that the op's rows belong to. For a dispatch it is its own number, for a combine
    the number of the dispatch that it answers.
    """

    kind: str
    handle: int
    source: int
    enters: bool

    @property
    def rows(self) -> int:
        return Y if self.kind == "C" else X

    @property
    def word(self) -> int:
        return SUMS if self.kind == "C" else DATA


def needs_enter(kind: str, before: list[Op], rules: Rules) -> bool:
    """Return True if ranks must exchange `enter` before an op that follows the ops `before`.

    That is so if no received word proves that peers have finished reading the memory that the op overwrites.
    """
    if not before or not rules.enter:
        return False
    last = before[-1]
    if kind == "C":
        return last.kind == "C"
    if last.kind != "C":
        return True
    latest = [op for op in before if op.kind == "D" or (op.kind == "B" and rules.backward_is_latest)][-1]
    return rules.enter_after_older and last.handle != latest.handle


def ops_of(text: str, rules: Rules) -> list[Op]:
    """Return ops from their names: "D1 C1 D2 C2 B2 C2 B1 C1" is a training step of two layers."""
    ops: list[Op] = []
    dispatched: dict[int, int] = {}
    for number, name in enumerate(text.split(), 1):
        kind, handle = name[0], int(name[1:])
        if kind != "C":
            dispatched[handle] = number
        ops.append(Op(kind, handle, dispatched[handle], needs_enter(kind, ops, rules)))
    return ops


class Step(NamedTuple):
    """One step of a stream.

    `action`: "enter", "store" (to all), "wait" (for `word` of all) or "read". `number`: number of the step's op, from
    1.
    """

    action: str
    number: int
    word: int = 0


def steps_of(ops: list[Op], rules: Rules) -> list[Step]:
    """Return the steps of a list of ops.

    Rows of X are read as early as allowed. If other steps lie between, they are read again as late as allowed.
    """
    steps: list[Step] = []
    in_x: Step | None = None  # the reading of what X holds
    put_off: list[Step] = []
    for number, op in enumerate(ops, 1):
        last_chance = [in_x] if in_x and (op.kind != "C" or op.source == in_x.number) else []
        if rules.read_before_combine and last_chance != steps[-1:]:
            steps += last_chance
        if op.enters:
            steps += [Step("enter", number), Step("wait", number, ENTER)]
        steps += [Step("store", number), *put_off]
        read = Step("read", number)
        body = [Step("wait", number, op.word), read]
        if not rules.wait_then_read:
            body.reverse()
        put_off = body if op.kind == "C" and not rules.wait_for_sums else []
        if not put_off:
            steps += body
        if not rules.read_before_combine:
            steps += last_chance
        if op.kind != "C":
            in_x = read
        elif last_chance:
            in_x = None
    return steps + put_off + ([in_x] if in_x else [])
