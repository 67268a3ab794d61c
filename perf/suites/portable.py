"""The MLP on portable kernels beside Hopper's own, torch, and MMAs that do nothing else, all as CUDA graphs.

A process has one architecture's plans at a time, and a graph keeps the kernels that it was captured with. So each
contestant is captured while its architecture serves, and then all take turns.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from glulam.host import device as devices
from glulam.host.plans import forget_plans

from .. import mma_sync
from ..cases import DECODE, DEEPSEEK, MIXTRAL, QWEN3, Case, select
from ..contest import make_record, records_of
from ..contestants import TorchGrouped
from ..fp8 import Mlp, check, make
from ..options import Options
from ..problem import Buffers, Problem, make_problem
from ..results import Record
from ..targets import BF16, MMA_ALONE, NATIVE, PORTABLE, PORTABLE_MXFP8, TORCH
from ..timing import Call, measure_device
from .graph import capture

ARCHS = {PORTABLE: "sm_90", PORTABLE_MXFP8: "sm_90", NATIVE: "sm_90a"}
RECIPES = {PORTABLE: BF16, NATIVE: BF16, PORTABLE_MXFP8: "mxfp8_weight_only"}
CASES = [MIXTRAL, DEEPSEEK, QWEN3, *DECODE]


@contextmanager
def served_by(arch: str) -> Iterator[None]:
    """Kernels of an architecture serve what is called within."""
    with mock.patch.dict(os.environ, {devices.ENV_ARCH: arch, devices.ENV_UNVALIDATED: "1"}):
        _forget()
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    devices.gpu.cache_clear()
    forget_plans()


def _replays(mlp: Mlp, sets: list[Buffers]) -> Call:
    graphs = [capture(lambda b=b: mlp(b)) for b in sets]  # type: ignore[misc]
    return lambda number: graphs[number % len(graphs)].replay()


def _contestant(name: str, problem: Problem) -> tuple[Call, float]:
    """Its calls, and its error against torch."""
    with served_by(ARCHS[name]):
        mlp = make(RECIPES[name], problem.sets)
        return _replays(mlp, problem.sets), check(RECIPES[name], mlp, problem.sets[0])


def _measure(case: Case, alone: Callable[[int], Any], budget_s: float) -> list[Record]:
    problem = make_problem(case)
    names = (PORTABLE, NATIVE, PORTABLE_MXFP8) if case.decode else (PORTABLE, NATIVE)
    made = {name: _contestant(name, problem) for name in names}
    calls: dict[str, Call] = {name: call for name, (call, _) in made.items()}
    calls |= {TORCH: _replays(TorchGrouped().mlp, problem.sets), MMA_ALONE: alone}
    times = measure_device(calls, budget_s)
    errors = {name: error for name, (_, error) in made.items()}
    flop = mma_sync.flop(torch.cuda.get_device_properties("cuda").multi_processor_count)
    return [make_record(case, times, problem.sizes, op="mlp", errors=errors, mma_flop=flop)]


def run_portable(options: Options) -> list[Record]:
    """One record a case."""
    cases, (alone, _) = select(CASES, options.case), mma_sync.make()
    return records_of("portable", cases, lambda case: _measure(case, alone, options.budget_s / len(cases)))
