"""CUDA graphs: a stack of MLP calls, launched one by one or replayed, in wall time a layer.

Before anything is timed, a graph captured under one routing is replayed under others and must equal the
eager call bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from glulam.tuner.timing import interleave

from ..cases import Case
from ..contest import admitted, make_record, over_cases
from ..mlp import Buffers, contestants, make_buffers, offsets, our_mlp
from ..results import Record
from ..routing import ROUTINGS, group_sizes
from ..timing import capture, host_sampler, per_call

LAYERS = 32
CALLS_PER_SAMPLE = 2


def _check_replays(case: Case, b: Buffers) -> int:
    """Replays one captured call under every routing; how many were compared. Raises RuntimeError on a difference."""
    replay, kept = capture(partial(our_mlp, b)), b.offs.clone()
    for routing in ROUTINGS:
        b.offs.copy_(offsets(group_sizes(dataclasses.replace(case, routing=routing)), str(b.offs.device))[0])
        expected = our_mlp(b).clone()
        b.y.fill_(float("nan"))
        replay()
        if not torch.equal(b.y, expected):
            raise RuntimeError(f"{case.label}: a replay under {routing} routing differs from the eager call")
    b.offs.copy_(kept)
    return len(ROUTINGS)


def _stack(call: Callable[[int], Any]) -> None:
    """One call after another, each on the next set of buffers."""
    for layer in range(LAYERS):
        call(layer)


def _measure(case: Case, budget_s: float) -> Iterator[Record]:
    sets = make_buffers(case)
    who = admitted(case.label, contestants("mlp", sets, has_dense=False))
    replays = _check_replays(case, sets[0])
    samplers = {}
    for name, call in who.calls.items():
        eager = partial(_stack, call)
        modes: dict[str, Callable[[], Any]] = {"eager": eager, "replay": capture(eager)}
        for mode, run in modes.items():
            samplers[f"{name} {mode}"] = per_call(host_sampler(run, CALLS_PER_SAMPLE, drain=True), LAYERS)
    times, fields = interleave(samplers, budget_s / 2), {"layers": LAYERS, "replays_equal_to_eager": replays}
    yield make_record(case, times, sets[0].sizes, op="mlp", **fields)


run_graph = over_cases("graph", _measure)
