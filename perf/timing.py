"""Samples of device and host time, taken in turns: device time as the tuner takes it, host time here."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from glulam.tuner.timing import Call, Sampler, Summary, device_us, interleave, percentile, sleep_cycles, summarise

__all__ = [
    "ENQUEUE_US",
    "MIN_ROUNDS",
    "WARM_UP_CALLS",
    "Call",
    "Sampler",
    "Summary",
    "device_sampler",
    "device_us",
    "flushed_sampler",
    "host_sampler",
    "interleave",
    "measure_device",
    "no_garbage_collection",
    "percentile",
    "sleep_cycles",
    "summarise",
]

SAMPLE_US = 1000.0  # one device sample lasts about this long
MAX_CALLS_PER_SAMPLE = 50
ENQUEUE_US = 80.0  # more than the host needs to enqueue one call of the slowest contestant
WARM_UP_CALLS = 3
REPLAY_US = 200.0  # more than the host needs to enqueue a graph's replay
FLUSHED_L2 = 4  # sizes of L2 that are read to evict all of it
MIN_ROUNDS = 5
HOST_CALLS_PER_SAMPLE = 100  # two launches each stay well inside the queue of 1024


def device_sampler(call: Call, enqueue_us: float = ENQUEUE_US) -> Sampler:
    """Samples of a call's device time. Warms up first, and sizes a sample by what it saw.

    enqueue_us: more than the host needs to enqueue one call.
    """
    for number in range(WARM_UP_CALLS):
        call(number)
    calls = min(max(math.ceil(SAMPLE_US / device_us(call, 1, enqueue_us)), 1), MAX_CALLS_PER_SAMPLE)
    return lambda: device_us(call, calls, enqueue_us)


def flushed_sampler(replay: Callable[[], object], enqueue_us: float = REPLAY_US) -> Sampler:
    """Samples of the device time of one call from a cold L2.

    Before each call a tensor several times the size of L2 is read, not written: the call would pay for writing it back.
    """
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    evicting = torch.zeros(FLUSHED_L2 * l2_bytes // 4, device="cuda")

    def sample() -> float:
        evicting.sum()
        return device_us(lambda number: replay(), 1, enqueue_us)

    for _ in range(WARM_UP_CALLS):
        sample()
    return sample


def measure_device(
    calls: Mapping[str, Call], budget_s: float, enqueue_us: float = ENQUEUE_US, min_rounds: int = MIN_ROUNDS
) -> dict[str, Summary]:
    """Device time of each call, CUDA events, interleaved; microseconds."""
    return interleave({name: device_sampler(call, enqueue_us) for name, call in calls.items()}, budget_s, min_rounds)


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
