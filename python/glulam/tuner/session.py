"""One tuning run of one problem: what is measured in which order, what is decided, what is kept when it is interrupted.

At each number of rows all candidates compete under each routing, in turns. The winner then runs against the shipped
kernel alone, on fresh samples, since the best of many samples flatters: it is chosen only where it is faster by more
than noise over both routings, and slower by more than noise under neither.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from cute_kernels.specs import Spec
from ffi_bridge import CompileError

from .. import tuned
from ..loadable import Function
from ..problem import Problem
from ..tuned import Layer, Point, Us
from .bench import Bench
from .candidates import DEFAULT_COUNT, candidates, works
from .routing import ROUTINGS
from .timing import Summary, interleave

ROWS_PER_EXPERT = (1, 4, 16, 64, 128, 256, 1024, 4096)
MIN_ROUNDS, MAX_ROUNDS = 3, 15
FINAL_ROUNDS, MAX_FINAL_ROUNDS = 7, 31
FINAL_SHARE = 0.4  # of the time for one number of rows goes to the final
MAX_US = 50e3
"""A longer step is not measured: it is many tiles deep, and the choice of the next shorter one holds."""
CHECK_ROWS = 48
"""Rows an expert on which candidates are compared: whole tiles and tails under skew."""
DIGITS = 4

Times = dict[str, dict[Spec, Summary]]  # by routing


class Makes(Protocol):
    """What compiles: see `pool.CompilePool`."""

    def start(self, spec: Spec) -> Future[Function]: ...

    def wait(self, spec: Spec) -> Function | CompileError: ...


@dataclasses.dataclass(frozen=True)
class Options:
    """What a run may cost. budget_s: seconds of sampling; count: candidates beside what ships, at each size."""

    rows_per_expert: tuple[int, ...] = ROWS_PER_EXPERT
    routings: tuple[str, ...] = ROUTINGS
    budget_s: float = 45.0
    count: int = DEFAULT_COUNT


@dataclasses.dataclass(frozen=True)
class Decision:
    """chosen: the fastest kernel that is certainly no slower; gain: the shipped one's time over its."""

    chosen: Spec
    gain: float


def mean_us(times: Times, spec: Spec) -> float:
    """Geometric mean of the medians over the routings."""
    return math.exp(sum(math.log(summaries[spec].median_us) for summaries in times.values()) / len(times))


def decide(final: Times, shipped: Spec, challenger: Spec) -> Decision:
    """The challenger, where it beats what ships by more than the noise of either, and loses nowhere by more."""
    gain = mean_us(final, shipped) / mean_us(final, challenger)
    noises = [max(tuned.NOISE, *(side.spread for side in (of[shipped], of[challenger]))) for of in final.values()]
    loses = any(
        of[challenger].median_us > of[shipped].median_us * (1 + noise)
        for of, noise in zip(final.values(), noises, strict=True)
    )
    if loses or gain <= 1 + sum(noises) / len(noises):
        return Decision(shipped, 1.0)
    return Decision(challenger, gain)


class Session:
    """Tunes one problem, whose `rows` do not matter, on a bench.

    `run` yields each point when it is decided. `notes` say why a candidate or a number of rows was left out.
    """

    def __init__(
        self,
        problem: Problem,
        bench: Bench,
        makes: Makes,
        options: Options,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._bench, self._makes, self._options, self._clock = bench, makes, options, clock
        self.notes: list[str] = []
        self._judged: dict[Spec, bool] = {}
        self.problems = self._measurable(problem)

    def _measurable(self, problem: Problem) -> list[Problem]:
        """The problem at each number of rows, the fewest first. Raises ValueError where there is none."""
        found = []
        for average in sorted(set(self._options.rows_per_expert)):
            sized = dataclasses.replace(problem, rows=average * problem.experts)
            if not self._bench.fits(sized):
                self.notes.append(f"{average} rows an expert are left out: the GPU has no memory for them")
            elif (us := rough_us(sized, self._bench.arch)) > MAX_US:
                self.notes.append(f"{average} rows an expert are left out: a step takes about {us / 1e3:.0f} ms")
            else:
                found.append(sized)
        if not found:
            raise ValueError(f"tune: nothing is left to measure: {'; '.join(self.notes)}")
        return found

    def candidates(self, problem: Problem) -> tuple[Spec, ...]:
        return candidates(problem, self._bench.arch, self._options.count)

    def layer(self, points: Sequence[Point]) -> Layer:
        """What goes into a table, with those kernels alone that took part."""
        names = {name for point in points for name in point.us}
        specs = {spec.name: spec for problem in self.problems for spec in self.candidates(problem)}
        kernels = {name: spec for name, spec in specs.items() if name in names}
        return Layer(tuned.question(self.problems[0]), kernels, tuple(points))

    @property
    def budget_s(self) -> float:
        return self._options.budget_s

    @property
    def routings(self) -> tuple[str, ...]:
        return self._options.routings

    @property
    def contests(self) -> int:
        """Runs against each other: at each number of rows one under each routing, and a final."""
        return len(self.problems) * (len(self._options.routings) + 1)

    def run(self, known: Mapping[float, Point], advance: Callable[[], None] = lambda: None) -> Iterator[Point]:
        """Yields the points that are not `known` yet. `advance` is called after each contest."""
        waiting = [p for p in self.problems if p.rows / p.experts not in known]
        for spec in dict.fromkeys(spec for problem in waiting for spec in self.candidates(problem)):
            self._makes.start(spec)
        if not waiting:
            return
        deadline = self._clock() + self._options.budget_s
        self._bench.load(waiting[-1])
        for done, problem in enumerate(waiting):
            functions = self._functions(problem)
            budget_s = max(deadline - self._clock(), 0.0) / (len(waiting) - done)
            yield self._point(problem, functions, budget_s, advance)

    def _functions(self, problem: Problem) -> dict[Spec, Function]:
        """The candidates that compile and compute what the shipped choice does, which comes first.

        Raises:
            CompileError: the shipped choice is not in the bundle, and does not compile.
        """
        shipped, *others = self.candidates(problem)
        made = {spec: self._makes.wait(spec) for spec in (shipped, *others)}
        functions = {}
        for spec, function in made.items():
            if not isinstance(function, CompileError):
                functions[spec] = function
            elif spec == shipped:
                raise function
            elif spec not in self._judged:
                self._judged[spec] = False
                self.notes.append(f"left out: {str(function).splitlines()[0]}")
        self._judge(problem, functions, shipped)
        return {spec: function for spec, function in functions.items() if self._judged[spec]}

    def _judge(self, problem: Problem, functions: dict[Spec, Function], shipped: Spec) -> None:
        """Runs those that were not run yet, and compares what they compute."""
        self._judged[shipped] = True
        new = {spec: function for spec, function in functions.items() if spec not in self._judged}
        rows = min(CHECK_ROWS * problem.experts, max(sized.rows for sized in self.problems))
        agreeing = self._bench.agree({shipped: functions[shipped], **new}, shipped, rows) if new else []
        for spec in new:
            self._judged[spec] = spec in agreeing
            if spec not in agreeing:
                self.notes.append(f"left out: {spec.name} computes something else than {shipped.name}")

    def _point(
        self, problem: Problem, functions: dict[Spec, Function], budget_s: float, advance: Callable[[], None]
    ) -> Point:
        shipped = next(iter(functions))
        rounds = (MIN_ROUNDS, MAX_ROUNDS)
        times = self._measured(problem, functions, (1 - FINAL_SHARE) * budget_s, rounds, advance)
        best = min(functions, key=lambda spec: mean_us(times, spec))
        decision = Decision(shipped, 1.0)
        if best != shipped:
            finalists = {spec: functions[spec] for spec in (shipped, best)}
            rounds = (FINAL_ROUNDS, MAX_FINAL_ROUNDS)
            final = self._measured(problem, finalists, FINAL_SHARE * budget_s, rounds, lambda: None)
            decision = decide(final, shipped, best)
            times = {routing: {**times[routing], **final[routing]} for routing in times}
        advance()
        us: Us = {
            spec.name: {routing: _rounded(of[spec].median_us) for routing, of in times.items()} for spec in functions
        }
        average = problem.rows / problem.experts
        return Point(average, decision.chosen.name, shipped.name, _rounded(decision.gain), us)

    def _measured(
        self,
        problem: Problem,
        functions: dict[Spec, Function],
        budget_s: float,
        rounds: tuple[int, int],
        advance: Callable[[], None],
    ) -> Times:
        """Samples of each function under each routing, in turns."""
        times: Times = {}
        us = rough_us(problem, self._bench.arch)
        for routing in self._options.routings:
            samplers = self._bench.samplers(functions, problem.rows, routing, us)
            named = {spec.name: sampler for spec, sampler in samplers.items()}
            found = interleave(named, budget_s / len(self._options.routings), *rounds, clock=self._clock)
            times[routing] = {spec: found[spec.name] for spec in functions}
            advance()
        return times


def rough_us(problem: Problem, arch: str) -> float:
    """About how long the shipped kernels take."""
    spec = candidates(problem, arch, 0)[0]
    tiles = (getattr(spec, "tile", None) or spec.fc1.tile, getattr(spec, "dgrad", None))  # type: ignore[union-attr]
    return sum(work.us(tile or tiles[0]) for work, tile in zip(works(problem), tiles, strict=False))


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
