"""A layer in training: device time and peak memory of forward and backward, its kernels alone, and the host's share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.progress import track

from .. import train_host
from ..cases import TINY, Case, select, train_cases
from ..options import Options
from ..routing import skew
from ..timing import Call, Summary, host_sampler, interleave, measure_device, no_garbage_collection
from ..training import (
    OPS,
    Contestant,
    TrainingData,
    competing,
    contestants,
    flop,
    make_data,
    our_layer,
    our_operators,
    torch_layer,
)

ENQUEUE_US = 1000.0  # more than the host needs for torch's forward and backward, some thirty launches
HOST_CALLS = 20  # times torch's thirty launches: inside the queue of 1024
HOST_ITEMS: dict[str, Contestant] = {
    train_host.LAYER: our_layer,
    "glulam's six operators, without autograd": our_operators,
    "torch, forward and backward": torch_layer,
}


def peak_bytes(call: Contestant, data: TrainingData) -> int:
    """What a call adds to the memory allocated before it, at its highest; results and gradients included."""
    data.forget_gradients()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(data)
    torch.cuda.synchronize()
    data.forget_gradients()
    return torch.cuda.max_memory_allocated() - before


def _numbered(call: Contestant, data: TrainingData) -> Call:
    return lambda number: call(data)


def _record(case: Case, data: TrainingData, op: str, budget_s: float) -> dict[str, Any]:
    chosen = competing(data, op)
    data.forget_gradients()
    calls = {name: _numbered(call, data) for name, (call, _) in chosen.items()}
    times = measure_device(calls, budget_s, ENQUEUE_US)
    return {
        "case": dataclasses.asdict(case),
        "skew": dataclasses.asdict(skew(data.sizes)),
        "op": op,
        "flop": flop(case, op),
        "errors": {name: error for name, (_, error) in chosen.items()},
        "times": {name: dataclasses.asdict(summary) for name, summary in times.items()},
    }


def _measure(case: Case, budget_s: float) -> list[dict[str, Any]]:
    data = make_data(case)
    # Before anything else ran, so that buffers which a library keeps for the next call count.
    peaks = {name: peak_bytes(call, data) for name, call in contestants("layer").items()}
    records = [_record(case, data, op, budget_s / len(OPS)) for op in OPS]
    records[OPS.index("layer")]["peak_bytes"] = peaks
    del data
    torch.cuda.empty_cache()
    return records


def _measure_host(budget_s: float) -> list[dict[str, Any]]:
    data = make_data(TINY)
    competing(data, "layer")
    with no_garbage_collection():
        calls: dict[str, Callable[[], object]] = {name: partial(call, data) for name, call in HOST_ITEMS.items()}
        calls.update(train_host.items(data))
        times = interleave({name: host_sampler(call, HOST_CALLS) for name, call in calls.items()}, budget_s)
    rounds = next(iter(times.values())).samples
    for name, value in train_host.differences(times).items():
        times[name] = Summary(value, value, value, rounds)  # a difference of medians has no percentiles
    return [{"item": name, **dataclasses.asdict(summary)} for name, summary in times.items()]


def run_train(options: Options) -> list[dict[str, Any]]:
    """One record for each (case, operation), then one for each item of the host's time."""
    cases = select(train_cases(), options.case)
    share = options.budget_s / (len(cases) + 1)
    records = [record for case in track(cases, "train") for record in _measure(case, share)]
    return [*records, *_measure_host(share)]
