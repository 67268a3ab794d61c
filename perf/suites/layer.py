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

from ..contest import make_record, numbered, or_left_out, records_of
from ..layer import FLOOR, Admitted, Contestant, admitted, contestants
from ..layer_cases import FORWARD, GRAPH_TOKENS, PUBLISHED, TRAIN, LayerCase, layer_cases
from ..layer_data import LayerData, make_layer
from ..layer_parts import Part, layer_parts, routing_parts
from ..layer_stages import Stages, stages
from ..options import Options, select_ops
from ..results import Record
from ..timing import Sampler, device_sampler, host_sampler, interleave, measure_device, no_garbage_collection
from ..training import MAX_RELATIVE_ERROR, relative_error
from .graph import capture

STAGES, PARTS = "stages", "parts"
OPS = (FORWARD, TRAIN, STAGES, PARTS)
EAGER, GRAPH = "eager", "graph"
SAMPLE_US = 4000.0  # an eager sample lasts about so long: waiting for its end takes some 10 us
MAX_CALLS = 50
MIN_ROUNDS = 3  # of calls of up to 60 ms each
ENQUEUE_US = 400.0  # more than the host needs for a step
PART_CALLS = 20  # of a part in a graph


def memory(contestant: Contestant, d: LayerData, op: str) -> dict[str, int]:
    """In bytes: the peak of a call, above what was there before; and of TRAIN what stays from forward to backward, the
    result included. In a thread of its own, so that buffers which ours keep for a thread's next call count as well.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_memory, contestant, d, op).result()


def _memory(contestant: Contestant, d: LayerData, op: str) -> dict[str, int]:
    """Of a second call: what a first one compiles or tunes with does not count."""
    b, call = d.batches[0], contestant.call(op)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    call(d, b)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call(d, b)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    if op == FORWARD:
        return {"peak": peak}
    start = torch.cuda.memory_allocated()
    y = contestant.forward(d, b)
    kept = torch.cuda.memory_allocated() - start
    del y
    return {"peak": peak, "kept": kept}


def _eager_sampler(contestant: Contestant, d: LayerData, op: str) -> Sampler:
    call, batches = contestant.call(op), itertools.cycle(d.batches)

    def run() -> object:
        return call(d, next(batches))

    for _ in range(2):  # the first may compile
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        run()
        torch.cuda.synchronize()
    took_us = (time.perf_counter_ns() - start) * 1e-3
    return host_sampler(run, min(max(math.ceil(SAMPLE_US / took_us), 1), MAX_CALLS), drain=True)


def _replay_sampler(run: Callable[[], object], calls: int, pool: Any) -> Sampler:
    """Of a graph of so many calls, the time of one."""
    graph = capture(run, pool)
    sample = device_sampler(lambda number: graph.replay())
    return lambda: sample() / calls


def _graph_sampler(contestant: Contestant, d: LayerData, op: str, pool: Any) -> Sampler:
    call = contestant.call(op)

    def run() -> None:
        for b in d.batches:
            call(d, b)

    return _replay_sampler(run, len(d.batches), pool)


def _samplers(
    d: LayerData, op: str, mode: str, chosen: list[Contestant], left_out: dict[str, str]
) -> dict[str, Sampler]:
    """By name; whoever cannot be captured is noted in `left_out`."""
    make: Callable[..., Sampler] = _eager_sampler
    if mode == GRAPH:
        make = partial(_graph_sampler, pool=torch.cuda.graph_pool_handle())
    found = {}
    for contestant in chosen:
        with or_left_out(f"{d.case.label}, {op}, {mode}: {contestant.name}", noting=(left_out, contestant.name)):
            found[contestant.name] = make(contestant, d, op)
        torch.cuda.synchronize()
    return found


def _time(d: LayerData, op: str, mode: str, who: Admitted, budget_s: float) -> Record:
    left_out = dict(who.left_out)
    with no_garbage_collection():
        samplers = _samplers(d, op, mode, who.contestants, left_out)
        times = interleave(samplers, budget_s, MIN_ROUNDS) if samplers else {}
    return make_record(d.case, times, d.loads, **_work(d, op), mode=mode, errors=who.errors, left_out=left_out)


def _work(d: LayerData, op: str) -> Record:
    moved = {"bytes": d.case.bytes(sum(load > 0 for load in d.loads))} if op == FORWARD else {}
    return {"op": op, "flop": d.case.flop(op), **moved}


def _measure_op(d: LayerData, op: str, budget_s: float) -> list[Record]:
    """An eager record, which has the memory as well, and a replayed one."""
    who = admitted(d, op, contestants())
    torch.cuda.empty_cache()
    modes = [EAGER, GRAPH] if d.case.tokens <= GRAPH_TOKENS else [EAGER]
    held = {c.name: memory(c, d, op) for c in who.contestants if c.name != FLOOR}
    records = [_time(d, op, mode, who, budget_s / len(modes)) for mode in modes]
    return [{**records[0], "memory": held}, *records[1:]]


def _measure_stages(d: LayerData, budget_s: float) -> list[Record]:
    return [_stages_record(d, op, stages(d, op), budget_s / 2) for op in (FORWARD, TRAIN)]


def _stages_record(d: LayerData, op: str, steps: Stages, budget_s: float) -> Record:
    times = measure_device(numbered(steps), budget_s, ENQUEUE_US, MIN_ROUNDS)
    return make_record(d.case, times, d.loads, **{**_work(d, op), "op": STAGES}, of=op)


def _agreed(part: Part) -> float:
    """The relative error of the first against what is wanted, or against the second. Raises RuntimeError where it is
    large. Routing alone is left to the tests: ids and rows are right or wrong, and layers would not agree.
    """
    first, *others = part.calls.values()
    if part.wanted is None and not others:
        return 0.0
    wanted = _listed(others[0]()) if part.wanted is None else (part.wanted,)
    error = relative_error(_listed(first()), wanted)
    if not error <= MAX_RELATIVE_ERROR:
        raise RuntimeError(f"{part.name}: relative error {error:.2g}; nothing was timed")
    return error


def _listed(value: Any) -> tuple[torch.Tensor, ...]:
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)


def _part_record(part: Part, budget_s: float) -> Record | None:
    errors: list[float] = []
    with or_left_out(f"{part.case.label}: {part.name}"):
        errors.append(_agreed(part))
    if not errors:
        return None
    if part.replayed:
        (name, call), *_ = part.calls.items()
        run = partial(_repeat, call)
        times = interleave({name: _replay_sampler(run, PART_CALLS, None)}, budget_s)
    else:
        times = measure_device(numbered(part.calls), budget_s, ENQUEUE_US)
    work: Record = {"flop": part.flop, "bytes": part.bytes}
    return make_record(part.case, times, op=PARTS, part=part.name, **work, difference=errors[0])


def _repeat(call: Callable[[], object]) -> None:
    for _ in range(PART_CALLS):
        call()


@torch.no_grad()
def _measure_parts(parts: Iterator[Part], budget_s: float) -> list[Record]:
    """Each with a tenth of the budget: there are some ten."""
    return [record for part in parts if (record := _part_record(part, budget_s / 10))]


def _measure(case: LayerCase, ops: tuple[str, ...], budget_s: float) -> list[Record]:
    d, share, records = make_layer(case), budget_s / len(ops), []
    for op in ops:
        if op in (FORWARD, TRAIN):
            records += _measure_op(d, op, share)
        elif op == STAGES and case.routing == "uniform":
            records += _measure_stages(d, share)
        elif op == PARTS and case in PUBLISHED:
            records += _measure_parts(layer_parts(d), share)
    return records


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
