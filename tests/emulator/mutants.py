"""Mutants: kernels in which one executed instruction is left out or changed.

They test whether the emulator detects the mistake. A case has launches of a shipped function, each kept with all memory
that it may touch. A mutant of the case's kernel is detected in one of three ways: a run of a launch with one of the
seeds ends in a fault; such a run leaves other bytes than the unchanged kernel leaves with every seed; or the race check
finds a race.

Run in tests/, this module prints the outcome of a sample, or of every mutant if COUNT is 0; CASE may be all:

    python -m emulator.mutants CASE COUNT [--seed SEED] [--shard I/N]

Calls and reasons were made with the sample of seed 0 in view. A shard is every N-th mutant of the sample from the I-th
on, counted from 0, so that N processes share a case.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import translate
from .faults import Fault
from .mutant_cases import CASES, Recorded, recorded
from .mutations import Mutant, around, mutants_of, sample
from .ptx import Kernel, Unsupported
from .races import Race, Races

SEEDS = (0, 1, 2)
"""Seeds of the machine's schedule, one for each of its three kinds of order."""
REASONS = Path(__file__).with_name("equivalent_mutants.json")
DIFFERENCE, FAULT, RACE = "difference", "fault", "race"
EQUIVALENT, MISSED = "equivalent", "NOT FOUND"


class Found(NamedTuple):
    """The way in which a mutant was detected.

    `how`: DIFFERENCE, FAULT or RACE; empty: it was not detected.
    """

    how: str
    seed: int
    words: str


NOT_FOUND = Found("", SEEDS[0], "")


class _Expected(NamedTuple):
    """Memory after the unchanged kernel, a mask of the bytes on which all seeds agree, and a limit of steps."""

    memory: np.ndarray
    same: np.ndarray
    most_steps: int


class _Trial:
    """A recorded launch on which variants of its kernel are tried. Expected results are computed on demand."""

    def __init__(self, launch: Recorded) -> None:
        self._launch = launch
        self._program = launch.options["program"]
        self.reached = set(_places(self._program.blocks, launch.reached))

    @functools.cached_property
    def _expected(self) -> _Expected:
        runs, steps = [], []
        for seed in SEEDS:
            steps.append(self._launch.run(self._launch.kernel, self._program, seed).steps)
            runs.append(self._launch.after())
        same = np.logical_and.reduce([run == runs[0] for run in runs])
        return _Expected(runs[0], same, 1000 + 4 * max(steps))

    @functools.cached_property
    def _written(self) -> list[tuple[int, int]]:
        """Return the memory that the previous launch may still write while this one begins.

        It excludes memory that the unchanged kernel accesses before its griddepcontrol.wait, such as group sizes and
        weights.
        """
        kernel = self._launch.kernel
        waits = any(kernel.code[at].op == "griddepcontrol.wait" for at in self.reached)
        written = self._launch.storages() if waits else []
        while True:
            try:
                self._race(kernel, self._program, written)
                return written
            except Race as race:
                if race.before is None:
                    raise
                at = race.before
                written = [(begin, size) for begin, size in written if not begin <= at < begin + size]

    def _race(self, kernel: Kernel, program: Any, written: list[tuple[int, int]]) -> None:
        most_steps = self._expected.most_steps
        self._launch.run(kernel, program, SEEDS[0], written, observer=Races(), most_steps=most_steps)

    def run(self, kernel: Kernel, program: Any, seed: int) -> Found:
        """Run a variant with a seed; the result says if it ended in a fault or left other bytes."""
        expected = self._expected
        try:
            self._launch.run(kernel, program, seed, most_steps=expected.most_steps)
        except Fault as fault:
            return Found(FAULT, seed, str(fault))
        wrong = (self._launch.after() != expected.memory) & expected.same
        return Found(DIFFERENCE, seed, f"{int(wrong.sum())} bytes differ") if wrong.any() else NOT_FOUND

    def check_races(self, kernel: Kernel, program: Any) -> Found:
        """Run the race check on a variant; the result says if it found a race."""
        try:
            self._race(kernel, program, self._written)
        except Race as race:
            return Found(RACE, SEEDS[0], str(race))
        return NOT_FOUND


class Trier:
    """A case on which mutants of its kernel are tried.

    Attributes:
        reached: indices of instructions that ran in any of the case's launches.
        total: number of the kernel's instructions.
    """

    def __init__(self, name: str, checks_races: bool = True) -> None:
        self.name, self._checks_races = name, checks_races
        launches = recorded(name)
        self._trials = [_Trial(launch) for launch in launches]
        self.kernel = launches[0].kernel
        self.total = len(self.kernel.code)
        self.reached = set[int]().union(*(trial.reached for trial in self._trials))
        self.mutants = mutants_of(self.kernel, self.reached)

    def try_out(self, mutant: Mutant) -> Found | None:
        """Return how a mutant was detected; None if the emulator does not model the changed instruction."""
        code = list(self.kernel.code)
        code[mutant.at] = mutant.ins
        kernel = dataclasses.replace(self.kernel, code=code)
        try:
            program = translate.translate(kernel)
        except Unsupported:
            return None
        trials = [trial for trial in self._trials if mutant.at in trial.reached]
        tries = [partial(trial.run, kernel, program, seed) for seed in SEEDS for trial in trials]
        if self._checks_races:
            tries += [partial(trial.check_races, kernel, program) for trial in trials]
        return next((found for found in (each() for each in tries) if found.how), NOT_FOUND)


def _places(blocks: list[Any], reached: set[int]) -> Iterator[int]:
    begin = 0
    for number, (_, count, _) in enumerate(blocks):
        if number in reached:
            yield from range(begin, begin + count)
        begin += count


class Reason(NamedTuple):
    """A reason why mutants are equivalent to their kernel, and a pattern of the mutants that it covers.

    Attributes:
        case: pattern of case names.
        kind: kind of mutant; empty: all; "one more 2": only for operand 2.
        text: regular expression for the whole text of the mutant.
        beside: regular expression for a part of the neighbouring instructions (`mutations.around`); empty: any.
    """

    case: str
    kind: str
    text: str
    beside: str
    why: str

    def fits(self, name: str, kernel: Kernel, mutant: Mutant) -> bool:
        """Return True if this reason covers a mutant of a case's kernel."""
        return bool(
            fnmatch(name, self.case)
            and self.kind in ("", mutant.kind, f"{mutant.kind} {mutant.operand}")
            and re.fullmatch(self.text, mutant.text)
            and re.search(self.beside, around(kernel, mutant.at))
        )


@functools.cache
def reasons() -> tuple[Reason, ...]:
    """Return all reasons in the file."""
    return tuple(Reason(*entry) for entry in json.loads(REASONS.read_text()))


PURE = ("mov", "add", "sub", "mul", "mad", "shl", "shr", "and", "or", "xor", "not", "setp", "selp", "cvt")
"""Opcodes of instructions whose only effect is to write their first operand."""


def is_unread(kernel: Kernel, at: int) -> bool:
    """Return True if an instruction only computes a register that no other instruction uses."""
    ins = kernel.code[at]
    found = re.match(r"[^@]\S+ (%\w+),", ins.text)
    if ins.mods[0] not in PURE or not found:
        return False
    return sum(len(re.findall(rf"{found[1]}\b", other.text)) for other in kernel.code) == 1


def reason_for(name: str, kernel: Kernel, mutant: Mutant) -> str:
    """Return the reason why a mutant is equivalent; empty if none is known."""
    if is_unread(kernel, mutant.at):
        return "no instruction reads its result"
    return next((reason.why for reason in reasons() if reason.fits(name, kernel, mutant)), "")


def main(name: str, count: int, seed: int, shard: int, shards: int) -> None:
    """Print the outcome of a sample's shard: each mutant that was not detected, then the number of each outcome."""
    trier = Trier(name)
    chosen = sample(name, trier.mutants, count, seed) if count else trier.mutants
    print(
        f"{name}: {len(trier.reached)} of {trier.total} instructions reached, {len(trier.mutants)} mutants", flush=True
    )
    how: Counter[str] = Counter()
    begin = time.perf_counter()
    for mutant in chosen[shard::shards]:
        found = trier.try_out(mutant)
        why = reason_for(name, trier.kernel, mutant) if found == NOT_FOUND else ""
        how["not an instruction" if found is None else found.how or (EQUIVALENT if why else MISSED)] += 1
        if found == NOT_FOUND:
            print(f"  {mutant.at} {mutant.kind}: {mutant.text}: {why or MISSED}", flush=True)
    number = sum(how[each] for each in (DIFFERENCE, FAULT, RACE))
    percent = 100 * number / max(number + how[MISSED], 1)
    print(f"{dict(how)} in {time.perf_counter() - begin:.0f} s: {percent:.1f} % found of those that are not equivalent")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m emulator.mutants")
    parser.add_argument("case", choices=("all", *CASES))
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard", default="0/1")
    given = parser.parse_args()
    for each in CASES if given.case == "all" else [given.case]:
        main(each, given.count, given.seed, *map(int, given.shard.split("/")))
