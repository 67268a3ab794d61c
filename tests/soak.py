"""`make soak`: threads that call operators for minutes, with new shapes and new weights, steps and CUDA graphs at once.

Each thread draws fuzz problems (`fuzz.draw`) and compares results with float64; on a GPU it has a stream of its own and
captures some calls. Every few seconds memory of the host and the device, file descriptors and threads are read: after
the first third they must not grow any more.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from fuzz import check, draw
from fuzz.problem import Problem
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

MOST_GROWTH = {"host MiB": 64.0, "device MiB": 64.0, "descriptors": 4.0, "threads": 2.0}
"""Allowed growth of each quantity after the first third, since plans and prepared weights come and go."""
PAUSE_S = 2.0
PER_STRATUM = 4


class Reading(NamedTuple):
    """Memory, file descriptors and threads of the process at one time."""

    seconds: float
    held: dict[str, float]


def read(began: float, device: torch.device) -> Reading:
    """Collect garbage, and read the memory, descriptors and threads that this process holds."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    held = {
        "host MiB": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "descriptors": float(len(os.listdir("/proc/self/fd"))),
        "threads": float(threading.active_count()),
    }
    if device.type == "cuda":
        held["device MiB"] = torch.cuda.memory_allocated(device) / 2**20
    return Reading(time.monotonic() - began, held)


def growth(readings: Sequence[Reading]) -> list[str]:
    """Return a line for each quantity whose minimum in the last third exceeds its maximum in the second third by too
    much.
    """
    third = len(readings) // 3
    if not third:
        return []
    middle, last = readings[third : 2 * third], readings[2 * third :]
    lines = []
    for name in readings[0].held:
        most, least = max(one.held[name] for one in middle), min(one.held[name] for one in last)
        if least - most > MOST_GROWTH[name]:
            lines.append(f"{name} grew from {most:.0f} to {least:.0f}")
    return lines


def drawn(seed: int, stratum: draw.Stratum, device: str) -> list[Problem]:
    """Draw a few problems of a stratum; other seeds give other problems."""
    found: list[Problem] = []

    @seeded(seed)
    @settings(
        max_examples=PER_STRATUM, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(draw.problems(stratum, device))
    def note(problem: Problem) -> None:
        found.append(problem)

    note()
    return found


class Soak:
    """Worker threads on a device, which run until they are stopped.

    Attributes:
        count: number of problems that passed. failures: errors, each with the command that reproduces it.
    """

    def __init__(self, device: torch.device, threads: int, seed: int) -> None:
        self.device, self.seed = device, seed
        self.count, self.failures = 0, list[str]()
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._work, args=(place,)) for place in range(threads)]
        self._drawing = threading.Lock()  # hypothesis draws one at a time

    def __enter__(self) -> Soak:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _work(self, place: int) -> None:
        torch.set_num_threads(1)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.Stream(self.device)):
                self._draw_and_try(place)
        else:
            self._draw_and_try(place)

    def _draw_and_try(self, place: int) -> None:
        strata = itertools.islice(draw.strata(), place, None)
        for number, stratum in enumerate(strata):
            with self._drawing:
                problems = drawn(self.seed + 1000 * place + number, stratum, self.device.type)
            for problem in problems:
                if self._ended.is_set():
                    return
                self._try(problem)

    def _try(self, problem: Problem) -> None:
        try:
            check.check(problem, self.device)
        except Exception as error:  # whatever goes wrong is told at the end
            with self._lock:
                self.failures.append(f"{type(error).__name__}: {error}\n    {problem.command(self.device.type)}")
            return
        with self._lock:
            self.count += 1


def soak(
    device: torch.device, seconds: float, threads: int, seed: int = 0, pause_s: float = PAUSE_S,
    say: Callable[[str], object] = print,
) -> int:  # fmt: skip
    """Run for `seconds`; return 0 if everything passed and nothing grew, else 1."""
    began, readings = time.monotonic(), list[Reading]()
    with Soak(device, threads, seed) as work:
        while time.monotonic() - began < seconds and not work.failures:
            time.sleep(pause_s)
            readings.append(read(began, device))
    for failure in work.failures[:3]:
        say(failure)
    grown = growth(readings)
    for line in grown:
        say(line)
    last = ", ".join(f"{value:.0f} {name}" for name, value in readings[-1].held.items()) if readings else "nothing"
    say(f"{work.count} problems by {threads} threads in {time.monotonic() - began:.0f} s; held at the end: {last}")
    return int(bool(work.failures or grown))


def main(given: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if everything passed and nothing grew, 1 if not, 2 if the device does not exist."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("minutes", type=float, nargs="?", default=10.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    told = parser.parse_args(given)
    if told.device.startswith("cuda") and not torch.cuda.is_available():
        print(f"soak: there is no GPU for --device {told.device}; give --device cpu", file=sys.stderr)
        return 2
    return soak(torch.device(told.device), 60 * told.minutes, told.threads, told.seed)


if __name__ == "__main__":
    sys.exit(main())
