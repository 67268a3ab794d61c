"""A layer in training: device time and memory of forward and backward, and the host's share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .. import train_host
from ..cases import BYTES_PER_ELEMENT, TINY, Case, select, train_cases
from ..cells import HOST
from ..contest import as_times, make_record, numbered, records_of
from ..memory import peak_bytes
from ..options import Options
from ..results import Record
from ..timing import Summary, host_sampler, interleave, measure_device, no_garbage_collection
from ..training import (
    LAYER,
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


def saved_bytes(call: Contestant, data: TrainingData) -> int:
    """What a forward keeps for its backward besides the weights: each memory once, the input included."""
    kept: dict[int, int] = {}
    weights = {weight.untyped_storage().data_ptr() for weight in (data.w1, data.w2)}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call(data)
    data.forget_gradients()
    return sum(kept.values())


def needed_bytes(case: Case) -> int:
    """x, the preactivation and the row scale: all that a backward cannot do without, or recompute cheaply."""
    return BYTES_PER_ELEMENT * case.rows * (case.hidden + 2 * case.intermediate) + 4 * case.rows


def _memory(case: Case, data: TrainingData) -> dict[str, Any]:
    """Before anything else ran, so that buffers which a library keeps for the next call count."""
    layers = contestants(LAYER)
    return {
        "peak_bytes": {name: peak_bytes(partial(call, data), data.forget_gradients) for name, call in layers.items()},
        "saved_bytes": {name: saved_bytes(call, data) for name, call in layers.items()},
        "needed_bytes": needed_bytes(case),
    }


def _measure(case: Case, budget_s: float) -> list[Record]:
    data = make_data(case)
    memory = _memory(case, data)
    chosen = competing(data, LAYER)
    data.forget_gradients()
    calls = numbered({name: partial(call, data) for name, (call, _) in chosen.items()})
    times = measure_device(calls, budget_s, ENQUEUE_US)
    errors = {name: error for name, (_, error) in chosen.items()}
    return [make_record(case, times, data.sizes, op=LAYER, flop=flop(case, LAYER), errors=errors, **memory)]


def _measure_host(budget_s: float) -> list[Record]:
    data = make_data(TINY)
    competing(data, LAYER)
    with no_garbage_collection():
        calls: dict[str, Callable[[], object]] = {name: partial(call, data) for name, call in HOST_ITEMS.items()}
        calls.update(train_host.items(data))
        times = interleave({name: host_sampler(call, HOST_CALLS) for name, call in calls.items()}, budget_s)
    rounds = next(iter(times.values())).samples
    for name, value in train_host.differences(times).items():
        times[name] = Summary(value, value, value, rounds)  # a difference of medians has no percentiles
    return [{"op": HOST, "times": as_times(times)}]


def run_train(options: Options) -> list[Record]:
    """One record a case, then one for each item of the host's time."""
    cases = select(train_cases(), options.case)
    share = options.budget_s / (len(cases) + 1)
    return [*records_of("train", cases, lambda case: _measure(case, share)), *_measure_host(share)]
