"""Experts across the GPUs of one host, a process each: both ends alone, and whole layers.

Every contestant is timed by all ranks at once, in turns, and a time is the slowest rank's median. Links are measured in
the same run: an elementwise kernel that stores to the next rank's memory. "experts alone" is the layer of one GPU with
a rank's experts and as many tokens, which choose among these experts alone.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

import glulam
from glulam.distributed import ExpertParallel
from glulam.layer.routing import Routing

from ..distributed_tables import ALONE, OURS, THEIRS
from ..options import Options

BF16 = torch.bfloat16
SAMPLES, WARM_UP = 12, 3
REPEATS, IN_GRAPH = 4, 8  # calls of a sample, and of a graph
PUT_BYTES = 2**28
DECODE, PREFILL = 64, 4096


class Layer(NamedTuple):
    """E experts of width I, K a token, of H columns."""

    name: str
    experts: int
    top_k: int
    hidden: int
    inner: int


QWEN3 = Layer("Qwen3-30B-A3B", 128, 8, 2048, 768)
DEEPSEEK = Layer("DeepSeek-V3", 256, 8, 7168, 2048)
LAYERS = (QWEN3, DEEPSEEK)
Calls = dict[str, Callable[[], object]]


def _slowest(value: float) -> float:
    """The largest of all ranks'."""
    held = torch.tensor(value, device="cuda", dtype=torch.float64)
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return float(held)


def _together() -> None:
    dist.barrier()
    torch.cuda.synchronize()


def timed(calls: Calls, repeats: int) -> dict[str, float]:
    """Microseconds of each call, host included, the slowest rank's median; contestants take turns."""
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


def in_graph(call: Callable[[], object]) -> Callable[[], object]:
    """IN_GRAPH calls in one graph."""
    call()
    _together()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(IN_GRAPH):
            call()
    _together()
    return graph.replay


def put_rate() -> float:
    """GB/s of an elementwise kernel that stores to the next rank's memory, all ranks at once."""
    import torch.distributed._symmetric_memory as symmetric

    world = dist.get_world_size()
    buffer = symmetric.empty(PUT_BYTES // 2, dtype=BF16, device=torch.device("cuda", torch.cuda.current_device()))
    held = symmetric.rendezvous(buffer, dist.distributed_c10d._get_default_group())
    peer = held.get_buffer((dist.get_rank() + 1) % world, buffer.shape, BF16)
    source = torch.ones_like(buffer)
    times = timed({"put": lambda: torch.mul(source, 2, out=peer)}, 4)
    return PUT_BYTES / times["put"] * 1e-3


class Data(NamedTuple):
    """What a rank has: tokens, choices and their weights, and weights of its experts."""

    x: Tensor
    routing: Routing
    w1: Tensor
    w2: Tensor


def data_of(layer: Layer, tokens: int, num_local: int, experts: int) -> Data:
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())

    def new(*shape: int, std: float) -> Tensor:
        return torch.empty(shape, device="cuda", dtype=BF16).normal_(0, std, generator=generator)

    logits = torch.randn(tokens, experts, device="cuda", generator=generator)
    w1 = new(num_local, 2 * layer.inner, layer.hidden, std=layer.hidden**-0.5)
    w2 = new(num_local, layer.hidden, layer.inner, std=layer.inner**-0.5)
    return Data(new(tokens, layer.hidden, std=1.0), glulam.route(logits, layer.top_k), w1, w2)


def _crossing(ep: ExpertParallel, layer: Layer, ids: Tensor) -> float:
    """Bytes that must leave or reach this rank, whichever are more."""
    goes = ep.owners.destinations(ids) >= 0
    counts = [torch.zeros(ep.world, device="cuda", dtype=torch.int64) for _ in range(ep.world)]
    dist.all_gather(counts, goes.sum(0))
    table = torch.stack(counts).tolist()
    others = [rank for rank in range(ep.world) if rank != ep.rank]
    rows = max(sum(table[ep.rank][rank] for rank in others), sum(table[rank][ep.rank] for rank in others))
    return float(rows * layer.hidden * 2)


def _ends(layer: Layer, tokens: int, eps: dict[str, ExpertParallel], rate: float) -> dict[str, Any]:
    """Dispatch with its routing, and combine, of rows that are there; both in a graph where that can be."""
    ours = eps[OURS]
    data = data_of(layer, tokens, 1, layer.experts)
    routing = data.routing
    bytes_out = _slowest(_crossing(ours, layer, routing.ids))
    times: dict[str, dict[str, float]] = {}
    for name, ep in eps.items():
        x_here, here, handle = ep.dispatch(data.x, routing.ids, routing.weights)
        y_here = torch.zeros(here.ids.numel(), layer.hidden, device="cuda", dtype=BF16)
        ep.combine(y_here, handle)
        marks: list[list[torch.cuda.Event]] = []

        def both(ep: ExpertParallel = ep, y_here: Tensor = y_here, marks: Any = marks) -> None:
            at = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            at[0].record()
            _, _, handle = ep.dispatch(data.x, routing.ids, routing.weights)
            at[1].record()
            ep.combine(y_here, handle)
            at[2].record()
            marks.append(at)

        whole = timed({"both": both}, REPEATS)["both"]
        last = marks[-REPEATS * SAMPLES :]
        parts = {
            part: _slowest(statistics.median([at[place].elapsed_time(at[place + 1]) * 1e3 for at in last]))
            for place, part in enumerate(("dispatch", "combine"))
        }
        times[name] = {**parts, "both": whole}

        def step(ep: ExpertParallel = ep, y_here: Tensor = y_here) -> None:
            _, _, handle = ep.dispatch(data.x, routing.ids, routing.weights)
            ep.combine(y_here, handle)

        if name == OURS:
            times[name]["graph"] = timed({"graph": in_graph(step)}, 1)["graph"] / IN_GRAPH
    return {"kind": "ends", "layer": layer.name, "tokens": tokens, "bytes": bytes_out, "put_gbps": rate, "times": times}


def _layer_calls(data: Data, ep: ExpertParallel | None, folded: list[Any]) -> Calls:
    """Forward, the same by recipe "mxfp8" with folded weights, and forward with backward, of a rank's tokens."""
    leaves = [t.detach().requires_grad_() for t in (data.x, data.w1, data.w2)]

    def forward() -> Tensor:
        return glulam.moe(data.x, data.routing, data.w1, data.w2, parallel=ep)

    def in_mxfp8() -> Tensor:
        return glulam.moe(data.x, data.routing, *folded, recipe="mxfp8", parallel=ep)

    def train() -> None:
        for leaf in leaves:
            leaf.grad = None
        with torch.enable_grad():
            y = glulam.moe(leaves[0], data.routing, leaves[1], leaves[2], parallel=ep)
            y.backward(data.x)

    return {"forward": forward, "forward, mxfp8": in_mxfp8, "forward + backward": train}


def _layers(layer: Layer, tokens: int, eps: dict[str, ExpertParallel]) -> list[dict[str, Any]]:
    ours = eps[OURS]
    data = data_of(layer, tokens, ours.num_local, layer.experts)
    alone = data_of(layer, tokens, ours.num_local, ours.num_local)._replace(w1=data.w1, w2=data.w2)
    folded = [] if tokens <= DECODE else [glulam.prepare_mxfp8_weight(w, report=False) for w in (data.w1, data.w2)]
    modes: dict[str, Calls] = {}
    for name, (of, ep) in {OURS: (data, ours), THEIRS: (data, eps[THEIRS]), ALONE: (alone, None)}.items():
        calls = _layer_calls(of, ep, folded)
        if tokens <= DECODE:
            calls = {"forward": calls["forward"]}
            if name != THEIRS:
                calls["forward, graph"] = in_graph(calls["forward"])
        for mode, call in calls.items():
            modes.setdefault(mode, {})[name] = call
    made = []
    for mode, of_mode in modes.items():
        of_graph = mode.endswith("graph")
        found = timed(of_mode, 1 if of_graph else REPEATS)
        times = {name: {"us": value / (IN_GRAPH if of_graph else 1)} for name, value in found.items()}
        made.append({"kind": "layer", "layer": layer.name, "tokens": tokens, "mode": mode, "times": times})
    return made


def _measure(case: str | None) -> list[dict[str, Any]]:
    rate, records = put_rate(), []
    with torch.no_grad():
        for tokens in (DECODE, PREFILL):
            for layer in LAYERS:
                if case and case not in f"{layer.name} {tokens}":
                    continue
                sizes = layer.experts, layer.top_k, layer.hidden, tokens
                how: list[Any] = [OURS, THEIRS]
                eps = {name: ExpertParallel(None, *sizes, dtype=BF16, transport=name) for name in how}
                records += [_ends(layer, tokens, eps, rate), *_layers(layer, tokens, eps)]
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


def run_distributed(options: Options) -> list[dict[str, Any]]:
    """On all GPUs of the host. Raises RuntimeError where there is one."""
    world = torch.cuda.device_count()
    if world < 2:
        raise RuntimeError("experts across GPUs need two of them or more")
    with tempfile.TemporaryDirectory() as folder:
        processes: Any = torch.multiprocessing
        processes.spawn(_rank, (world, folder, options.case), nprocs=world)
        records: list[dict[str, Any]] = torch.load(Path(folder) / "records", weights_only=True)
    return records
