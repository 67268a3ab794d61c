"""Samples of device and host time, taken in turns: device time as the tuner takes it, host time here."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from glulam.tuner.timing import (
    ENQUEUE_US,
    MIN_ROUNDS,
    WARM_UP_CALLS,
    Call,
    Sampler,
    Summary,
    device_sampler,
    device_us,
    interleave,
    measure_device,
    percentile,
    sleep_cycles,
    summarise,
)

__all__ = [
    "ENQUEUE_US",
    "MIN_ROUNDS",
    "WARM_UP_CALLS",
    "Call",
    "Sampler",
    "Summary",
    "device_sampler",
    "device_us",
    "host_sampler",
    "interleave",
    "measure_device",
    "no_garbage_collection",
    "percentile",
    "sleep_cycles",
    "summarise",
]

HOST_CALLS_PER_SAMPLE = 100  # two launches each stay well inside the queue of 1024


def host_sampler(call: Callable[[], object], calls: int = HOST_CALLS_PER_SAMPLE, *, drain: bool = False) -> Sampler:
    """Samples of the wall time a call on the host, from an idle device.

    Without `drain` a sample ends when the last call returns (time to enqueue), with it when the device is
    idle again (time to finish).
    """

    def sample() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(calls):
            call()
        if drain:
            torch.cuda.synchronize()
        return (time.perf_counter_ns() - start) / (1e3 * calls)

    for _ in range(WARM_UP_CALLS):
        sample()
    return sample


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Host times without the collector's pauses."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
