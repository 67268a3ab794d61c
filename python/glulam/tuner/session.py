"""A tuning run of one problem: the order of measurements, and the decisions.

Terms: a session is the tuning of one problem. A point is the result at one number of rows an expert: times, and the
kernel chosen. A contest is one comparison of kernels: all candidates under one routing, or the final, see below.

At each number of rows all candidates are measured in turns under each routing. The fastest candidate then runs against
the shipped kernel alone (the final), with fresh samples, since the best of many samples is biased. It is chosen only if
it is faster than the shipped kernel by more than noise over both routings, and slower by more than noise under neither.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from cute_kernels.specs import Spec
from ffi_bridge import CompileError

from ..choose.known import NOISE
from ..choose.loadable import Function
from ..choose.problem import Problem
from ..choose.table import Layer, Point, Unfinished, layer_of
from .bench import GpuBench
from .candidates import DEFAULT_COUNT, candidates, rough_us
from .pool import CompilePool
from .routing import ROUTINGS
from .timing import Summary, interleave

ROWS_PER_EXPERT = (1, 4, 16, 64, 128, 256, 1024, 4096)
FINAL_SHARE = 0.4  # share of the time for one number of rows that goes to the final
ROUNDS, FINAL_ROUNDS = (3, 15), (7, 31)  # (least, largest) number of rounds of samples
MAX_US = 50e3
"""Longest step that is measured, in microseconds.

A longer step has many tiles, so a choice that was measured for fewer rows holds for it, too. That choice is used up to
`known.REACH` times the rows that were measured.
"""
CHECK_ROWS = 48
"""Rows an expert when candidates' results are compared: with skewed routing, some fill whole tiles, some not."""
DIGITS = 4

Times = dict[str, dict[Spec, Summary]]  # by routing's name
Functions = dict[Spec, Function]
Advance = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Options:
    """Sizes and costs of a run.

    Attributes:
        rows_per_expert: mean numbers of rows an expert to measure.
        budget_s: seconds of sampling for each problem.
        count: candidates besides the shipped kernels, at each number of rows.
    """

    rows_per_expert: tuple[int, ...] = ROWS_PER_EXPERT
    budget_s: float = 45.0
    count: int = DEFAULT_COUNT


class Decision(NamedTuple):
    """The decision at one number of rows.

    Attributes:
        chosen: the challenger if it is certainly faster, else the shipped kernel.
        gain: time of the shipped kernel divided by the time of the chosen one.
    """

    chosen: Spec
    gain: float


def mean_us(times: Times, spec: Spec) -> float:
    """Return a kernel's time in microseconds: the geometric mean, over the routings, of its median times."""
    return math.exp(sum(math.log(summaries[spec].median_us) for summaries in times.values()) / len(times))


def decide(final: Times, shipped: Spec, challenger: Spec) -> Decision:
    """Choose between the shipped kernel and the challenger, from their times in the final.

    The challenger is chosen if it is faster by more than noise over all routings, and slower by more than noise under
    none; otherwise the shipped kernel is.
    """
    gain = mean_us(final, shipped) / mean_us(final, challenger)
    noises = [max(NOISE, of[shipped].spread, of[challenger].spread) for of in final.values()]
    loses = any(
        of[challenger].median_us > of[shipped].median_us * (1 + noise)
        for of, noise in zip(final.values(), noises, strict=True)
    )
    if loses or gain <= 1 + sum(noises) / len(noises):
        return Decision(shipped, 1.0)
    return Decision(challenger, gain)


class Session:
    """A tuning run of one problem on a bench.

    Args:
        problem: the problem; its number of rows does not matter.
        bench: the GPU.
        pool: compiles the candidates.
        options: sizes and costs.
        clock: returns seconds.

    Attributes:
        problems: the problem at each number of rows that can be measured, the fewest first.
        notes: candidates and numbers of rows that were left out, and why.

    Raises:
        ValueError: there is nothing to measure.
    """

    def __init__(
        self,
        problem: Problem,
        bench: GpuBench,
        pool: CompilePool,
        options: Options,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.options, self._bench, self._pool, self._clock = options, bench, pool, clock
        self.notes: list[str] = []
        self.problems: list[Problem] = []
        self._judged: dict[Spec, bool] = {}
        for average in sorted(set(options.rows_per_expert)):
            sized = dataclasses.replace(problem, rows=average * problem.experts)
            if not bench.fits(sized):
                self.notes.append(f"{average} rows an expert are left out: the GPU has no memory for them")
            elif (us := rough_us(sized, bench.arch)) > MAX_US:
                self.notes.append(f"{average} rows an expert are left out: a step takes about {us / 1e3:.0f} ms")
            else:
                self.problems.append(sized)
        if not self.problems:
            raise ValueError(f"tune: nothing is left to measure: {'; '.join(self.notes)}")

    def candidates(self, problem: Problem) -> tuple[Spec, ...]:
        return candidates(problem, self._bench.arch, self.options.count)

    @functools.cached_property
    def _specs(self) -> dict[str, Spec]:
        return {spec.name: spec for problem in self.problems for spec in self.candidates(problem)}

    def layer(self, points: Collection[Point], unfinished: Unfinished | None = None) -> Layer:
        """Return the tuned table's entry for this problem, with these points and the kernels that they measured.

        Args:
            points: the measurements, in any order.
            unfinished: the options and progress of an interrupted run. None: the run has ended.
        """
        names = {name for point in points for name in point.us}
        kernels = {name: spec for name, spec in self._specs.items() if name in names}
        ascending = tuple(sorted(points, key=lambda point: point.rows_per_expert))
        return Layer(layer_of(self.problems[0]), kernels, ascending, unfinished)

    def run(self, known: Collection[float], advance: Advance = lambda: None) -> Iterator[Point]:
        """Yield each point (times and chosen kernel at one number of rows) when it is decided, fewest rows first.

        Args:
            known: numbers of rows an expert that need no measurement; they are left out.
            advance: called after each contest (a comparison of all candidates under one routing, or the final between
                the fastest and the shipped kernel). A point has one contest for each routing and one final.

        Raises:
            CompileError: the shipped kernel is not in the bundle and does not compile.
        """
        waiting = [problem for problem in self.problems if problem.rows / problem.experts not in known]
        for spec in dict.fromkeys(spec for problem in waiting for spec in self.candidates(problem)):
            self._pool.start(spec)
        deadline = self._clock() + self.options.budget_s
        if waiting:
            self._bench.load(waiting[-1])
        for done, problem in enumerate(waiting):
            functions = self._functions(problem)
            budget_s = max(deadline - self._clock(), 0.0) / (len(waiting) - done)
            yield self._point(problem, functions, budget_s, advance)

    def _functions(self, problem: Problem) -> Functions:
        """Return the shipped kernel, then all candidates that compile and whose results agree with the shipped one's.

        A kernel that fails either test gets a line in `notes`. Raises CompileError if the shipped kernel fails.
        """
        made = {spec: self._pool.wait(spec) for spec in self.candidates(problem)}
        shipped = next(iter(made))
        if isinstance(error := made[shipped], CompileError):
            raise error
        functions = {spec: function for spec, function in made.items() if not isinstance(function, CompileError)}
        self._judged[shipped] = True
        new = [spec for spec in made if spec not in self._judged]
        rows = min(CHECK_ROWS * problem.experts, max(sized.rows for sized in self.problems))
        compared = {spec: functions[spec] for spec in (shipped, *new) if spec in functions}
        agreeing = self._bench.agree(compared, shipped, rows) if len(compared) > 1 else []
        for spec in new:
            self._judged[spec] = spec in agreeing
            if isinstance(error := made[spec], CompileError):
                self.notes.append(f"left out: {str(error).splitlines()[0]}")
            elif spec not in agreeing:
                self.notes.append(f"left out: {spec.name} computes something else than {shipped.name}")
        return {spec: function for spec, function in functions.items() if self._judged[spec]}

    def _point(self, problem: Problem, functions: Functions, budget_s: float, advance: Advance) -> Point:
        shipped = next(iter(functions))
        times = self._measured(problem, functions, (1 - FINAL_SHARE) * budget_s, ROUNDS, advance)
        best = min(functions, key=lambda spec: mean_us(times, spec))
        decision = Decision(shipped, 1.0)
        if best != shipped:
            finalists = {spec: functions[spec] for spec in (shipped, best)}
            final = self._measured(problem, finalists, FINAL_SHARE * budget_s, FINAL_ROUNDS)
            decision = decide(final, shipped, best)
            times = {routing: {**times[routing], **final[routing]} for routing in times}
        advance()
        us = {spec.name: {routing: _rounded(of[spec].median_us) for routing, of in times.items()} for spec in functions}
        average = problem.rows / problem.experts
        return Point(average, decision.chosen.name, shipped.name, _rounded(decision.gain), us)

    def _measured(
        self,
        problem: Problem,
        functions: Functions,
        budget_s: float,
        rounds: tuple[int, int],
        advance: Advance = lambda: None,
    ) -> Times:
        """Measure each function under each routing; return {routing: {spec: summary of its times}}.

        Under one routing, functions are sampled alternately.

        Args:
            problem: the problem with its number of rows.
            functions: the kernels to measure, by spec.
            budget_s: seconds for all routings.
            rounds: least and largest number of rounds.
            advance: called after each routing.
        """
        times: Times = {}
        us = rough_us(problem, self._bench.arch)
        for routing in ROUTINGS:
            samplers = self._bench.samplers(functions, problem.rows, routing, us)
            times[routing] = interleave(samplers, budget_s / len(ROUTINGS), *rounds, clock=self._clock)
            advance()
        return times


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
