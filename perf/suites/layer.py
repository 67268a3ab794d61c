"""The whole layer, from tokens to tokens, compared with other ways to compute it.

Measured are: the time of eager calls and of replayed graphs, memory, the time of each step, and parts alone.

An eager time is wall time of a call, with the host's time if the host is slower. A replay's time is device time. In
decoding, each call has other tokens (a graph holds one call for each batch), so that experts' weights are not found in
L2.

Steps are the separate calls of which `glulam.moe` or its backward consists (router GEMM, route, FC1, ...). Each runs on
the results of the step before. Separate calls do not overlap, and autograd's own work is not among them, so the whole
may take a little less or more than their sum.

Parts are comparisons of single operations: GEMMs that read tokens by index with GEMMs on sorted rows, routing, and
moving rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import glulam
from glulam.tuner.timing import Call, Sampler

from .. import timing
from ..cases import BYTES_PER_ELEMENT, FORWARD, PUBLISHED, QWEN3, TRAIN, LayerCase, layer_cases
from ..cells import OURS
from ..contest import Contestant, Measure, admitted, contest, make_record, numbered, of_calls, or_left_out, records_of
from ..layer import FLOOR, Layer, LayerData, contestants, layers, make_layer
from ..mlp import BACKWARD_ERROR
from ..options import Options, select_ops
from ..results import Record
from ..tables_layer import BY_INDEX, COPY, PARTS, REPLAYED, SORTED, STAGES
from ..timing import Run, Times, in_turns

OPS = (FORWARD, TRAIN, STAGES, PARTS)
EAGER, GRAPH = "eager", "graph"
GRAPH_TOKENS = 4096  # above, no gap between launches shows
SAMPLE_US = 4000.0  # an eager sample lasts about so long: waiting for its end takes some 10 us
MAX_CALLS = 50
MIN_ROUNDS = 3  # rounds of calls of up to 60 ms each
ENQUEUE_US = 400.0  # more than the host needs for a step
PART_CALLS = 20  # calls of a part in a graph
api: Any = glulam
BACKWARD = "backward of "
ROUTED_TOKENS = (1, 64, 256, 4096, 32768)
ROUTED_EXPERTS, ROUTED_K = QWEN3.experts, 8


@torch.no_grad()
def steps_of(d: LayerData, op: str) -> dict[str, Run]:
    """Return the steps of FORWARD or TRAIN in their order, {name: call}. Call them with grad mode off."""
    b, is_training = d.batches[0], op != FORWARD
    logits = F.linear(b.x, d.router)
    route = partial(api.route, k=d.case.top_k, normalize=d.case.top_k > 1)
    routing = route(logits)
    offs, rows, scale = routing.offs, routing.token_of_row, routing.weight_of_row
    of_rows = {"offs": offs, "rows": rows, "row_scale": scale}
    fc1 = partial(api.grouped_glu, b.x, d.w1, **of_rows, **({"return_preact": True} if is_training else {}))
    act, preact = fc1() if is_training else (fc1(), None)
    y = api.grouped_mm(act, d.w2, offs=offs)
    steps: dict[str, Run] = {
        "router GEMM": lambda: F.linear(b.x, d.router),
        "route": lambda: route(logits),
        "FC1": fc1,
        "FC2": lambda: api.grouped_mm(act, d.w2, offs=offs),
        "combine": lambda: api.combine(y, routing),
    }
    if not is_training:
        return steps
    dglu = partial(api.grouped_dglu, b.d_y, d.w2, preact, **of_rows)
    d_preact, _, d_scale = dglu()
    d_rows = api.grouped_mm(d_preact, d.w1, offs=offs, transpose_w=True)
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        weights = route(leaf).weight_of_row

    def route_backward() -> Tensor:
        return torch.autograd.grad(weights, leaf, d_scale, retain_graph=True)[0]

    d_logits, d_x = route_backward(), api.combine(d_rows, routing)
    return {
        **steps,
        BACKWARD + "FC2: dglu": dglu,
        BACKWARD + "FC2: dw2": lambda: api.grouped_wgrad(b.d_y, act, offs=offs, dy_rows=rows),
        BACKWARD + "FC1: dw1": lambda: api.grouped_wgrad(d_preact, b.x, offs=offs, x_rows=rows),
        BACKWARD + "FC1: dgrad": lambda: api.grouped_mm(d_preact, d.w1, offs=offs, transpose_w=True),
        BACKWARD + "permute": lambda: api.combine(d_rows, routing),
        BACKWARD + "route": route_backward,
        BACKWARD + "router GEMM": lambda: (d_logits.mT @ b.x, d_x + d_logits @ d.router),
    }


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the layer that is timed alone.

    Attributes:
        name: the part's name.
        case: the layer's sizes.
        calls: functions to time, by contestant. All compute the same result, or the second is a plain copy.
        flop: useful floating-point operations of a call; 0: not counted.
        bytes: the fewest bytes that a call must move; 0: bytes are not its limit.
        wanted: the right result of the first call. None: the second call's result, if there is a second. The results
            of routing (ids and rows) are not compared here, only in tests.
    """

    name: str
    case: LayerCase
    calls: dict[str, Run]
    flop: int = 0
    bytes: int = 0
    wanted: Tensor | None = None

    def contestants(self) -> Iterator[Contestant]:
        """Yield the contestants; the first contestant's result is compared with `wanted`, or else with the second's."""
        _, second = (*self.calls.values(), None)[:2]
        wanted = second if self.wanted is None else lambda: self.wanted
        return of_calls(self.calls, next(iter(self.calls)), wanted, BACKWARD_ERROR, required=False)


def _gemm_parts(d: LayerData) -> Iterator[Part]:
    case, b = d.case, d.batches[0]
    rows, index, scaled = b.rows, b.token.int(), {"offs": b.offs, "row_scale": b.weights}
    fc1, fc2 = case.mlp.flop("fc1"), case.mlp.flop("fc2")
    act, preact = api.grouped_glu(rows, d.w1, return_preact=True, **scaled)
    glu, kept = (partial(api.grouped_glu, w1=d.w1, **scaled, **more) for more in ({}, {"return_preact": True}))
    dglu = partial(api.grouped_dglu, w2=d.w2, preact=preact, **scaled)
    wgrad = partial(api.grouped_wgrad, offs=b.offs)
    calls: dict[str, tuple[int, Run, Run]] = {
        "FC1": (fc1, lambda: glu(b.x, rows=index), lambda: glu(rows)),
        "FC1, preactivation kept": (fc1, lambda: kept(b.x, rows=index), lambda: kept(rows)),
        "dglu": (fc2, lambda: dglu(b.d_y, rows=index), lambda: dglu(b.d_rows)),
        "dw1": (fc1, lambda: wgrad(preact, b.x, x_rows=index), lambda: wgrad(preact, rows)),
        "dw2": (fc2, lambda: wgrad(b.d_y, act, dy_rows=index), lambda: wgrad(b.d_rows, act)),
    }
    for name, (flop, by_index, on_rows) in calls.items():
        yield Part(name, case, {BY_INDEX: by_index, SORTED: on_rows}, flop)


def layer_parts(d: LayerData) -> Iterator[Part]:
    """Yield a layer's parts: GEMMs, then permute and combine, each compared with a device copy of as many bytes.

    Each part is made when the previous one is done, to save memory. Call this with grad mode off.
    """
    yield from _gemm_parts(d)
    case, b = d.case, d.batches[0]
    if case.decode:  # a few tokens move in the time of a launch
        return
    routing = api.route(F.linear(b.x, d.router), case.top_k)
    elements = b.x.numel() + b.rows.numel()
    source, target = b.rows.new_empty(2, elements // 2).normal_().unbind(0)
    calls: dict[str, tuple[Run, Tensor]] = {
        "permute": (lambda: api.permute(b.x, routing), b.rows),
        "combine": (lambda: api.combine(b.rows, routing), case.top_k * b.x),
    }
    for name, (call, wanted) in calls.items():
        pair: dict[str, Run] = {OURS: call, COPY: lambda: target.copy_(source)}
        yield Part(name, case, pair, bytes=BYTES_PER_ELEMENT * elements, wanted=wanted)


def routing_parts(device: str = "cuda") -> Iterator[Part]:
    """Yield parts that time `route`, and `Routing.from_topk` of its choices: 8 to a quarter of a million choices."""
    generator = torch.Generator(device).manual_seed(0)
    for tokens in ROUTED_TOKENS:
        case = LayerCase("routing", tokens, QWEN3.hidden, QWEN3.intermediate, ROUTED_EXPERTS, ROUTED_K)
        logits = torch.randn(tokens, ROUTED_EXPERTS, device=device, generator=generator).bfloat16()
        made = api.route(logits, ROUTED_K)
        from_topk = partial(api.Routing.from_topk, made.ids, made.weights, ROUTED_EXPERTS)
        yield Part("route", case, {REPLAYED: partial(api.route, logits, ROUTED_K)})
        yield Part("Routing.from_topk", case, {REPLAYED: from_topk})


def memory(layer: Layer, d: LayerData, op: str) -> dict[str, int]:
    """Return bytes of GPU memory: {"peak": peak of a call, above what was allocated before}.

    For TRAIN there is also "kept": what forward leaves allocated for backward, the result included. The call runs in a
    new thread, so buffers that our operators keep for the thread's next call count, too.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_memory, layer, d, op).result()


def _memory(layer: Layer, d: LayerData, op: str) -> dict[str, int]:
    """Measure the second call, for `memory`.

    Memory that the first call keeps (buffers) counts; memory that it used only to compile or tune does not.
    """
    b, call = d.batches[0], layer.call(d, op)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    call(b)
    kept_buffers = torch.cuda.memory_allocated() - before
    found = {"peak": kept_buffers + timing.peak_bytes(lambda: call(b))}
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
    return timing.host_sampler(run, min(max(math.ceil(SAMPLE_US / took_us), 1), MAX_CALLS), drain=True)


def _replay_sampler(call: Call, count: int, pool: Any = None) -> Sampler:
    """Return a sampler of the device time of one call: the time of one graph of `count` calls, divided by `count`."""

    def run() -> None:
        for number in range(count):
            call(number)

    return timing.per_call(timing.device_sampler(numbered(timing.capture(run, pool))), count)


def _work(d: LayerData, op: str) -> Record:
    moved = {"bytes": d.case.bytes(sum(load > 0 for load in d.loads))} if op == FORWARD else {}
    return {"op": op, "flop": d.case.flop(op), **moved}


def _measure_op(d: LayerData, op: str, budget_s: float) -> Iterator[Record]:
    """Yield the record of eager calls, which also holds the memory; then, for few tokens, that of replayed graphs.

    Graphs are measured for at most GRAPH_TOKENS tokens. Contestants that cannot be captured are left out there.
    """
    every, where = layers(), f"{d.case.label}, {op}"
    who = admitted(where, contestants(d, op, every))
    torch.cuda.empty_cache()
    modes = [EAGER, GRAPH] if d.case.tokens <= GRAPH_TOKENS else [EAGER]
    held = {layer.name: memory(layer, d, op) for layer in every if layer.name in who.calls and layer.name != FLOOR}
    for mode in modes:
        left_out, samplers = dict(who.left_out), {}
        make: Callable[[Call], Sampler] = _eager_sampler
        if mode == GRAPH:
            make = partial(_replay_sampler, count=len(d.batches), pool=torch.cuda.graph_pool_handle())
        with timing.no_garbage_collection():
            for name, call in who.calls.items():
                with or_left_out(f"{where}, {mode}: {name}", noting=(left_out, name)):
                    samplers[name] = make(call)
                torch.cuda.synchronize()
            times = in_turns(samplers, budget_s / len(modes), MIN_ROUNDS)
        more: Record = {"memory": held} if mode == EAGER else {}
        fields: Record = {"mode": mode, "errors": who.errors, "left_out": left_out}
        yield {**make_record(d.case, times, d.loads, **_work(d, op), **fields), **more}


@torch.no_grad()
def _measure_steps(d: LayerData, op: str, budget_s: float) -> Record:
    calls = {name: numbered(call) for name, call in steps_of(d, op).items()}
    times = timing.measure_device(calls, budget_s, ENQUEUE_US, MIN_ROUNDS)
    return make_record(d.case, times, d.loads, **{**_work(d, op), "op": STAGES}, of=op)


def _part_times(calls: dict[str, Call], budget_s: float) -> Times:
    if REPLAYED not in calls:
        return timing.measure_device(calls, budget_s, ENQUEUE_US)
    # Replayed, since a launch by the host takes longer.
    return in_turns({name: _replay_sampler(call, PART_CALLS) for name, call in calls.items()}, budget_s)


@torch.no_grad()
def _measure_parts(parts: Iterator[Part], budget_s: float) -> list[Record]:
    """Measure parts of a layer, and return their records; parts with a failed or wrong contestant are left out.

    Each part gets a tenth of the budget, since there are about ten parts.
    """
    found = []
    for part in parts:
        fields: Record = {"op": PARTS, "part": part.name, "flop": part.flop, "bytes": part.bytes}
        record = contest(part.case, part.contestants(), budget_s / 10, where=part.name, measure=_part_times, **fields)
        errors = record.pop("errors")
        if len(record["times"]) == len(part.calls):
            found.append({**record, "difference": max(errors.values(), default=0.0)})
    return found


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
    """Measure each case and return records of op "forward" and "train", eager and "graph"; of "stages" of even routing;
    of "parts" of published layers, and of routing at several sizes.
    """
    ops = select_ops(OPS, options.ops)
    measures: list[Measure] = [
        partial(_measure, case, ops) for case in layer_cases(options.case, options.routings, options.published)
    ]
    if PARTS in ops:
        measures.append(lambda budget_s: _measure_parts(routing_parts(), budget_s))
    glulam.preload()  # other packages may bring another version of the DSL's run-time library: the first one serves all
    return records_of("layer", measures, options.budget_s)
