"""Steps of a layer, each as a call of its own on what the step before it made, which show where time goes; and parts.

Steps are those of `glulam.moe` and its backward. Separate calls do not overlap, and what autograd does is not among
them: the whole may take a little less or more than the sum. Parts are GEMMs that read tokens by index against the same
on sorted rows, routing, and moving rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import glulam

from .cases import BYTES_PER_ELEMENT, FORWARD, QWEN3, LayerCase
from .cells import OURS
from .contest import Contestant, of_calls
from .layer import LayerData
from .mlp import BACKWARD_ERROR
from .tables_layer import BY_INDEX, COPY, REPLAYED, SORTED

api: Any = glulam
Steps = dict[str, Callable[[], Any]]
BACKWARD = "backward of "
ROUTED_TOKENS = (1, 64, 256, 4096, 32768)
ROUTED_EXPERTS, ROUTED_K = QWEN3.experts, 8


def _route_backward(logits: Tensor, k: int, d_scale: Tensor) -> Callable[[], Tensor]:
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        weights = api.route(leaf, k, normalize=k > 1).weight_of_row
    return lambda: torch.autograd.grad(weights, leaf, d_scale, retain_graph=True)[0]


@torch.no_grad()
def steps_of(d: LayerData, op: str) -> Steps:
    """The steps of FORWARD or TRAIN in their order, to be called without gradients."""
    b, k, is_training = d.batches[0], d.case.top_k, op != FORWARD
    logits = F.linear(b.x, d.router)
    routing = api.route(logits, k, normalize=k > 1)
    offs, rows, scale = routing.offs, routing.token_of_row, routing.weight_of_row
    preactivation = {"return_preact": True} if is_training else {}

    def fc1() -> Any:
        return api.grouped_glu(b.x, d.w1, offs=offs, rows=rows, row_scale=scale, **preactivation)

    act, preact = fc1() if is_training else (fc1(), None)
    y = api.grouped_mm(act, d.w2, offs=offs)
    steps: Steps = {
        "router GEMM": lambda: F.linear(b.x, d.router),
        "route": lambda: api.route(logits, k, normalize=k > 1),
        "FC1": fc1,
        "FC2": lambda: api.grouped_mm(act, d.w2, offs=offs),
        "combine": lambda: api.combine(y, routing),
    }
    if not is_training:
        return steps

    def dglu() -> Any:
        return api.grouped_dglu(b.d_y, d.w2, preact, offs=offs, rows=rows, row_scale=scale)

    d_preact, _, d_scale = dglu()
    d_rows = api.grouped_mm(d_preact, d.w1, offs=offs, transpose_w=True)
    route_backward = _route_backward(logits, k, d_scale)
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
    """calls by contestant, which compute the same, or `wanted` where the second is a mere copy. bytes: the fewest,
    where they are the limit. Routing alone is left to the tests: ids and rows are right or wrong.
    """

    name: str
    case: LayerCase
    calls: dict[str, Callable[[], Any]]
    flop: int = 0
    bytes: int = 0
    wanted: Tensor | None = None

    def contestants(self) -> Iterator[Contestant]:
        """The first is compared with what is wanted, or with the second."""
        _, second = (*self.calls.values(), None)[:2]
        wanted = second if self.wanted is None else lambda: self.wanted
        return of_calls(self.calls, next(iter(self.calls)), wanted, BACKWARD_ERROR, required=False)


def _gemm_parts(d: LayerData) -> Iterator[Part]:
    case, b = d.case, d.batches[0]
    rows, index, scaled = b.rows, b.token.int(), {"offs": b.offs, "row_scale": b.weights}
    fc1, fc2 = case.mlp.flop("fc1"), case.mlp.flop("fc2")
    act, preact = api.grouped_glu(rows, d.w1, return_preact=True, **scaled)

    def part(name: str, flop: int, by_index: Callable[[], Any], on_rows: Callable[[], Any]) -> Part:
        return Part(name, case, {BY_INDEX: by_index, SORTED: on_rows}, flop)

    glu = partial(api.grouped_glu, **scaled)
    kept = partial(glu, return_preact=True)
    wgrad = partial(api.grouped_wgrad, offs=b.offs)

    def dglu(d_y: Tensor, **given: Any) -> Any:
        return api.grouped_dglu(d_y, d.w2, preact, **scaled, **given)

    yield part("FC1", fc1, lambda: glu(b.x, d.w1, rows=index), lambda: glu(rows, d.w1))
    yield part("FC1, preactivation kept", fc1, lambda: kept(b.x, d.w1, rows=index), lambda: kept(rows, d.w1))
    yield part("dglu", fc2, lambda: dglu(b.d_y, rows=index), lambda: dglu(b.d_rows))
    yield part("dw1", fc1, lambda: wgrad(preact, b.x, x_rows=index), lambda: wgrad(preact, rows))
    yield part("dw2", fc2, lambda: wgrad(b.d_y, act, dy_rows=index), lambda: wgrad(b.d_rows, act))


def _moving_parts(d: LayerData) -> Iterator[Part]:
    """Each against a device copy of as many bytes."""
    case, b = d.case, d.batches[0]
    routing = api.route(F.linear(b.x, d.router), case.top_k)
    elements = b.x.numel() + b.rows.numel()
    source, target = b.rows.new_empty(2, elements // 2).normal_().unbind(0)
    calls: dict[str, tuple[Callable[[], Any], Tensor]] = {
        "permute": (lambda: api.permute(b.x, routing), b.rows),
        "combine": (lambda: api.combine(b.rows, routing), case.top_k * b.x),
    }
    for name, (call, wanted) in calls.items():
        pair: dict[str, Callable[[], Any]] = {OURS: call, COPY: lambda: target.copy_(source)}
        yield Part(name, case, pair, bytes=BYTES_PER_ELEMENT * elements, wanted=wanted)


def layer_parts(d: LayerData) -> Iterator[Part]:
    """A layer's parts, one after the other, for room. They record no gradient: call them without."""
    yield from _gemm_parts(d)
    if not d.case.decode:  # a few tokens move in the time of a launch
        yield from _moving_parts(d)


def routing_parts(device: str = "cuda") -> Iterator[Part]:
    """route, and Routing.from_topk of its choices, from 8 choices to a quarter of a million."""
    generator = torch.Generator(device).manual_seed(0)
    for tokens in ROUTED_TOKENS:
        case = LayerCase("routing", tokens, QWEN3.hidden, QWEN3.intermediate, ROUTED_EXPERTS, ROUTED_K)
        logits = torch.randn(tokens, ROUTED_EXPERTS, device=device, generator=generator).bfloat16()
        made = api.route(logits, ROUTED_K)
        from_topk = partial(api.Routing.from_topk, made.ids, made.weights, ROUTED_EXPERTS)
        yield Part("route", case, {REPLAYED: partial(api.route, logits, ROUTED_K)})
        yield Part("Routing.from_topk", case, {REPLAYED: from_topk})
