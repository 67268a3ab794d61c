"""Parts of a layer: GEMMs that read tokens by index against the same on sorted rows, routing, and moving rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cases import BYTES_PER_ELEMENT, QWEN3
from .layer import OURS
from .layer_cases import LayerCase
from .layer_data import LayerData
from .layer_stages import takes

BY_INDEX, SORTED, COPY, GRAPH = "by index", "sorted rows", "copy", "replayed"
ROUTED_TOKENS = (1, 64, 256, 4096, 32768)
ROUTED_EXPERTS, ROUTED_K = QWEN3.experts, 8


@dataclasses.dataclass(frozen=True)
class Part:
    """calls by contestant, which compute the same, or `wanted` where the second is a mere copy. bytes: the fewest,
    where they are the limit. replayed: timed in a graph, since a launch by the host takes longer.
    """

    name: str
    case: LayerCase
    calls: dict[str, Callable[[], Any]]
    flop: int = 0
    bytes: int = 0
    wanted: Tensor | None = None
    replayed: bool = False


def _gemm_parts(api: Any, d: LayerData) -> Iterator[Part]:
    """Of what the operators here take by index."""
    case, b = d.case, d.batches[0]
    offs, rows, scale, index = b.offs, b.rows, b.weights, b.token.int()
    fc1, fc2 = case.mlp.flop("fc1"), case.mlp.flop("fc2")

    def glu(x: Tensor, **given: Any) -> Any:
        return api.grouped_glu(x, d.w1, offs=offs, row_scale=scale, **given)

    def dglu(d_y: Tensor, **given: Any) -> Any:
        return api.grouped_dglu(d_y, d.w2, preact, offs=offs, row_scale=scale, **given)

    def wgrad(d_y: Tensor, x: Tensor, **given: Any) -> Any:
        return api.grouped_wgrad(d_y, x, offs=offs, **given)

    if takes(api.grouped_glu, "rows"):
        pair: dict[str, Callable[[], Any]] = {BY_INDEX: lambda: glu(b.x, rows=index), SORTED: lambda: glu(rows)}
        yield Part("FC1", case, pair, fc1)
        both = {"return_preact": True}
        pair = {BY_INDEX: lambda: glu(b.x, rows=index, **both), SORTED: lambda: glu(rows, **both)}
        yield Part("FC1, preactivation kept", case, pair, fc1)
    act, preact = glu(rows, return_preact=True)
    if takes(api.grouped_dglu, "rows"):
        pair = {BY_INDEX: lambda: dglu(b.d_y, rows=index), SORTED: lambda: dglu(b.d_rows)}
        yield Part("dglu", case, pair, fc2)
    if takes(api.grouped_wgrad, "x_rows"):
        pair = {BY_INDEX: lambda: wgrad(preact, b.x, x_rows=index), SORTED: lambda: wgrad(preact, rows)}
        yield Part("dw1", case, pair, fc1)
    if takes(api.grouped_wgrad, "dy_rows"):
        pair = {BY_INDEX: lambda: wgrad(b.d_y, act, dy_rows=index), SORTED: lambda: wgrad(b.d_rows, act)}
        yield Part("dw2", case, pair, fc2)


def _moving_parts(api: Any, d: LayerData) -> Iterator[Part]:
    """Each against a device copy of as many bytes."""
    case, b = d.case, d.batches[0]
    routing = api.route(F.linear(b.x, d.router), case.top_k)
    elements = b.x.numel() + b.rows.numel()
    source = b.rows.new_empty(elements // 2).normal_()
    target = torch.empty_like(source)
    calls: dict[str, tuple[Callable[[], Any], Tensor]] = {
        "permute": (lambda: api.permute(b.x, routing), b.rows),
        "combine": (lambda: api.combine(b.rows, routing), case.top_k * b.x),
    }
    for name, (call, wanted) in calls.items():
        pair: dict[str, Callable[[], Any]] = {OURS: call, COPY: lambda: target.copy_(source)}
        yield Part(name, case, pair, bytes=BYTES_PER_ELEMENT * elements, wanted=wanted)


def layer_parts(d: LayerData) -> Iterator[Part]:
    """A layer's parts, one after the other, for room. They record no gradient: call them without."""
    import glulam

    yield from _gemm_parts(glulam, d)
    if not d.case.decode:  # a few tokens move in the time of a launch
        yield from _moving_parts(glulam, d)


def routing_parts(device: str = "cuda") -> Iterator[Part]:
    """route, and Routing.from_topk of its choices, from 8 choices to a quarter of a million."""
    import glulam

    generator = torch.Generator(device).manual_seed(0)
    for tokens in ROUTED_TOKENS:
        case = LayerCase("routing", tokens, QWEN3.hidden, QWEN3.intermediate, ROUTED_EXPERTS, ROUTED_K)
        logits = torch.randn(tokens, ROUTED_EXPERTS, device=device, generator=generator).bfloat16()
        made = glulam.route(logits, ROUTED_K)
        yield Part("route", case, {GRAPH: _route(logits)}, replayed=True)
        yield Part("Routing.from_topk", case, {GRAPH: _from_topk(made.ids, made.weights)}, replayed=True)


def _route(logits: Tensor) -> Callable[[], Any]:
    import glulam

    return lambda: glulam.route(logits, ROUTED_K)


def _from_topk(ids: Tensor, weights: Tensor) -> Callable[[], Any]:
    import glulam

    return lambda: glulam.Routing.from_topk(ids, weights, ROUTED_EXPERTS)
