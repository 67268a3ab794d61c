"""Broken kernels: one reached instruction of a kernel left out or changed, to see whether the emulator finds it.

A case is one launch of a shipped function, kept with all memory that it may touch. A mutant of its kernel is found if a
run with one of the seeds ends in a fault, or leaves other bytes than the kernel itself does with every seed.
`python -m emulator.mutants CASE COUNT` in tests/ prints what became of a sample, or of every mutant if COUNT is 0.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import translate
from .faults import Fault
from .mutant_cases import recorded
from .mutations import Mutant, mutants_of, sample
from .ptx import Unsupported
from .races import Race, Races

SEEDS = (0, 1, 2)
"""One for each of the machine's orders."""
REASONS = Path(__file__).with_name("equivalent_mutants.json")
DIFFERENCE, FAULT, RACE = "difference", "fault", "race"


class Found(NamedTuple):
    """How a mutant was found: `how` is empty if it was not."""

    how: str
    seed: int
    words: str


@dataclasses.dataclass
class Trier:
    """A case whose kernel is broken again and again.

    Attributes:
        reached: places of instructions that ran. total: how many the kernel has.
    """

    name: str
    checks_races: bool = True

    def __post_init__(self) -> None:
        self.launch = recorded(self.name)
        self.kernel = self.launch.kernel
        self.total = len(self.kernel.code)
        program = self.launch.options["program"]
        runs, steps, blocks = [], [], set()
        for seed in SEEDS:
            machine = self.launch.run(self.kernel, program, seed)
            runs.append(self.launch.after())
            steps.append(machine.steps)
            blocks |= machine.reached
        if self.checks_races:
            self.launch.run(self.kernel, program, SEEDS[0], observer=Races())  # which finds nothing
        self.most_steps = 1000 + 4 * max(steps)
        self.want = runs[0]
        self.same = np.logical_and.reduce([run == self.want for run in runs])
        self.reached = set(_places(program.blocks, blocks))
        self.mutants = mutants_of(self.kernel, self.reached)

    def try_out(self, mutant: Mutant) -> Found | None:
        """How a mutant was found; None if the emulator does not know the instruction that it has."""
        code = list(self.kernel.code)
        code[mutant.at] = mutant.ins
        kernel = dataclasses.replace(self.kernel, code=code)
        try:
            program = translate.translate(kernel)
        except Unsupported:
            return None
        for seed in SEEDS:
            try:
                self.launch.run(kernel, program, seed, most_steps=self.most_steps)
            except Fault as fault:
                return Found(FAULT, seed, str(fault))
            wrong = (self.launch.after() != self.want) & self.same
            if wrong.any():
                return Found(DIFFERENCE, seed, f"{int(wrong.sum())} bytes differ")
        if self.checks_races:
            try:
                self.launch.run(kernel, program, SEEDS[0], most_steps=self.most_steps, observer=Races())
            except Race as race:
                return Found(RACE, SEEDS[0], str(race))
        return Found("", SEEDS[0], "")


def _places(blocks: list[Any], reached: set[int]) -> Iterator[int]:
    begin = 0
    for number, (_, count, _) in enumerate(blocks):
        if number in reached:
            yield from range(begin, begin + count)
        begin += count


class Reason(NamedTuple):
    """Why mutants are equivalent to their kernel. case: of names; kind: empty for all; text: a regular expression."""

    case: str
    kind: str
    text: str
    why: str


@functools.cache
def reasons() -> tuple[Reason, ...]:
    return tuple(Reason(*entry) for entry in json.loads(REASONS.read_text())) if REASONS.exists() else ()


def reason_for(name: str, mutant: Mutant) -> str:
    """Why a mutant changes nothing; empty where nobody has said."""
    for reason in reasons():
        fits = fnmatch(name, reason.case) and reason.kind in ("", mutant.kind)
        if fits and re.fullmatch(reason.text, mutant.text):
            return reason.why
    return ""


def main(name: str, count: int) -> None:
    trier = Trier(name)
    chosen = sample(name, trier.mutants, count) if count else trier.mutants
    print(
        f"{name}: {len(trier.reached)} of {trier.total} instructions reached, {len(trier.mutants)} mutants", flush=True
    )
    how: Counter[str] = Counter()
    begin = time.perf_counter()
    for mutant in chosen:
        found = trier.try_out(mutant)
        if found is None:
            how["not an instruction"] += 1
            continue
        why = "" if found.how else reason_for(name, mutant)
        how[found.how or ("equivalent" if why else "NOT FOUND")] += 1
        if not found.how:
            print(f"  {mutant.at} {mutant.kind}: {mutant.text}: {why or 'NOT FOUND'}", flush=True)
    print(f"{dict(how)} in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
