"""Run many problems in a few processes, and shrink a failing one to the simplest.

Problems come in rounds. A round draws a few problems of one stratum (a function with a recipe and an activation) by
hypothesis, from its own seed; the next round takes the next stratum. So all strata are drawn, and a seed gives the same
problems on any machine and for any number of processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from . import check, draw
from .problem import Problem

ROUND = 10
PHASES = (Phase.generate, Phase.shrink)


@dataclasses.dataclass
class Outcome:
    """Outcome of a round: the number of problems in each state, and the simplest failure with its error."""

    device: str
    states: Counter[str] = dataclasses.field(default_factory=Counter)
    problem: Problem | None = None
    wrong: str = ""


class _Failed(Exception):
    """A problem failed; hypothesis searches for a simpler failing one."""


def run_round(seed: int, count: int, device: str, stratum: draw.Stratum) -> Outcome:
    """Draw and try `count` problems of a stratum; stop at the first failure, after shrinking it."""
    outcome, where = Outcome(device), torch.device(device)
    drawn = draw.problems(stratum, where.type)

    @seeded(seed)
    @settings(
        max_examples=count, database=None, deadline=None, phases=PHASES, report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip
    @given(drawn)
    def attempt(problem: Problem) -> None:
        try:
            state = check.check(problem, where)
        except Exception as error:  # whatever a wrong call raises is a failure
            outcome.problem, outcome.wrong = problem, f"{type(error).__name__}: {error}"
            raise _Failed from None
        if outcome.problem is None:
            outcome.states[state] += 1

    with contextlib.suppress(_Failed):
        attempt()
    return outcome


Round = tuple[int, int, str, draw.Stratum]
"""Arguments of `run_round`."""


def rounds(seed: int, count: int, device: str, calls: Sequence[str] = (), size: int = ROUND) -> Iterator[Round]:
    """Yield rounds with `count` problems in total, `size` in each."""
    for number, stratum in zip(range(-(-count // size)), draw.strata(calls), strict=False):
        yield seed * 1_000_003 + number, min(size, count - number * size), device, stratum


def _in_process(arguments: Round) -> Outcome:
    torch.set_num_threads(1)  # problems are small: of two threads the products take longer
    return run_round(*arguments)


@dataclasses.dataclass(frozen=True)
class Report:
    """Summary of all rounds."""

    states: Counter[str]
    failures: list[Outcome]
    seconds: float

    @property
    def count(self) -> int:
        return sum(self.states.values()) + len(self.failures)

    def text(self) -> str:
        """Return text: the number of problems in each state, and the rate per hour."""
        states = ", ".join(f"{number} {state}" for state, number in sorted(self.states.items()))
        rate = 3600 * self.count / max(self.seconds, 1e-9)
        return (
            f"{self.count} problems in {self.seconds:.0f} s ({rate:.0f} an hour): {states}, {len(self.failures)} failed"
        )


def run(planned: Iterable[Round], jobs: int = 1, say: Callable[[str], Any] = print, minutes: float = 0.0) -> Report:
    """Run the problems of rounds in `jobs` processes, for at most `minutes` (0: no limit); report failures at once."""
    began, states, failures = time.monotonic(), Counter[str](), []
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) if jobs > 1 else None
    try:
        for outcome in pool.map(_in_process, planned) if pool else map(_in_process, planned):
            states.update(outcome.states)
            if outcome.problem is not None:
                failures.append(outcome)
                say(f"{outcome.wrong}\n    {outcome.problem.command(outcome.device)}")
            if minutes and time.monotonic() - began > 60 * minutes:
                break
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)
    return Report(states, failures, time.monotonic() - began)
