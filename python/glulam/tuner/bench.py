"""Measure a problem's kernels on a GPU: their times, and whether their results agree."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from cute_kernels.specs import Spec

from ..calls.launch import Bare
from ..choose.loadable import Function
from ..choose.problem import Problem
from ..host import device as gpus
from . import routing as routings
from .tensors import launches_of, num_bytes, of_rows
from .timing import Call, Sampler, device_us

ROTATION_BYTES = 2**29  # many times the size of any L2
MAX_SETS = 4
FREE_SHARE = 0.8  # share of the GPU's free memory that may be filled
SAMPLE_US = 400.0
MAX_CALLS_PER_SAMPLE = 16
ENQUEUE_US = 40.0  # more than the host needs for a bare function's calls of one step
TOLERANCE = 2.0**-6  # relative to the largest element: float32 sums in other orders, rounded to 16 bits


def driver_version() -> str:
    """Return the newest CUDA version that the driver supports, as text; "" if unknown."""
    version = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
    return f"CUDA {version // 1000}.{version % 1000 // 10}" if version else ""


class GpuBench:
    """A GPU that measures kernels. It holds the tensors of one problem at a time, which `load` allocates.

    What is timed is a step: one call of the operator, or for the weight gradients of an MLP two calls, one for each
    weight.

    Attributes:
        gpu: the GPU's name.
        arch: the architecture of the kernels that run on the GPU.
        driver: the driver's CUDA version, for the table's stamp.
    """

    def __init__(self, index: int) -> None:
        self._found = gpus.gpu(index)
        self.gpu, self.arch, self.driver = self._found.name, self._found.arch, driver_version()
        self._device = torch.device("cuda", index)
        self._problem: Problem
        self._sets: list[list[Bare]] = []
        self._offs: dict[tuple[int, str], Tensor] = {}

    def fits(self, problem: Problem) -> bool:
        """Return True if the GPU has memory for a problem's tensors."""
        free, _ = torch.cuda.mem_get_info(self._device)
        reserved = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return num_bytes(problem, self._found) <= FREE_SHARE * (free + reserved)

    def load(self, problem: Problem) -> None:
        """Allocate several sets of a problem's tensors. Calls use the sets in turns, so that L2 does not keep them."""
        self._problem, self._sets, self._offs = problem, [], {}
        copies = min(math.ceil(ROTATION_BYTES / num_bytes(problem, self._found)), MAX_SETS)
        self._sets = [launches_of(problem, self._found, self._device, seed) for seed in range(copies)]

    def _groups(self, rows: int, routing: str) -> Tensor:
        if (rows, routing) not in self._offs:
            sizes = routings.group_sizes(rows, self._problem.experts, routing)
            offs = torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32, device=self._device)
            self._offs[rows, routing] = offs
        return self._offs[rows, routing]

    def _call(self, function: Function, rows: int, routing: str) -> Call:
        """Return a function call(n) that runs one step on tensor set n, modulo the number of sets.

        Args:
            function: the kernel's function.
            rows: number of rows of all groups.
            routing: one of `routing.ROUTINGS`.
        """
        offs = self._groups(rows, routing)
        steps = [[of_rows(bare, rows, offs) for bare in made] for made in self._sets]

        def call(number: int) -> None:
            for arguments in steps[number % len(steps)]:
                function(*arguments)

        return call

    def agree(self, functions: Mapping[Spec, Function], first: Spec, rows: int) -> list[Spec]:
        """Return the specs whose results are close to the results of `first`, for groups of skewed sizes.

        Args:
            functions: the specs with their functions.
            first: the spec of the kernel that the others are compared with.
            rows: number of rows to compute, at most the loaded problem's.
        """
        rows = min(rows, self._problem.rows)
        written = [result for bare in self._sets[0] for result in bare.results]
        written = [result[:rows] if len(result) == self._problem.rows else result for result in written]

        def results(spec: Spec) -> list[Tensor]:
            for result in written:
                result.fill_(torch.nan)
            self._call(functions[spec], rows, routings.DIRICHLET)(0)
            return [result.clone() for result in written]

        wanted = results(first)
        return [spec for spec in functions if spec == first or all(map(_close, results(spec), wanted))]

    def samplers(self, functions: Mapping[Spec, Function], rows: int, routing: str, us: float) -> dict[Spec, Sampler]:
        """Return, for each kernel, a sampler: a function that measures once and returns microseconds per step.

        Args:
            functions: the specs with their functions.
            rows: number of rows of all groups.
            routing: one of `routing.ROUTINGS`.
            us: about the time of a step, which decides how many calls a sample has.
        """
        calls = min(max(math.ceil(SAMPLE_US / us), 1), MAX_CALLS_PER_SAMPLE)
        return {spec: _sampler(self._call(function, rows, routing), calls) for spec, function in functions.items()}


def _close(result: Tensor, wanted: Tensor) -> bool:
    distance = (result.float() - wanted.float()).abs().max()
    return bool(distance <= TOLERANCE * wanted.float().abs().max())


def _sampler(call: Call, calls: int) -> Sampler:
    call(0)
    return lambda: device_us(call, calls, ENQUEUE_US)
