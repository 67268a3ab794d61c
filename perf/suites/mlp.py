"""Suites of the experts' operators against cuBLAS, torch and QuACK: forward, backward, both as one layer in training,
each contestant alone ("power"); and the MLP by every recipe, quantising its input included.

All other suites time contestants in turns, so that they share a clock. Alone ("power"), each contestant runs at the
clock that its own bytes and multiplications allow, which tells how much of a difference is energy and how much is time
in which nothing multiplies.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from glulam.formats.prepared import PREPARED
from glulam.tuner.timing import Call

from .. import quantised
from ..cases import BYTES_PER_ELEMENT, KERNELS, LAYER, OPS, Case
from ..contest import TimesOf, contest, over_cases
from ..mlp import OPERATIONS, Training, contestants, make_buffers, make_training
from ..options import Options, select_ops
from ..quack import Quack, find_quack
from ..results import Record
from ..stamp import Readings, follow_gpu
from ..timing import Times, forget_gradients, measure_device, peak_bytes

KERNEL_TIMES = partial(measure_device, enqueue_us=400.0)  # more than the host needs for torch's dglu, a dozen launches
TRAINING_TIMES = partial(measure_device, enqueue_us=1000.0)  # likewise, for some thirty launches
CALLS_PER_SAMPLE = 20
SETTLING = 0.4  # share of a contestant's time alone in which clock and temperature settle


@torch.no_grad()
def measure_case(
    ops: Sequence[str], quack: Quack | None, alone: TimesOf | None, case: Case, budget_s: float
) -> Iterator[Record]:
    """Yield one record for each operation, the forward's operations first.

    alone: function that times each contestant alone. None: contestants are timed alternately.
    """
    for kernels, make in ((OPS, make_buffers), (KERNELS, lambda case: [make_training(case)])):
        wanted = [op for op in ops if op in kernels]
        sets: list[Any] = list(make(case)) if wanted else []
        for op in wanted:
            sizes: list[int] = sets[0].sizes
            record = contest(
                case, contestants(op, sets, quack, has_dense=not case.decode), budget_s / len(ops),
                () if alone else sizes,  # which are even
                where=op, measure=alone or (KERNEL_TIMES if op in KERNELS else measure_device),
                op=op, flop=case.flop(op), bytes=case.bytes(op, sum(size > 0 for size in sizes)),
            )  # fmt: skip
            if quack and quack.name in record["times"]:
                record["tuning"] = quack.tunings(op, sets)
            yield record


def run_in_turns(suite: str, known: Sequence[str], options: Options, alone: TimesOf | None = None) -> list[Record]:
    """Measure the contestants in turns, or each `alone`, and return one record for each (case, operation)."""
    of_case = partial(measure_case, select_ops(known, options.ops), find_quack(options.quack), alone)
    return over_cases(suite)(of_case)(options)


run_forward, run_decode, run_rows, run_skew = (
    partial(run_in_turns, suite, OPS) for suite in ("forward", "decode", "rows", "skew")
)
run_backward = partial(run_in_turns, "backward", KERNELS)


def run_alone(call: Call, seconds: float, readings: Readings) -> dict[str, float]:
    """Run one contestant alone for `seconds`; return the time of a call, and the GPU's clock and power.

    Both are taken after the first SETTLING of the time, when clock and power have settled.
    """
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
    """Measure each contestant alone, for FC1 and the kernels of the backward, with even routing."""
    with follow_gpu() as readings:

        def alone(calls: dict[str, Call], seconds: float) -> Times:
            return {name: run_alone(call, seconds / len(calls), readings) for name, call in calls.items()}

        return run_in_turns("power", ("fc1", *KERNELS), options, alone)


def saved_bytes(call: Callable[[Training], Any], d: Training) -> int:
    """Return the bytes that a forward saves for backward besides the weights, the input included.

    A storage that several saved tensors share counts once.
    """
    kept: dict[int, int] = {}
    weights = {weight.untyped_storage().data_ptr() for weight in (d.w1, d.w2)}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call(d)
    forget_gradients(d.leaves)
    return sum(kept.values())


def needed_bytes(case: Case) -> int:
    """Return the bytes of x, the preactivation and the row scale: what a backward cannot recompute cheaply."""
    return BYTES_PER_ELEMENT * case.rows * (case.hidden + 2 * case.intermediate) + 4 * case.rows


@over_cases("train")
def run_train(case: Case, budget_s: float) -> Iterator[Record]:
    """Yield the record of a case.

    Memory is measured before anything else runs, so that buffers which a library keeps for its next call are counted.
    """
    d, layers = make_training(case), OPERATIONS[LAYER]
    fields: Record = {
        "op": LAYER,
        "flop": case.flop(LAYER),
        "peak_bytes": {name: peak_bytes(partial(call, d), d.leaves) for name, call in layers.items()},
        "saved_bytes": {name: saved_bytes(call, d) for name, call in layers.items()},
        "needed_bytes": needed_bytes(case),
    }
    yield contest(case, contestants(LAYER, [d]), budget_s, d.sizes, where=LAYER, measure=TRAINING_TIMES, **fields)


def run_fp8(options: Options) -> list[Record]:
    """Measure and return one record for each case. `--op` chooses contestants."""
    names = select_ops(quantised.CONTESTANTS, options.ops)

    def measure(case: Case, budget_s: float) -> Iterator[Record]:
        sets = make_buffers(case)
        yield contest(case, quantised.contestants(names, sets), budget_s, sets[0].sizes, op="mlp")
        PREPARED.clear()

    return over_cases("fp8")(measure)(options)
