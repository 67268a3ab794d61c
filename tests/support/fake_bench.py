"""A tuner bench with made-up times.

Its clock advances only by these times, so that tuning takes milliseconds on a CPU.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from cute_kernels.specs import Spec
from ffi_bridge import CompileError
from glulam.choose.loadable import Function
from glulam.choose.problem import Problem
from glulam.tuner.timing import Sampler

GPU = "NVIDIA Fake"
Us = Callable[[Spec, int, str], float]  # time of a kernel at a number of rows and a routing


@dataclasses.dataclass
class FakeBench:
    """Stand-in for `tuner.bench.GpuBench`.

    `us`: function that returns the time of a step. `noise`: standard deviation of samples as a share of the time.
    """

    us: Us
    noise: float = 0.0
    wrong: Callable[[Spec], bool] = lambda spec: False
    memory_rows: int = 1 << 40
    gpu: str = GPU
    arch: str = "sm_90a"
    driver: str = ""
    now: float = 0.0
    loaded: list[int] = dataclasses.field(default_factory=list)
    contests: list[tuple[int, str, int]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(0)

    def clock(self) -> float:
        return self.now

    def fits(self, problem: Problem) -> bool:
        return problem.rows <= self.memory_rows

    def load(self, problem: Problem) -> None:
        self.loaded.append(problem.rows)

    def agree(self, functions: Mapping[Spec, Function], first: Spec, rows: int) -> list[Spec]:
        return [spec for spec in functions if spec == first or not self.wrong(spec)]

    def samplers(self, functions: Mapping[Spec, Function], rows: int, routing: str, us: float) -> dict[Spec, Sampler]:
        self.contests.append((rows, routing, len(functions)))
        return {spec: self._sampler(spec, rows, routing) for spec in functions}

    def _sampler(self, spec: Spec, rows: int, routing: str) -> Sampler:
        def sample() -> float:
            us = self.us(spec, rows, routing) * self._random.gauss(1.0, self.noise)
            self.now += us * 1e-6
            return us

        return sample


@dataclasses.dataclass
class FakeMakes:
    """Stand-in for `tuner.pool.CompilePool` that compiles every kernel at once.

    `fails`: function that returns True for specs that do not compile.
    """

    fails: Callable[[Spec], bool] = lambda spec: False
    started: list[Spec] = dataclasses.field(default_factory=list)
    jobs: int = 1

    def start(self, spec: Spec) -> Future[Function]:
        self.started.append(spec)
        return Future()

    def wait(self, spec: Spec) -> Any:
        assert spec in self.started
        return CompileError(f"{spec.name}: no room\nmore words") if self.fails(spec) else lambda *_: None
