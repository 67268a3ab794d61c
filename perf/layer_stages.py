"""Where a layer's time goes: each of its steps as a call of its own, on what the step before it made.

Steps are those of `glulam.moe` and its backward. Separate calls do not overlap, and what autograd does is not among
them: the whole may take a little less or more than the sum.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .layer_cases import FORWARD
from .layer_data import Batch, LayerData

Stages = dict[str, Callable[[], object]]
BACKWARD = "backward of "


def takes(operator: Callable[..., Any], keyword: str) -> bool:
    """Whether an operator has an argument of this name."""
    return keyword in inspect.signature(operator).parameters


def by_index(api: Any) -> bool:
    """Whether a backward reads rows of tokens by index, in place of a sorted copy."""
    return takes(api.grouped_dglu, "rows") and takes(api.grouped_wgrad, "x_rows")


def _forward(api: Any, d: LayerData, b: Batch) -> Stages:
    k = d.case.top_k
    logits = F.linear(b.x, d.router)
    routing = api.route(logits, k, normalize=k > 1)
    offs, rows, scale = routing.offs, routing.token_of_row, routing.weight_of_row
    act = api.grouped_glu(b.x, d.w1, offs=offs, rows=rows, row_scale=scale)
    y = api.grouped_mm(act, d.w2, offs=offs)
    return {
        "router GEMM": lambda: F.linear(b.x, d.router),
        "route": lambda: api.route(logits, k, normalize=k > 1),
        "FC1": lambda: api.grouped_glu(b.x, d.w1, offs=offs, rows=rows, row_scale=scale),
        "FC2": lambda: api.grouped_mm(act, d.w2, offs=offs),
        "combine": lambda: api.combine(y, routing),
    }


def _route_backward(api: Any, logits: Tensor, k: int, d_scale: Tensor) -> Callable[[], Tensor]:
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        weights = api.route(leaf, k, normalize=k > 1).weight_of_row

    def call() -> Tensor:
        (d_logits,) = torch.autograd.grad(weights, leaf, d_scale, retain_graph=True)
        return d_logits

    return call


def _train(api: Any, d: LayerData, b: Batch) -> Stages:
    """Of forward and backward. Rows are sorted copies, unless the backward's operators take them by index."""
    k, indexed = d.case.top_k, by_index(api)
    logits = F.linear(b.x, d.router)
    routing = api.route(logits, k, normalize=k > 1)
    offs, rows, scale = routing.offs, routing.token_of_row, routing.weight_of_row
    x, d_y = (b.x, b.d_y) if indexed else (api.permute(b.x, routing), api.permute(b.d_y, routing))
    of_x, of_dglu = ({"rows": rows}, {"rows": rows}) if indexed else ({}, {})
    of_w1, of_w2 = ({"x_rows": rows}, {"dy_rows": rows}) if indexed else ({}, {})

    def fc1() -> Any:
        return api.grouped_glu(x, d.w1, offs=offs, row_scale=scale, return_preact=True, **of_x)

    def dglu() -> Any:
        return api.grouped_dglu(d_y, d.w2, preact, offs=offs, row_scale=scale, **of_dglu)

    act, preact = fc1()
    y = api.grouped_mm(act, d.w2, offs=offs)
    d_preact, act, d_scale = dglu()
    d_rows = api.grouped_mm(d_preact, d.w1, offs=offs, transpose_w=True)
    route_backward = _route_backward(api, logits, k, d_scale)
    d_logits, d_x = route_backward(), api.combine(d_rows, routing)

    def router_backward() -> tuple[Tensor, Tensor]:
        return d_logits.mT @ b.x, d_x + d_logits @ d.router

    copies: Stages = {} if indexed else {"permute": lambda: api.permute(b.x, routing)}
    copies_back: Stages = {} if indexed else {BACKWARD + "combine": lambda: api.permute(b.d_y, routing)}
    forward = _forward(api, d, b)
    return {
        **{name: forward[name] for name in ("router GEMM", "route")},
        **copies,
        "FC1": fc1,
        "FC2": lambda: api.grouped_mm(act, d.w2, offs=offs),
        "combine": lambda: api.combine(y, routing),
        **copies_back,
        BACKWARD + "FC2: dglu": dglu,
        BACKWARD + "FC2: dw2": lambda: api.grouped_wgrad(d_y, act, offs=offs, **of_w2),
        **{f"{name} again": call for name, call in copies.items()},
        BACKWARD + "FC1: dw1": lambda: api.grouped_wgrad(d_preact, x, offs=offs, **of_w1),
        BACKWARD + "FC1: dgrad": lambda: api.grouped_mm(d_preact, d.w1, offs=offs, transpose_w=True),
        BACKWARD + "permute": lambda: api.combine(d_rows, routing),
        BACKWARD + "route": route_backward,
        BACKWARD + "router GEMM": router_backward,
    }


@torch.no_grad()
def stages(d: LayerData, op: str) -> Stages:
    """The steps of FORWARD or TRAIN in their order, each ready to be called."""
    import glulam

    made = _forward if op == FORWARD else _train
    return {name: _quietly(call) for name, call in made(glulam, d, d.batches[0]).items()}


def _quietly(call: Callable[[], object]) -> Callable[[], object]:
    """The call without a record of it."""

    def quiet() -> object:
        with torch.no_grad():
            return call()

    return quiet
