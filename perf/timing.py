"""Samples of device and host time, taken in turns (`glulam.tuner.timing`); graphs, memory and the machine's limits."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from glulam.tuner.timing import Call, Sampler, device_us, interleave, sleep_cycles

SAMPLE_US = 1000.0  # one device sample lasts about this long
MAX_CALLS_PER_SAMPLE = 50
ENQUEUE_US = 80.0  # more than the host needs to enqueue one call of the slowest contestant
WARM_UP_CALLS = 3
REPLAY_US = 200.0  # more than the host needs to enqueue a graph's replay
FLUSHED_L2 = 4  # sizes of L2 that are read to evict all of it
MIN_ROUNDS, MAX_ROUNDS = 5, 200
HOST_CALLS_PER_SAMPLE = 100  # two launches each stay well inside the queue of 1024
SQUARE, COPY_BYTES, LIMITS_S = 8192, 2**32, 2.0

Run = Callable[[], Any]
Times = dict[str, dict[str, Any]]
"""Measurements by contestant, as a record holds them."""


def in_turns(
    samplers: Mapping[str, Sampler], budget_s: float, min_rounds: int = MIN_ROUNDS, max_rounds: int = MAX_ROUNDS
) -> Times:
    """Take samples in turns until the budget is spent; return each contestant's median and outer deciles."""
    found = interleave(samplers, budget_s, min_rounds, max_rounds) if samplers else {}
    return {name: vars(summary) for name, summary in found.items()}


def device_sampler(call: Call, enqueue_us: float = ENQUEUE_US) -> Sampler:
    """Return a sampler of a call's device time: after a warm-up, one trial decides how many calls a sample has."""
    for number in range(WARM_UP_CALLS):
        call(number)
    calls = min(max(math.ceil(SAMPLE_US / device_us(call, 1, enqueue_us)), 1), MAX_CALLS_PER_SAMPLE)
    return lambda: device_us(call, calls, enqueue_us)


def flushed_sampler(replay: Call, enqueue_us: float = REPLAY_US) -> Sampler:
    """Return a sampler of the device time of one call from a cold L2.

    Before each call a tensor several times the size of L2 is read, not written: the call would pay for writing it back.
    """
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    evicting = torch.zeros(FLUSHED_L2 * l2_bytes // 4, device="cuda")

    def sample() -> float:
        evicting.sum()
        return device_us(replay, 1, enqueue_us)

    for _ in range(WARM_UP_CALLS):
        sample()
    return sample


def host_sampler(call: Run, calls: int = HOST_CALLS_PER_SAMPLE, *, drain: bool = False) -> Sampler:
    """Return a sampler of the host's wall time a call, starting from an idle device.

    Without `drain` a sample ends when the last call returns (time to enqueue), with it when the device is idle again
    (time to finish).
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


def per_call(sampler: Sampler, count: int) -> Sampler:
    """Return a sampler of the time of one call, from a sampler of `count` calls that are timed together."""
    return lambda: sampler() / count


def measure_device(
    calls: Mapping[str, Call], budget_s: float, enqueue_us: float = ENQUEUE_US, min_rounds: int = MIN_ROUNDS
) -> Times:
    """Return the device time of each call in microseconds, by CUDA events; the calls take turns.

    enqueue_us: more than the host needs to enqueue one call of the slowest contestant.
    """
    return in_turns({name: device_sampler(call, enqueue_us) for name, call in calls.items()}, budget_s, min_rounds)


def measure_host(items: Mapping[str, Run], budget_s: float) -> Times:
    """Return the host time until each item returns, in microseconds. Items alternate, with garbage collection off."""
    with no_garbage_collection():
        return in_turns({name: host_sampler(item) for name, item in items.items()}, budget_s)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Switch the garbage collector off in the block, so that host times are free of its pauses."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def capture(run: Run, pool: Any = None) -> Run:
    """Capture `run` as a CUDA graph, after one warm-up on a side stream, and return a function that replays the graph.

    The function returns the results of the captured run.

    pool: memory that graphs share; only for graphs that are replayed one after the other, and whose results nobody
    reads later. None: memory of its own.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = run()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def forget_gradients(leaves: Iterable[torch.Tensor]) -> None:
    for leaf in leaves:
        leaf.grad = None


def peak_bytes(call: Run, leaves: Sequence[torch.Tensor] = ()) -> int:
    """Return the peak of allocated bytes during a call, above those before; results and gradients of leaves count."""
    forget_gradients(leaves)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    forget_gradients(leaves)
    return torch.cuda.max_memory_allocated() - before


def launch_nothing() -> None:
    """Launch a kernel that returns at once."""
    sleep_cycles(0)


def measure_limits() -> dict[str, float]:
    """Measure the machine's limits: cuBLAS BF16 8192^3, a device copy (read plus written), one launch's host time."""
    a, b = (torch.randn(SQUARE, SQUARE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out, source = torch.empty_like(a), torch.empty(COPY_BYTES, device="cuda", dtype=torch.uint8).random_()
    target = torch.empty_like(source)
    samplers = {
        "mm": device_sampler(lambda number: torch.mm(a, b, out=out)),
        "copy": device_sampler(lambda number: target.copy_(source)),
        "launch": host_sampler(launch_nothing),
    }
    mm, copy, launch = (time["median_us"] for time in in_turns(samplers, LIMITS_S).values())
    return {
        "cublas_8192_tflops": 2 * SQUARE**3 / mm * 1e-6,
        "copy_tbps": 2 * COPY_BYTES / copy * 1e-6,
        "launch_us": launch,
    }
