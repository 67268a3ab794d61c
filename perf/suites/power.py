"""Each contestant alone for a while, at the clock that the power limit leaves it: FC1 and the backward's kernels, every
case under even routing.

In turns, as the other suites measure, contestants share a clock. Alone, each has the clock that its own bytes and
multiplications earn, which tells how much of a difference is energy and how much is time in which nothing multiplies.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch

from ..cases import Case, forward_cases
from ..contest import make_record, records_of
from ..contestants import Library, calls, libraries
from ..options import Options, select_ops
from ..problem import make_problem
from ..quack import Quack
from ..readings import Readings, follow_gpu
from ..results import Record
from ..training import KERNELS, flop, make_data
from .backward import Contest, contest
from .forward import checked, prepared

FORWARD = "fc1"
OPS = (FORWARD, *KERNELS)
CALLS_PER_SAMPLE = 20
SETTLING = 0.4  # of a contestant's time, in which clock and temperature become its own


def run_alone(call: Callable[[int], object], seconds: float, readings: Readings) -> dict[str, float]:
    """Time of a call and the GPU's readings, after settling."""
    begin = time.monotonic()
    settled, end = begin + SETTLING * seconds, begin + seconds
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples: list[float] = []
    while not samples or time.monotonic() < end:
        start.record()
        for number in range(CALLS_PER_SAMPLE):
            call(number)
        stop.record()
        stop.synchronize()
        if time.monotonic() > settled:
            samples.append(start.elapsed_time(stop) * 1e3 / CALLS_PER_SAMPLE)
    return {"median_us": statistics.median(samples), **readings.mean(settled, time.monotonic())._asdict()}


def _forward(case: Case, contestants: list[Library]) -> Contest:
    problem = make_problem(case)
    candidates, tunings = prepared(contestants, problem, (FORWARD,))
    competing, errors = checked(candidates, FORWARD, problem)
    return Contest({library.name: calls(library, FORWARD, problem.sets) for library in competing}, errors, tunings)


def _record(case: Case, op: str, who: Contest, seconds: float, readings: Readings) -> Record:
    share = seconds / len(who.calls)
    work = case.flop(op) if op == FORWARD else flop(case, op)
    alone = {name: run_alone(call, share, readings) for name, call in who.calls.items()}
    return {**make_record(case, {}, op=op, flop=work, errors=who.errors, tuning=who.tunings), "times": alone}


def _contests(
    case: Case, ops: tuple[str, ...], contestants: list[Library], quack: Quack | None
) -> Iterator[tuple[str, Contest]]:
    if FORWARD in ops:
        yield FORWARD, _forward(case, contestants)
    if kernels := [op for op in ops if op != FORWARD]:
        data = make_data(case)
        yield from ((op, contest(data, op, quack)) for op in kernels)


def run_power(options: Options) -> list[Record]:
    """One record for each case and operation."""
    cases = [case for case in forward_cases(options.case) if case.routing == "uniform"]
    ops = select_ops(OPS, options.ops)
    contestants = libraries(options.quack)
    quack = next((library for library in contestants if isinstance(library, Quack)), None)
    seconds = options.budget_s / (len(cases) * len(ops))
    with follow_gpu() as readings:

        def measure(case: Case) -> Iterator[Record]:
            for op, who in _contests(case, ops, contestants, quack):
                yield _record(case, op, who, seconds, readings)

        return records_of("power", cases, measure)
