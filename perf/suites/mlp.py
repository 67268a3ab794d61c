"""Suites of the experts' operators against cuBLAS, torch and QuACK: forward, backward, and each contestant alone.

In turns, as all other suites measure, contestants share a clock. Alone ("power"), each has the clock that its own bytes
and multiplications earn, which tells how much of a difference is energy and how much is time in which nothing
multiplies.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from glulam.tuner.timing import Call

from ..cases import KERNELS, OPS, Case, cases_of
from ..contest import admitted, make_record, records_of
from ..mlp import contestants, make_buffers, make_training
from ..options import Options, select_ops
from ..quack import Quack, find_quack
from ..readings import Readings, follow_gpu
from ..results import Record
from ..timing import ENQUEUE_US, measure_device

BACKWARD_ENQUEUE_US = 400.0  # more than the host needs for torch's dglu, a dozen launches
CALLS_PER_SAMPLE = 20
SETTLING = 0.4  # of a contestant's time alone, in which clock and temperature become its own

Time = Callable[[dict[str, Call], str], dict[str, Any]]


def work_of(suite: str, case: Case, op: str, active_experts: int) -> Record:
    """FLOP and bytes, where a suite's results have them; of other suites, tables count them by the case."""
    work = {"flop": case.flop(op), "bytes": case.bytes(op, active_experts)}
    kept = {"backward": ("flop", "bytes"), "power": ("flop",)}.get(suite, ())
    return {name: work[name] for name in kept}


@torch.no_grad()
def _measure(suite: str, case: Case, ops: Sequence[str], quack: Quack | None, time_of: Time) -> Iterator[Record]:
    """One record for each operation, the forward's first."""
    for kernels, make in ((OPS, make_buffers), (KERNELS, lambda case: [make_training(case)])):
        wanted = [op for op in ops if op in kernels]
        sets: list[Any] = list(make(case)) if wanted else []
        for op in wanted:
            who = admitted(f"{case.label}, {op}", contestants(op, sets, quack, has_dense=not case.decode))
            tuning = {quack.name: quack.tunings(op, sets)} if quack and quack.name in who.calls else {}
            sizes = sets[0].sizes
            work = work_of(suite, case, op, sum(size > 0 for size in sizes))
            routing = () if suite == "power" else sizes  # which is even
            record = make_record(case, {}, routing, op=op, **work, errors=who.errors, tuning=tuning)
            yield {**record, "times": time_of(who.calls, op)}


def _in_turns(calls: dict[str, Call], op: str, budget_s: float) -> dict[str, Any]:
    enqueue_us = BACKWARD_ENQUEUE_US if op in KERNELS else ENQUEUE_US
    return {name: vars(summary) for name, summary in measure_device(calls, budget_s, enqueue_us).items()}


def run_in_turns(suite: str, known: Sequence[str], options: Options) -> list[Record]:
    """One record for each (case, operation)."""
    cases, ops = cases_of(suite, options.case), select_ops(known, options.ops)
    time_of = partial(_in_turns, budget_s=options.budget_s / len(cases) / len(ops))
    quack = find_quack(options.quack)
    return records_of(suite, cases, lambda case: _measure(suite, case, ops, quack, time_of))


def run_alone(call: Call, seconds: float, readings: Readings) -> dict[str, float]:
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


def run_power(options: Options) -> list[Record]:
    """One record for each case and operation, FC1 and the backward's kernels under even routing."""
    cases, ops = cases_of("power", options.case), select_ops(("fc1", *KERNELS), options.ops)
    seconds, quack = options.budget_s / len(cases) / len(ops), find_quack(options.quack)
    with follow_gpu() as readings:

        def alone(calls: dict[str, Call], op: str) -> dict[str, Any]:
            return {name: run_alone(call, seconds / len(calls), readings) for name, call in calls.items()}

        return records_of("power", cases, lambda case: _measure("power", case, ops, quack, alone))


run_forward, run_decode, run_rows, run_skew = (
    partial(run_in_turns, suite, OPS) for suite in ("forward", "decode", "rows", "skew")
)
run_backward = partial(run_in_turns, "backward", KERNELS)
