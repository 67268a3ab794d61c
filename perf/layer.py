"""Those that compute a layer in turns, and the check that precedes their timing.

A contestant is a function from the layer and a batch of tokens to their results; its gradients are autograd's. All
begin with the same router GEMM by torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .contest import Wrong, or_left_out
from .layer_cases import FORWARD, TRAIN
from .layer_data import Batch, LayerData, choose, sort_choices
from .layer_peers import find_peers
from .layer_reference import expected
from .training import Results, relative_error

OURS, FLOOR, SORTED, TORCH = "glulam", "MLP alone", "sorted by torch", "torch"
MAX_RELATIVE_ERROR = 0.03  # results round to 16 bits four times in a row, each about 0.004; atomics add K times
WEIGHTS = slice(3, 5)  # of a training's results


Forward = Callable[[LayerData, Batch], Tensor]


@dataclasses.dataclass(frozen=True)
class Contestant:
    """on_rows: an MLP of sorted rows, without router and sums. kept_whole: of experts without rows, weights' gradients
    are zero, which peers may leave unwritten.
    """

    name: str
    forward: Forward
    glu_layout: str = "concat"
    trains: bool = True
    on_rows: bool = False
    kept_whole: bool = False

    def leaves(self, d: LayerData, b: Batch) -> tuple[Tensor, ...]:
        return (b.rows, b.weights, d.w1, d.w2) if self.on_rows else (b.x, d.router, d.w1, d.w2)

    def infer(self, d: LayerData, b: Batch) -> Results:
        with torch.no_grad():
            return (self.forward(d, b),)

    def train(self, d: LayerData, b: Batch) -> Results:
        """The result, and the gradients of the leaves."""
        with torch.enable_grad():
            y = self.forward(d, b)
        return (y.detach(), *torch.autograd.grad(y, self.leaves(d, b), b.d_rows if self.on_rows else b.d_y))

    def call(self, op: str) -> Callable[[LayerData, Batch], Results]:
        return self.train if op == TRAIN else self.infer


def _api() -> Any:
    import glulam

    return glulam


def _ours(d: LayerData, b: Batch) -> Tensor:
    k = d.case.top_k
    routing = _api().route(F.linear(b.x, d.router), k, normalize=k > 1)
    y: Tensor = _api().moe(b.x, routing, d.w1, d.w2)
    return y


def _mlp_alone(d: LayerData, b: Batch) -> Tensor:
    y: Tensor = _api().grouped_mlp(b.rows, d.w1, d.w2, offs=b.offs, row_scale=b.weights)
    return y


def _sorted_by_torch(d: LayerData, b: Batch) -> Tensor:
    """Our MLP, and all around it by torch."""
    weights, ids = choose(F.linear(b.x, d.router), d.case.top_k)
    order, offs = sort_choices(ids, d.case.experts)
    token = order // d.case.top_k
    rows, scale = b.x.index_select(0, token), weights.reshape(-1).index_select(0, order)
    y = _api().grouped_mlp(rows, d.w1, d.w2, offs=offs, row_scale=scale)
    return torch.zeros_like(b.x).index_add(0, token, y)


def _torch(d: LayerData, b: Batch) -> Tensor:
    """No kernel of ours: torch's grouped GEMM, silu and a product, weights on the result, rows put back and added."""
    weights, ids = choose(F.linear(b.x, d.router), d.case.top_k)
    order, offs = sort_choices(ids, d.case.experts)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    rows = b.x.index_select(0, order // d.case.top_k)
    gate, up = F.grouped_mm(rows, d.w1.mT, offs=offs).chunk(2, dim=1)
    y = F.grouped_mm(F.silu(gate) * up, d.w2.mT, offs=offs)
    y = y * weights.reshape(-1).index_select(0, order).to(y.dtype)[:, None]
    return y.index_select(0, back).view(d.case.tokens, d.case.top_k, -1).sum(1)


def contestants() -> list[Contestant]:
    """Ours first; peers where they can be imported."""
    return [
        Contestant(OURS, _ours, kept_whole=True),
        Contestant(FLOOR, _mlp_alone, on_rows=True, kept_whole=True),
        Contestant(SORTED, _sorted_by_torch, kept_whole=True),
        Contestant(TORCH, _torch),
        *(Contestant(p.name, p.forward, p.glu_layout, p.trains) for p in find_peers()),
    ]


def check(contestant: Contestant, d: LayerData, op: str, wanted: Results) -> float:
    """The largest relative error of its results on the first batch. Of sorted rows, their sums and the weights'
    gradients are compared.
    """
    b = d.batches[0]
    got = contestant.call(op)(d, b)
    if contestant.on_rows:
        sums = torch.zeros_like(b.x, dtype=torch.float32).index_add(0, b.token, got[0].float())
        got, wanted = (sums, *got[WEIGHTS]), (wanted[0], *wanted[WEIGHTS])
    elif not contestant.kept_whole and (empty := [e for e, load in enumerate(d.loads) if not load]):
        for gradient in got[WEIGHTS]:
            gradient[empty] = 0
    return relative_error(got, wanted)


@dataclasses.dataclass(frozen=True)
class Admitted:
    """Who is timed, each one's error, and why the others are not."""

    contestants: list[Contestant]
    errors: dict[str, float]
    left_out: dict[str, str]


def admitted(d: LayerData, op: str, competing: Sequence[Contestant]) -> Admitted:
    """Whoever fails or is wrong is not timed: its time would say nothing."""
    chosen, errors = [], {}
    left_out: dict[str, str] = {}
    wanted: dict[str, Results] = {}
    for contestant in competing:
        if op != FORWARD and not contestant.trains:
            continue
        with or_left_out(f"{d.case.label}, {op}: {contestant.name}", noting=(left_out, contestant.name)):
            if contestant.glu_layout not in wanted:
                wanted = {contestant.glu_layout: expected(d, op, contestant.glu_layout)}  # one at a time, for room
            error = check(contestant, d, op, wanted[contestant.glu_layout])
            if not error <= MAX_RELATIVE_ERROR:
                raise Wrong(f"wrong, relative error {error:.2g}")
            chosen.append(contestant)
            errors[contestant.name] = error
    return Admitted(chosen, errors, left_out)
