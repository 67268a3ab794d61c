"""Experts across the GPUs of one host, a process each: dispatch and combine alone, and whole layers.

Every contestant is timed by all ranks at once, in turns, and a time is the slowest rank's median. Links are measured in
the same run: an elementwise kernel that stores to the next rank's memory. "experts alone" is a layer on one GPU without
other ranks: it has the experts and the number of tokens of one rank, and the tokens choose among these experts only.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

import glulam
from glulam.distributed import ExpertParallel
from glulam.layer.routing import Routing

from ..cases import LayerCase
from ..mlp import normals, trained, weights_of
from ..options import Options
from ..results import Record
from ..tables_layer import ALL_TO_ALL, ALONE, SYMMETRIC
from ..timing import Run

BF16 = torch.bfloat16
SAMPLES, WARM_UP = 12, 3
REPEATS, IN_GRAPH = 4, 8  # calls of a sample, and of a graph
PUT_BYTES = 2**28
DECODE, PREFILL = 64, 4096
LAYERS = (LayerCase("Qwen3-30B-A3B", 0, 2048, 768, 128, 8), LayerCase("DeepSeek-V3", 0, 7168, 2048, 256, 8))
Calls = dict[str, Run]


def _slowest(value: float) -> float:
    """Return the largest of all ranks' values."""
    held = torch.tensor(value, device="cuda", dtype=torch.float64)
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return float(held)


def _together() -> None:
    dist.barrier()
    torch.cuda.synchronize()


def timed(calls: Calls, repeats: int) -> dict[str, float]:
    """Return the microseconds of each call, host time included: the slowest rank's median. Calls alternate."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(-WARM_UP, SAMPLES):
        for name, call in calls.items():
            _together()
            start = time.perf_counter_ns()
            for _ in range(repeats):
                call()
            torch.cuda.synchronize()
            if number >= 0:
                samples[name].append((time.perf_counter_ns() - start) / (1e3 * repeats))
    return {name: _slowest(statistics.median(found)) for name, found in samples.items()}


def in_graph(call: Run) -> Run:
    """Capture IN_GRAPH calls as one graph, and return the graph's replay."""
    call()
    _together()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(IN_GRAPH):
            call()
    _together()
    return graph.replay


def put_rate() -> float:
    """Return the GB/s of an elementwise kernel that stores to the next rank's memory, all ranks at once."""
    import torch.distributed._symmetric_memory as symmetric

    world = dist.get_world_size()
    buffer = symmetric.empty(PUT_BYTES // 2, dtype=BF16, device=torch.device("cuda", torch.cuda.current_device()))
    held = symmetric.rendezvous(buffer, dist.distributed_c10d._get_default_group())
    peer = held.get_buffer((dist.get_rank() + 1) % world, buffer.shape, BF16)
    source = torch.ones_like(buffer)
    return PUT_BYTES / timed({"put": lambda: torch.mul(source, 2, out=peer)}, 4)["put"] * 1e-3


class Data(NamedTuple):
    """The tensors of a rank: tokens, choices and their weights, and weights of the rank's experts."""

    x: Tensor
    routing: Routing
    w1: Tensor
    w2: Tensor


def data_of(layer: LayerCase, num_local: int, experts: int) -> Data:
    """Return a rank's random tensors: tokens that choose among `experts`, and weights of `num_local` experts."""
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    random = normals(generator)
    logits = torch.randn(layer.tokens, experts, device="cuda", generator=generator)
    weights = weights_of(dataclasses.replace(layer, experts=num_local), random)
    return Data(random(layer.tokens, layer.hidden), glulam.route(logits, layer.top_k), *weights)


def _crossing(ep: ExpertParallel, layer: LayerCase, ids: Tensor) -> float:
    """Return the larger of two numbers: bytes that must leave this rank, and bytes that must reach it."""
    goes = ep.owners.destinations(ids) >= 0
    counts = [torch.zeros(ep.world, device="cuda", dtype=torch.int64) for _ in range(ep.world)]
    dist.all_gather(counts, goes.sum(0))
    table = torch.stack(counts).tolist()
    others = [rank for rank in range(ep.world) if rank != ep.rank]
    rows = max(sum(table[ep.rank][rank] for rank in others), sum(table[rank][ep.rank] for rank in others))
    return float(rows * layer.hidden * 2)


def _ends_of(ep: ExpertParallel, data: Data, has_graph: bool) -> dict[str, float]:
    """Return the times of dispatch and of combine, by CUDA events, and of both together.

    has_graph: True: also time both together as a CUDA graph.
    """
    routing, marks = data.routing, []
    x_here, here, handle = ep.dispatch(data.x, routing.ids, routing.weights)
    y_here = torch.zeros(here.ids.numel(), data.x.shape[1], device="cuda", dtype=BF16)
    ep.combine(y_here, handle)

    def both() -> None:
        at = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        at[0].record()
        _, _, handle = ep.dispatch(data.x, routing.ids, routing.weights)
        at[1].record()
        ep.combine(y_here, handle)
        at[2].record()
        marks.append(at)

    def step() -> None:
        _, _, handle = ep.dispatch(data.x, routing.ids, routing.weights)
        ep.combine(y_here, handle)

    whole, last = timed({"both": both}, REPEATS), marks[-REPEATS * SAMPLES :]
    parts = {
        part: _slowest(statistics.median([at[place].elapsed_time(at[place + 1]) * 1e3 for at in last]))
        for place, part in enumerate(("dispatch", "combine"))
    }
    graph = {"graph": timed({"graph": in_graph(step)}, 1)["graph"] / IN_GRAPH} if has_graph else {}
    return {**parts, **whole, **graph}


def _ends(layer: LayerCase, eps: dict[str, ExpertParallel], rate: float) -> Record:
    """Return the record of dispatch, with its routing, and combine without experts in between."""
    data = data_of(layer, 1, layer.experts)
    crossing = _slowest(_crossing(eps[SYMMETRIC], layer, data.routing.ids))
    times = {name: _ends_of(ep, data, name == SYMMETRIC) for name, ep in eps.items()}
    return {"kind": "ends", **_of(layer), "bytes": crossing, "put_gbps": rate, "times": times}


def _of(layer: LayerCase) -> Record:
    return {"layer": layer.name, "tokens": layer.tokens}


def _layer_calls(data: Data, ep: ExpertParallel | None, folded: list[Any], has_graph: bool) -> Calls:
    """Return the calls of a layer by name.

    Args:
        data: tokens, routing and weights.
        ep: the ExpertParallel.
        folded: w1 and w2 prepared for recipe "mxfp8", given for many tokens: the forward, the forward in "mxfp8", and
            forward with backward. Empty, for few tokens: only the forward.
        has_graph: True: for few tokens, also the forward in a graph.
    """
    x, w1, w2 = leaves = [t.detach().requires_grad_() for t in (data.x, data.w1, data.w2)]
    train = partial(trained, partial(glulam.moe, x, data.routing, w1, w2, parallel=ep), leaves, data.x)
    forward = partial(glulam.moe, data.x, data.routing, data.w1, data.w2, parallel=ep)
    if not folded:
        return {"forward": forward, **({"forward, graph": in_graph(forward)} if has_graph else {})}
    in_mxfp8 = partial(glulam.moe, data.x, data.routing, *folded, recipe="mxfp8", parallel=ep)
    return {"forward": forward, "forward, mxfp8": in_mxfp8, "forward + backward": train}


def _layers(layer: LayerCase, eps: dict[str, ExpertParallel]) -> Iterator[Record]:
    local = eps[SYMMETRIC].num_local
    data = data_of(layer, local, layer.experts)
    alone = data_of(layer, local, local)._replace(w1=data.w1, w2=data.w2)
    weights = (data.w1, data.w2) if layer.tokens > DECODE else ()
    folded = [glulam.prepare_mxfp8_weight(w, report=False) for w in weights]
    modes: dict[str, Calls] = {}
    for name, (of, ep) in {**{name: (data, ep) for name, ep in eps.items()}, ALONE: (alone, None)}.items():
        for mode, call in _layer_calls(of, ep, folded, name != ALL_TO_ALL).items():
            modes.setdefault(mode, {})[name] = call
    for mode, of_mode in modes.items():
        repeats, count = (1, IN_GRAPH) if mode.endswith("graph") else (REPEATS, 1)
        times = {name: {"us": value / count} for name, value in timed(of_mode, repeats).items()}
        yield {"kind": "layer", **_of(layer), "mode": mode, "times": times}


@torch.no_grad()
def _measure(case: str | None) -> list[Record]:
    rate, records = put_rate(), []
    for layer in (dataclasses.replace(model, tokens=tokens) for tokens in (DECODE, PREFILL) for model in LAYERS):
        if case and case not in f"{layer.name} {layer.tokens}":
            continue
        sizes = (layer.experts, layer.top_k, layer.hidden, layer.tokens)
        how: list[Any] = [SYMMETRIC, ALL_TO_ALL]
        eps = {name: ExpertParallel(None, *sizes, dtype=BF16, transport=name) for name in how}
        records += [_ends(layer, eps, rate), *_layers(layer, eps)]
        del eps
        torch.cuda.empty_cache()
    return records


def _rank(rank: int, world: int, folder: str, case: str | None) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world, device_id=device)
    try:
        records = [{**record, "world": world} for record in _measure(case)]
        if rank == 0:
            torch.save(records, Path(folder) / "records")
    finally:
        dist.destroy_process_group()


def run_distributed(options: Options) -> list[Record]:
    """Run the suite on all GPUs of the host. Raises RuntimeError if there are fewer than two."""
    world = torch.cuda.device_count()
    if world < 2:
        raise RuntimeError("experts across GPUs need two of them or more")
    with tempfile.TemporaryDirectory() as folder:
        processes: Any = torch.multiprocessing
        processes.spawn(_rank, (world, folder, options.case), nprocs=world)
        records: list[Record] = torch.load(Path(folder) / "records", weights_only=True)
    return records
