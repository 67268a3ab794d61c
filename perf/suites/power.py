"""Each contestant alone for a while, at the clock that the power limit leaves it: FC1, every case under even routing.

In turns, as the other suites measure, contestants share a clock. Alone, each has the clock that its own bytes and
multiplications earn, which tells how much of a difference is energy and how much is time in which nothing multiplies.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.progress import track

from ..cases import Case, forward_cases
from ..contestants import Library, calls, libraries
from ..options import Options
from ..problem import make_problem
from ..readings import Readings, follow_gpu
from .forward import checked, prepared

OP = "fc1"
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
    return {"us": statistics.median(samples), **readings.mean(settled, time.monotonic())._asdict()}


def _measure(case: Case, contestants: list[Library], seconds: float, readings: Readings) -> dict[str, Any]:
    problem = make_problem(case)
    candidates, tunings = prepared(contestants, problem, (OP,))
    competing, errors = checked(candidates, OP, problem)
    return {
        "case": dataclasses.asdict(case),
        "op": OP,
        "errors": errors,
        "tuning": tunings,
        "alone": {
            library.name: run_alone(calls(library, OP, problem.sets), seconds / len(competing), readings)
            for library in competing
        },
    }


def run_power(options: Options) -> list[dict[str, Any]]:
    """One record a case."""
    cases = [case for case in forward_cases(options.case) if case.routing == "uniform"]
    contestants = libraries(options.quack)
    records = []
    with follow_gpu() as readings:
        for case in track(cases, "power"):
            records.append(_measure(case, contestants, options.budget_s / len(cases), readings))
            torch.cuda.empty_cache()
    return records
