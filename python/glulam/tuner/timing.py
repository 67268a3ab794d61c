"""Take samples in turns and summarise them, for the tuner and the benchmarks.

Kernels are measured in rounds, one sample each, in an order that rotates from round to round, so that drifts of clocks
and temperature affect all kernels alike. A sample is the mean of several back-to-back calls.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

Sampler = Callable[[], float]
Call = Callable[[int], object]  # takes the number of the call, to rotate buffers by
Name = TypeVar("Name", bound=Hashable)

SLEEP_CYCLES_PER_US = 1980  # at the GPU's highest clock; at a lower clock the sleep is longer, which does no harm


@dataclasses.dataclass(frozen=True)
class Summary:
    """Microseconds a call: the median of the samples, and their 10th and 90th percentiles."""

    median_us: float
    low_us: float
    high_us: float
    samples: int

    @property
    def spread(self) -> float:
        """Half the distance between the percentiles, relative to the median."""
        return (self.high_us - self.low_us) / (2 * self.median_us) if self.median_us else 0.0


def percentile(ordered: list[float], fraction: float) -> float:
    """Return the `fraction` quantile of a sorted, non-empty list, linear between neighbours."""
    position = fraction * (len(ordered) - 1)
    below, above = math.floor(position), math.ceil(position)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summarise(samples: list[float]) -> Summary:
    ordered = sorted(samples)
    return Summary(statistics.median(ordered), percentile(ordered, 0.1), percentile(ordered, 0.9), len(ordered))


def interleave(
    samplers: Mapping[Name, Sampler],
    budget_s: float,
    min_rounds: int = 5,
    max_rounds: int = 200,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Name, Summary]:
    """Measure in rounds, one sample of each sampler per round, until the budget is spent.

    Args:
        samplers: functions that take a sample, by name.
        budget_s: seconds.
        min_rounds, max_rounds: bounds on the number of rounds, whatever the budget.
        clock: returns seconds.
    """
    names = list(samplers)
    samples: dict[Name, list[float]] = {name: [] for name in names}
    deadline = clock() + budget_s
    for done in range(max_rounds):
        if done >= min_rounds and clock() >= deadline:
            break
        first = done % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(samplers[name]())
    return {name: summarise(values) for name, values in samples.items()}


def sleep_cycles(cycles: int) -> None:
    """Enqueue a kernel that spins for `cycles` clock cycles; with 0, the cheapest launch that torch offers."""
    torch.cuda._sleep(cycles)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def device_us(call: Call, calls: int, enqueue_us: float) -> float:
    """Return the mean device time of `calls` calls in microseconds.

    The GPU first sleeps `enqueue_us` per call while the host enqueues the calls, so that the host's pace does not
    affect the time.
    """
    start, end = _event(), _event()
    sleep_cycles(int(calls * enqueue_us * SLEEP_CYCLES_PER_US))
    start.record()
    for number in range(calls):
        call(number)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / calls
