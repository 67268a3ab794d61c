"""Device time of the backward's kernels against cuBLAS, torch and QuACK."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from ..cases import Case, backward_cases, select
from ..contest import make_record, numbered, or_left_out, records_of
from ..contestants import find_quack
from ..options import Options, select_ops
from ..quack import Quack
from ..results import Record
from ..timing import Call, measure_device
from ..training import KERNELS, TrainingData, bytes_moved, competing, flop, make_data

ENQUEUE_US = 400.0  # more than the host needs for torch's dglu, a dozen launches


class Contest(NamedTuple):
    """Who competes in an operation on a case: calls, errors, and what QuACK's tuner chose, by name."""

    calls: dict[str, Call]
    errors: dict[str, float]
    tunings: dict[str, Any]


def contest(data: TrainingData, op: str, quack: Quack | None) -> Contest:
    peer, tunings = None, {}
    if quack:
        with or_left_out(f"{op}: {quack.name}"):
            tunings = {quack.name: quack.prepare_backward(data, op)}
            peer = quack
    chosen = competing(data, op, peer)
    calls = numbered({name: partial(call, data) for name, (call, _) in chosen.items()})
    return Contest(calls, {name: error for name, (_, error) in chosen.items()}, tunings)


def _measure(case: Case, ops: tuple[str, ...], quack: Quack | None, budget_s: float) -> Iterator[Record]:
    data = make_data(case)
    for op in ops:
        calls, errors, tuning = contest(data, op, quack)
        times = measure_device(calls, budget_s / len(ops), ENQUEUE_US)
        moved = bytes_moved(case, op, sum(size > 0 for size in data.sizes))
        work = {"flop": flop(case, op), "bytes": moved}
        yield make_record(case, times, data.sizes, op=op, **work, errors=errors, tuning=tuning)


def run_backward(options: Options) -> list[Record]:
    """One record for each (case, kernel): dglu, dgrad, dw1, dw2."""
    cases, ops = select(backward_cases(), options.case), select_ops(KERNELS, options.ops)
    quack, share = find_quack(options.quack), options.budget_s / len(cases)
    return records_of("backward", cases, lambda case: _measure(case, ops, quack, share))
