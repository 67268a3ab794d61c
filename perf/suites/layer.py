"""The whole layer from tokens to tokens against other ways to compute it: time eager and replayed, memory, where the
time goes, and its parts alone.

An eager time is wall time a call, the host's included where it is the slower; a replay's is device time. In decoding
each call has tokens of its own, a graph one call for each of them: experts' weights are not read from L2 again.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

import glulam
from glulam.tuner.timing import Call, Sampler, interleave

from ..cases import FORWARD, PUBLISHED, TRAIN, LayerCase, layer_cases
from ..contest import Admitted, admitted, make_record, numbered, or_left_out, records_of
from ..layer import LayerData, make_layer
from ..layer_peers import FLOOR, Layer, contestants, layers
from ..layer_steps import Part, layer_parts, routing_parts, steps_of
from ..options import Options, select_ops
from ..results import Record
from ..tables_layer import PARTS, REPLAYED, STAGES
from ..timing import capture, device_sampler, host_sampler, measure_device, no_garbage_collection, peak_bytes, per_call

OPS = (FORWARD, TRAIN, STAGES, PARTS)
EAGER, GRAPH = "eager", "graph"
GRAPH_TOKENS = 4096  # above, no gap between launches shows
SAMPLE_US = 4000.0  # an eager sample lasts about so long: waiting for its end takes some 10 us
MAX_CALLS = 50
MIN_ROUNDS = 3  # of calls of up to 60 ms each
ENQUEUE_US = 400.0  # more than the host needs for a step
PART_CALLS = 20  # of a part in a graph


def memory(layer: Layer, d: LayerData, op: str) -> dict[str, int]:
    """In bytes: the peak of a call, above what was there before; and of TRAIN what stays from forward to backward, the
    result included. In a thread of its own, so that buffers which ours keep for a thread's next call count as well.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_memory, layer, d, op).result()


def _memory(layer: Layer, d: LayerData, op: str) -> dict[str, int]:
    """Measure a second call: what the first one compiles or tunes with does not count, but what it keeps does."""
    b, call = d.batches[0], layer.call(d, op)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    call(b)
    kept_buffers = torch.cuda.memory_allocated() - before
    found = {"peak": kept_buffers + peak_bytes(lambda: call(b))}
    if op == TRAIN:
        start = torch.cuda.memory_allocated()
        y = layer.forward(d, b)
        found["kept"] = torch.cuda.memory_allocated() - start
        del y
    return found


def _eager_sampler(call: Call) -> Sampler:
    numbers = itertools.count()

    def run() -> object:
        return call(next(numbers))

    for _ in range(2):  # the first may compile
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        run()
        torch.cuda.synchronize()
    took_us = (time.perf_counter_ns() - start) * 1e-3
    return host_sampler(run, min(max(math.ceil(SAMPLE_US / took_us), 1), MAX_CALLS), drain=True)


def _replay_sampler(call: Call, count: int, pool: Any = None) -> Sampler:
    """Samples of one of `count` calls that are replayed as one graph."""

    def run() -> None:
        for number in range(count):
            call(number)

    return per_call(device_sampler(numbered(capture(run, pool))), count)


def _time(d: LayerData, op: str, mode: str, who: Admitted, budget_s: float) -> Record:
    """Time everybody in one mode. A contestant that cannot be captured is left out of replays."""
    left_out, samplers = dict(who.left_out), {}
    make: Callable[[Call], Sampler] = _eager_sampler
    if mode == GRAPH:
        make = partial(_replay_sampler, count=len(d.batches), pool=torch.cuda.graph_pool_handle())
    with no_garbage_collection():
        for name, call in who.calls.items():
            with or_left_out(f"{d.case.label}, {op}, {mode}: {name}", noting=(left_out, name)):
                samplers[name] = make(call)
            torch.cuda.synchronize()
        times = interleave(samplers, budget_s, MIN_ROUNDS) if samplers else {}
    return make_record(d.case, times, d.loads, **_work(d, op), mode=mode, errors=who.errors, left_out=left_out)


def _work(d: LayerData, op: str) -> Record:
    moved = {"bytes": d.case.bytes(sum(load > 0 for load in d.loads))} if op == FORWARD else {}
    return {"op": op, "flop": d.case.flop(op), **moved}


def _measure_op(d: LayerData, op: str, budget_s: float) -> Iterator[Record]:
    """An eager record, which has the memory as well, and a replayed one."""
    every = layers()
    who = admitted(f"{d.case.label}, {op}", contestants(d, op, every))
    torch.cuda.empty_cache()
    modes = [EAGER, GRAPH] if d.case.tokens <= GRAPH_TOKENS else [EAGER]
    held = {layer.name: memory(layer, d, op) for layer in every if layer.name in who.calls and layer.name != FLOOR}
    for mode in modes:
        record = _time(d, op, mode, who, budget_s / len(modes))
        yield {**record, "memory": held} if mode == EAGER else record


@torch.no_grad()
def _measure_steps(d: LayerData, op: str, budget_s: float) -> Record:
    calls = {name: numbered(call) for name, call in steps_of(d, op).items()}
    times = measure_device(calls, budget_s, ENQUEUE_US, MIN_ROUNDS)
    return make_record(d.case, times, d.loads, **{**_work(d, op), "op": STAGES}, of=op)


def _measure_part(part: Part, budget_s: float) -> list[Record]:
    fields: Record = {"op": PARTS, "part": part.name, "flop": part.flop, "bytes": part.bytes}
    who = admitted(f"{part.case.label}, {part.name}", part.contestants())
    if who.left_out:
        return []
    if REPLAYED in part.calls:  # since a launch by the host takes longer
        samplers = {name: _replay_sampler(call, PART_CALLS) for name, call in who.calls.items()}
    else:
        samplers = {name: device_sampler(call, ENQUEUE_US) for name, call in who.calls.items()}
    difference = max(who.errors.values(), default=0.0)
    return [make_record(part.case, interleave(samplers, budget_s), **fields, difference=difference)]


@torch.no_grad()
def _measure_parts(parts: Iterator[Part], budget_s: float) -> list[Record]:
    """Each with a tenth of the budget: there are some ten."""
    return [record for part in parts for record in _measure_part(part, budget_s / 10)]


def _measure(case: LayerCase, ops: tuple[str, ...], budget_s: float) -> Iterator[Record]:
    d, share = make_layer(case), budget_s / len(ops)
    for op in ops:
        if op in (FORWARD, TRAIN):
            yield from _measure_op(d, op, share)
        elif op == STAGES and case.routing == "uniform":
            yield from (_measure_steps(d, of, share / 2) for of in (FORWARD, TRAIN))
        elif op == PARTS and case in PUBLISHED:
            yield from _measure_parts(layer_parts(d), share)


def run_layer(options: Options) -> list[Record]:
    """Records of each case: op "forward" and "train", eager and "graph"; "stages" of even routing; "parts" of what is
    published, and of routing at several sizes.
    """
    ops = select_ops(OPS, options.ops)
    cases = layer_cases(options.case, options.routings, options.published)
    share = options.budget_s / (len(cases) + 1)
    glulam.preload()  # other packages may bring another version of the DSL's run-time library: the first one serves all
    records = records_of("layer", cases, lambda case: _measure(case, ops, share))
    return records + (_measure_parts(routing_parts(), share) if PARTS in ops else [])
