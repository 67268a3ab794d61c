"""Model of ranks that store to each other's windows.

A place in memory holds, instead of a value, the number of the op that stored it, from 1; a read is correct if it finds
its own op's number. A store to a peer lands any time later, in any order with other stores, except that a word lands
after the data that it announces. A landing store changes only what later reads find. Therefore larger sizes are
searched only in two extreme cases, which have fewer pending stores. With `landing="early"` rows land at once, which
finds overwritten rows; with "late" they land together with their word, which finds rows that are read too early.

Not modelled: time itself, finer effects of the hardware's memory model, other streams, ranks with different lists of
ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from .ops import ABORT, COUNT, DATA, ENTER, IDS, SUMS, Rules, Step, X, Y, ops_of, steps_of
from .search import Fault, Found, explore

COVERS = {DATA: (IDS, X), SUMS: (Y,), ENTER: (), ABORT: ()}
"""For each flag word, the cells whose stores must land before the word lands."""
RUNNING, CRASHED = 0, 255
"""Fates of a rank; 1 + r: it gave up, and its error names rank r."""


class Store(NamedTuple):
    """A store to a peer that may not have landed.

    `value`: the op's number; for an `abort` word, 1 + the suspected rank.
    """

    source: int
    target: int
    cell: int
    row: int
    value: int


class State(NamedTuple):
    """A state of all ranks.

    `at`: each rank's next step. `fates`: RUNNING, CRASHED or an error, by rank. `memory`: of all windows. `flying`:
    stores that have not landed.
    """

    at: tuple[int, ...]
    fates: tuple[int, ...]
    memory: bytes
    flying: frozenset[Store]

    def after(self, rank: int, steps: int = 1, fate: int = RUNNING, stores: Iterable[Store] = ()) -> State:
        """Return the state after a rank has advanced by some steps, ended with a fate, or sent stores."""
        at, fates = list(self.at), list(self.fates)
        at[rank] += steps
        fates[rank] = fate or fates[rank]
        return self._replace(at=tuple(at), fates=tuple(fates), flying=self.flying.union(stores))

    def written(self, places: Iterable[int], value: int) -> State:
        memory = bytearray(self.memory)
        for place in places:
            memory[place] = value
        return self._replace(memory=bytes(memory))


@dataclass
class Model:
    """Ranks that run `ops`.

    Attributes:
        rows: the most rows that go from one rank to another in an op, 1 or 2.
        landing: "any", "early" or "late", see the module.
        crash: one rank may stop for ever at any point.
        impatient: any wait may time out, even if all ranks are alive.
        epochs: number of epochs that a word can distinguish.
    """

    ranks: int
    ops: str
    rows: int = 1
    landing: str = "any"
    crash: bool = False
    impatient: bool = False
    epochs: int = 64
    rules: Rules = field(default_factory=Rules)

    def __post_init__(self) -> None:
        self.sequence = ops_of(self.ops, self.rules)
        self.steps = steps_of(self.sequence, self.rules)
        self.everyone = range(self.ranks)
        self.part = 2 * self.rows + COUNT - Y  # cells of a window that one source stores to

    def explore(self) -> Found:
        start = (0,) * self.ranks
        memory = bytes(self.ranks * self.ranks * self.part)
        return explore(State(start, start, memory, frozenset()), self.successors, self.end_of)

    # What lies where.

    def place(self, rank: int, source: int, cell: int, row: int = 0) -> int:
        """Return the index in memory of a cell: rows of X, then rows of Y, then the single cells."""
        inside = row + self.rows * cell if cell in (X, Y) else 2 * self.rows + cell - IDS
        return (rank * self.ranks + source) * self.part + inside

    def count(self, source: int, target: int, kind: str, handle: int) -> int:
        """Return the number of rows that go from one rank to another; it differs by pair and handle, and may be 0."""
        if kind == "C":
            source, target = target, source
        return min((0, 1, 2, 1, 2)[(source + 3 * target + handle) % 5], self.rows)

    def received(self, rank: int, source: int, number: int) -> list[int]:
        """Return the places in which an op of `rank` reads what `source` sent."""
        op = self.sequence[number - 1]
        rows = [self.place(rank, source, op.rows, row) for row in range(self.count(source, rank, op.kind, op.handle))]
        return [*rows, self.place(rank, source, IDS)] if op.kind == "D" else rows

    def sent(self, source: int, target: int, number: int) -> list[tuple[int, int]]:
        """Return (cell, row) of each store of an op to a peer; the op's word is last."""
        op = self.sequence[number - 1]
        handle = op.handle
        if op.kind == "B" and not self.rules.tokens_in_handle:
            handle = [other.handle for other in self.sequence[:number] if other.kind == "D"][-1]
        cells = [(op.rows, row) for row in range(self.count(source, target, op.kind, handle))]
        if op.kind == "C":
            return [*cells, (SUMS, 0)] if cells or self.rules.empty_sums else []
        ids = [(IDS, 0)] if op.kind == "D" else []
        apart = [] if self.rules.count_in_word else [(COUNT, 0)]
        return [*ids, *cells, *apart, (DATA, 0)]

    # What may happen next.

    def successors(self, state: State) -> Iterator[State]:
        for store in state.flying:
            if not any(self.goes_first(other, store) for other in state.flying):
                yield self.landed(store, state)
        for rank in self.everyone:
            if not self.is_over(rank, state):
                yield from self.moves(rank, state)

    def goes_first(self, other: Store, store: Store) -> bool:
        """Return True if `other` must land before `store`.

        Stores to one place keep their order, and words follow their data.
        """
        if other[:2] != store[:2]:
            return False
        if other[2:4] == store[2:4]:
            return other.value < store.value
        return self.rules.release and other.cell in COVERS.get(store.cell, ()) and other.value <= store.value

    def landed(self, store: Store, state: State) -> State:
        source, target, cell, row, value = store
        places = [self.place(target, source, cell, row)]
        if self.landing == "late" and cell in (DATA, SUMS):
            covered = [self.place(target, source, *each) for each in self.sent(source, target, value)[:-1]]
            places += [place for place in covered if state.memory[place] < value]
        return state.written(places, value)._replace(flying=state.flying - {store})

    def moves(self, rank: int, state: State) -> Iterator[State]:
        step = self.steps[state.at[rank]]
        if self.crash and CRASHED not in state.fates:
            yield state.after(rank, 0, CRASHED)
        if step.action in ("enter", "store"):
            yield self.stored(rank, step, state)
        elif step.action == "read":
            self.check_read(rank, step, state.memory)
            yield state.after(rank)
        elif missing := [peer for peer in self.everyone if not self.arrived(rank, peer, step, state.memory)]:
            yield from self.given_up(rank, missing, state)
        else:
            self.check_words(rank, step, state.memory)
            yield state.after(rank)

    def stored(self, rank: int, step: Step, state: State) -> State:
        if state.fates[rank] != RUNNING:
            raise Fault("a rank stores after its error")
        if not self.rules.count_in_handle:
            self.check_count(rank, step, state.memory)
        flying, now = [], []
        for peer in self.everyone:
            for cell, row in [(ENTER, 0)] if step.action == "enter" else self.sent(rank, peer, step.number):
                if peer == rank or (self.landing == "early" and cell not in COVERS):
                    now.append(self.place(peer, rank, cell, row))
                elif self.landing == "any" or cell in COVERS:
                    flying.append(Store(rank, peer, cell, row, step.number))
        return state.written(now, step.number).after(rank, stores=flying)

    def arrived(self, rank: int, peer: int, step: Step, memory: bytes) -> bool:
        """Return True if a peer's word has this op's epoch or, modulo `epochs`, a later one."""
        holds, number = memory[self.place(rank, peer, step.word)], step.number
        if step.word == ENTER and self.rules.long_enter:
            return holds >= number
        if step.word == SUMS and not self.sent(peer, rank, number):
            return True
        if not self.rules.epochs_go_on:  # a graph of two ops
            holds, number = (holds - 1) % 2 + 1 if holds else 0, (number - 1) % 2 + 1
        return (holds - number) % self.epochs < self.epochs // 2

    # What must be.

    def check_words(self, rank: int, step: Step, memory: bytes) -> None:
        for peer in self.everyone:
            if memory[self.place(rank, peer, step.word)] != step.number and self.rules.empty_sums:
                raise Fault("a word of another op is taken for this one's")
            apart = step.word == DATA and not self.rules.count_in_word
            if apart and memory[self.place(rank, peer, COUNT)] != step.number:
                raise Fault("the count of another op is read")

    def check_count(self, rank: int, step: Step, memory: bytes) -> None:
        """Raise Fault if a combine that reads `data` again finds the count of another dispatch."""
        op = self.sequence[step.number - 1]
        if op.kind == "C" and any(memory[self.place(rank, peer, DATA)] != op.source for peer in self.everyone):
            raise Fault("the count of another op is read")

    def check_read(self, rank: int, step: Step, memory: bytes) -> None:
        for peer in self.everyone:
            for place in self.received(rank, peer, step.number):
                if memory[place] < step.number:
                    raise Fault("rows are read before they are here")
                if memory[place] > step.number:
                    raise Fault("rows are overwritten before they are read")

    # Errors and ends.

    def given_up(self, rank: int, missing: list[int], state: State) -> Iterator[State]:
        """Yield the states after a wait that ended in an error. Abort words go to all ranks except the suspect."""
        for suspect in self.suspects(rank, missing, state) if self.rules.time_out else ():
            peers = set(self.everyone) - {rank, suspect} if self.rules.abort_words else ()
            told = [Store(rank, peer, ABORT, 0, 1 + suspect) for peer in peers]
            yield state.after(rank, 0 if self.rules.sticky else 2, 1 + suspect, told)

    def suspects(self, rank: int, missing: list[int], state: State) -> list[int]:
        """Return the ranks that an error may name: the rank named by an abort word, else a rank whose word is missing.

        A live rank that is late because it waits for a dead one began to wait earlier than this rank, so its abort word
        arrives first.
        """
        words = [state.memory[self.place(rank, peer, ABORT)] for peer in self.everyone]
        if named := [word - 1 for word in words if word]:
            return named[:1]
        silent = [fate == CRASHED or (fate != RUNNING and not self.rules.abort_words) for fate in state.fates]
        return missing if self.impatient or all(silent[peer] for peer in missing) else []

    def is_over(self, rank: int, state: State) -> bool:
        stopped = state.fates[rank] == CRASHED or (state.fates[rank] != RUNNING and self.rules.sticky)
        return stopped or state.at[rank] == len(self.steps)

    def end_of(self, state: State) -> str | None:
        """Return the sorted fates of the ranks, such as "crashed, error, ok"; None: not all ranks have ended."""
        if not all(self.is_over(rank, state) for rank in self.everyone):
            return None
        suspects = {fate - 1 for fate in state.fates if fate not in (RUNNING, CRASHED)}
        if not self.impatient and any(state.fates[suspect] != CRASHED for suspect in suspects):
            raise Fault("an error names a live rank")
        return ", ".join(sorted({RUNNING: "ok", CRASHED: "crashed"}.get(fate, "error") for fate in state.fates))
