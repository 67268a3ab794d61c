"""Device time of the backward's kernels against cuBLAS, torch and QuACK."""

from __future__ import annotations

import dataclasses
import warnings
from functools import partial
from typing import Any, NamedTuple

import torch
from rich.progress import track

from ..cases import Case, backward_cases, select
from ..contestants import find_quack
from ..options import Options, select_ops
from ..quack import Quack
from ..routing import skew
from ..timing import Call, measure_device
from ..training import KERNELS, Contestant, TrainingData, bytes_moved, competing, flop, make_data

ENQUEUE_US = 400.0  # more than the host needs for torch's dglu, a dozen launches


def _numbered(call: Contestant, data: TrainingData) -> Call:
    return lambda number: call(data)


def _tuned(quack: Quack | None, data: TrainingData, op: str) -> tuple[Quack | None, dict[str, Any]]:
    """QuACK with the configuration for these tensors, and what was chosen; without QuACK where that fails."""
    if quack is None:
        return None, {}
    try:
        return quack, {quack.name: quack.prepare_backward(data, op)}
    except Exception as error:  # whatever a foreign package raises must not cost the run
        warnings.warn(f"{op}: {quack.name} is left out: {error}", stacklevel=2)
        return None, {}


class Contest(NamedTuple):
    """Who competes in an operation on a case: calls, errors, and what QuACK's tuner chose, by name."""

    calls: dict[str, Call]
    errors: dict[str, float]
    tunings: dict[str, Any]


def contest(data: TrainingData, op: str, quack: Quack | None) -> Contest:
    peer, tunings = _tuned(quack, data, op)
    chosen = competing(data, op, peer)
    calls = {name: _numbered(call, data) for name, (call, _) in chosen.items()}
    return Contest(calls, {name: error for name, (_, error) in chosen.items()}, tunings)


def _record(case: Case, data: TrainingData, op: str, quack: Quack | None, budget_s: float) -> dict[str, Any]:
    calls, errors, tunings = contest(data, op, quack)
    times = measure_device(calls, budget_s, ENQUEUE_US)
    return {
        "case": dataclasses.asdict(case),
        "skew": dataclasses.asdict(skew(data.sizes)),
        "op": op,
        "flop": flop(case, op),
        "bytes": bytes_moved(case, op, sum(size > 0 for size in data.sizes)),
        "errors": errors,
        "times": {name: dataclasses.asdict(summary) for name, summary in times.items()},
        "tuning": tunings,
    }


def _measure(case: Case, ops: tuple[str, ...], quack: Quack | None, budget_s: float) -> list[dict[str, Any]]:
    data = make_data(case)
    record = partial(_record, case, data, quack=quack, budget_s=budget_s / len(ops))
    records = [record(op) for op in ops]
    del data, record
    torch.cuda.empty_cache()
    return records


def run_backward(options: Options) -> list[dict[str, Any]]:
    """One record for each (case, kernel): dglu, dgrad, dw1, dw2."""
    cases, ops = select(backward_cases(), options.case), select_ops(KERNELS, options.ops)
    quack = find_quack(options.quack)
    share = options.budget_s / len(cases)
    return [record for case in track(cases, "backward") for record in _measure(case, ops, quack, share)]
