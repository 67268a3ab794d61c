"""Expected results of calls, by torch's own operators in any dtype: the oracle of the tests, applied to a problem.

A function without a formula here is compared with itself in float64 (`check.expected`), so that new functions are
covered.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from support import oracle, routes
from torch import Tensor

import glulam
from glulam import GateUp
from glulam.formats.mlp_reference import rounded
from glulam.formats.scaled import Parts, Scaled
from glulam.recipes import RECIPES

from . import declared
from .problem import Problem
from .tensors import LORA_SCALE, form_for

Given = dict[str, Any]


class Told:
    """A problem with its tensors in one dtype."""

    def __init__(self, problem: Problem, given: Given, dtype: torch.dtype) -> None:
        self.problem, self.given, self.dtype = problem, given, dtype
        self.ends = list(itertools.accumulate(problem.sizes))
        options = problem.options
        self.form = options.get("activation", "swiglu"), options.get("glu_layout", "concat")
        self.params = {name: value for name, value in options.items() if name in oracle.DEFAULTS}
        self.transposed = bool(options.get("transpose_w"))
        self.recipe = RECIPES[problem.recipe]

    def get(self, name: str) -> Any:
        return self.given.get(name)

    def rows(self, name: str, indices: str = "rows") -> Tensor:
        """Return the rows of all groups, in order."""
        x, rows = self.given[name], self.given.get(indices)
        used = self.problem.rows
        return x[:used] if rows is None else x[rows[:used].long().clamp(0, x.shape[0] - 1)]

    def cut(self, name: str) -> Tensor | None:
        value = self.given.get(name)
        return None if value is None else value[: self.problem.rows]

    def weight(self, name: str) -> Tensor:
        """Return a weight [E, N, K] with the values that are multiplied."""
        w: Any = self.given[name]
        if isinstance(w, GateUp):
            w = torch.cat((w.gate, w.up), dim=1)
        if isinstance(w, (list, tuple)):
            w = torch.stack(list(w))
        if isinstance(w, Scaled) or self.recipe.weights is not None:
            return self._decoded(name, w)
        return self._adapted(name, w.mT if self.transposed else w)

    def _adapted(self, name: str, w: Tensor) -> Tensor:
        """Return a weight with its adapter added.

        Experts without rows get no adapter, since the NaN in theirs would spread to gradients.
        """
        a, b = self.get(f"lora_a{name[1:]}"), self.get(f"lora_b{name[1:]}")
        if a is None:
            return w
        unused = torch.tensor([not size for size in self.problem.sizes])[:, None, None]
        return w + LORA_SCALE * b.masked_fill(unused, 0) @ a.masked_fill(unused, 0)

    def _decoded(self, name: str, w: Any) -> Tensor:
        recipe = declared.recipe_of_form(self.problem.form) if self.recipe.weights is None else self.recipe.name
        form = form_for(self.problem, name, w, recipe)
        parts = w.parts if isinstance(w, Scaled) else Parts(w.detach().to(declared.DTYPES[self.problem.dtype]))
        if not (form.is_ready(parts) or (parts.scale is not None and form.has_values(parts))):
            parts = form.made(parts, False)
        dense = torch.stack([form.values(parts, expert) for expert in range(self.problem.experts)]).to(self.dtype)
        if isinstance(w, Tensor) and w.requires_grad:  # gradients pass as if nothing were rounded
            dense = w + (dense - w).detach()
        return self._adapted(name, dense)

    def bias(self, name: str) -> Any:
        return self.given.get(name)

    def low(self, rows: Tensor, name: str) -> Tensor:
        """Return rows with `low` appended as columns, for weights with `low_w` appended likewise."""
        return torch.cat((rows, self.given[name][: self.problem.rows]), dim=1)


def with_tail(value: Tensor, total: int) -> Tensor:
    """Append rows of NaN after the last group."""
    tail = value.new_full((total - value.shape[0], *value.shape[1:]), torch.nan)
    return torch.cat((value, tail))


def _glu(t: Told, x: Tensor, w: Tensor, bias: Any, ends: list[int], scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the activation and the preactivation.

    Gradients are taken at the preactivation rounded to the problem's dtype, as a forward saves it: derivatives jump at
    a relu's kink, so all computations must use the same value.
    """
    h = oracle.grouped_mm(x, w, ends, bias=bias, dtype=t.dtype)
    if t.problem.train:
        with torch.no_grad():
            exact = oracle.grouped_mm(x.double(), w.double(), ends, bias=bias)
            saved = exact.to(declared.DTYPES[t.problem.dtype]).to(t.dtype)
        h = h + (saved - h).detach()
    formula = oracle.activation if t.dtype == torch.float64 else oracle.torch_activation
    act = formula(h, *t.form, {**oracle.DEFAULTS, **t.params})
    return act if scale is None else act * scale[:, None].to(t.dtype), h


def _multiplied(values: Tensor, rows: Any) -> Tensor:
    """Round rows as a recipe does; gradients pass through unchanged."""
    return values if rows is None else values + (rounded(values.detach(), rows).to(values.dtype) - values).detach()


def _mlp(t: Told, x: Tensor, ends: list[int], scale: Tensor | None) -> Tensor:
    """Compute grouped_mlp for rows in order."""
    x = _multiplied(x, t.recipe.x)
    act, _ = _glu(t, x, t.weight("w1"), t.bias("b1"), ends, scale)
    return oracle.grouped_mm(
        _multiplied(act, t.recipe.activation), t.weight("w2"), ends, bias=t.bias("b2"), bias_scale=scale, dtype=t.dtype
    )


def grouped_mm(t: Told) -> list[Tensor]:
    x, w = t.rows("x"), t.weight("w")
    if t.get("low") is not None:
        low_w = t.given["low_w"].mT if t.transposed else t.given["low_w"]
        x, w = t.low(x, "low"), torch.cat((w, low_w), dim=2)
    y = oracle.grouped_mm(x, w, t.ends, bias=t.bias("bias"), bias_scale=t.cut("bias_scale"), dtype=t.dtype)
    return [with_tail(y, t.problem.total)]


def grouped_glu(t: Told) -> list[Tensor]:
    x, w = t.rows("x"), t.weight("w1")
    if t.get("low") is not None:
        low_w = t.given["low_w"].mT if t.transposed else t.given["low_w"]
        x, w = t.low(x, "low"), torch.cat((w, low_w), dim=2)
    made = _glu(t, x, w, t.bias("bias"), t.ends, t.cut("row_scale"))
    has_preact = t.problem.options.get("return_preact") or t.problem.call == "adapted_glu"
    return [with_tail(one, t.problem.total) for one in (made if has_preact else made[:1])]


def grouped_mlp(t: Told) -> list[Tensor]:
    return [with_tail(_mlp(t, t.rows("x"), t.ends, t.cut("row_scale")), t.problem.total)]


def grouped_dglu(t: Told) -> list[Tensor]:
    dy, w2 = t.rows("dy"), t.weight("w2")
    if t.get("low") is not None:  # dm has low low_w added
        low_w = t.given["low_w"].mT if t.transposed else t.given["low_w"]
        dy, w2 = t.low(dy, "low"), torch.cat((w2, low_w), dim=1)
    dh, act, d_scale = oracle.grouped_dglu(
        dy, w2, t.cut("preact"), t.ends, row_scale=t.cut("row_scale"), form=t.form, params=t.params, dtype=t.dtype
    )
    made = [with_tail(one, t.problem.total) for one in (dh, act)]
    if t.get("row_scale") is not None and t.problem.options.get("row_scale_grad", True):
        made.append(torch.cat((d_scale, d_scale.new_zeros(t.problem.tail))))
    return made


def grouped_wgrad(t: Told) -> list[Tensor]:
    dy, x = t.rows("dy", "dy_rows"), t.rows("x", "x_rows")
    if t.recipe.wgrad is not None:
        groups = [slice(begin, end) for begin, end in zip([0, *t.ends], t.ends, strict=False)]
        dy, x = (torch.cat([t.recipe.wgrad.rounded(one[g]) for g in groups]).to(t.dtype) for one in (dy, x))
    made = oracle.grouped_wgrad(dy, x, t.ends, dtype=t.dtype)
    there, mask = t.get("out"), t.get("mask")
    if there is None:
        return [made]
    there = torch.stack(list(there)) if isinstance(there, (list, tuple)) else there
    adds = torch.full((t.problem.experts,), bool(t.problem.options.get("accumulate"))) if mask is None else mask
    return [torch.where(adds[:, None, None], there.to(t.dtype) + made, made)]


def grouped_bias_grad(t: Told) -> list[Tensor]:
    return [oracle.grouped_bias_grad(t.rows("dy"), t.ends, row_scale=t.cut("row_scale"), dtype=t.dtype)]


def _in_rows(t: Told) -> tuple[list[int], Tensor, Tensor]:
    """Return group ends, and the token and choice of each row, computed from ids one by one."""
    ids = t.given["ids"].tolist()
    places: list[int] | None = t.given["expert_map"].tolist() if "expert_map" in t.given else None
    chosen: list[tuple[int, int, int]] = []
    for token, row in enumerate(ids):
        for choice, one in enumerate(row):
            is_there = one >= 0 and (places is None or one < len(places))
            place = (one if places is None else places[one]) if is_there else -1
            if 0 <= place < t.problem.experts:
                chosen.append((place, token, choice))
    chosen.sort()
    ends = [sum(place <= last for place, _, _ in chosen) for last in range(t.problem.experts)]
    tokens, choices = (torch.tensor([one[at] for one in chosen], dtype=torch.long) for at in (1, 2))
    return ends, tokens, choices


def moe(t: Told) -> list[Tensor]:
    ends, tokens, choices = _in_rows(t)
    x = t.given["x"]
    y = _mlp(t, x[tokens], ends, t.given["weights"].to(t.dtype)[tokens, choices])
    residual = t.get("residual")
    there = x.new_zeros(x.shape[0], y.shape[1]) if residual is None else residual
    return [there.to(t.dtype).index_add(0, tokens, y)]


def permute(t: Told) -> list[Tensor]:
    """Return the expected rows; NaN for rows without a choice, which are zeros on the CPU and undefined on a GPU."""
    _, tokens, _ = _in_rows(t)
    return [with_tail(t.given["x"][tokens], t.given["ids"].numel())]


def combine(t: Told) -> list[Tensor]:
    _, tokens, _ = _in_rows(t)
    y = t.given["y"][: len(tokens)]
    residual = t.get("residual")
    there = y.new_zeros(t.given["ids"].shape[0], y.shape[1]) if residual is None else residual
    return [there.to(t.dtype).index_add(0, tokens, y)]


def _weights(t: Told, weights: Tensor) -> list[Tensor]:
    """Return the weights of tokens, and of rows."""
    _, tokens, choices = _in_rows(t)
    return [weights, with_tail(weights[tokens, choices], weights.numel())]


def from_topk(t: Told) -> list[Tensor]:
    first = t.problem.options.get("first", 0)
    t.given["ids"] = t.given["ids"].where(t.given["ids"] < 0, t.given["ids"] - first)
    return _weights(t, t.given["weights"])


def route(t: Told) -> list[Tensor]:
    """Return the weights of the experts that plain loops choose."""
    options = t.problem.options
    rule = {name: options[name] for name in ("score", "num_groups") if name in options}
    rule["top_groups"] = max(options.get("num_groups", 1) - 1, 1)
    logits, k = t.given["logits"], options.get("k", 1)
    ids, _ = routes.route(logits.detach(), k, bias=t.get("bias"), **rule)
    if "num_tokens" in t.given:
        ids[int(t.given["num_tokens"]) :] = -1
    at, score = ids.clamp(min=0), options.get("score", "softmax")
    normalised = options.get("normalize", True)
    if score == "sigmoid":
        found = logits.sigmoid().gather(1, at)
        found = found / found.sum(1, keepdim=True) if normalised else found
    else:
        is_chosen = normalised or score == "topk_softmax"
        found = logits.gather(1, at).softmax(1) if is_chosen else logits.softmax(1).gather(1, at)
    t.given["ids"] = ids
    return _weights(t, (found * options.get("scale", 1.0)).masked_fill(ids < 0, 0))


def load_balancing_loss(t: Told) -> list[Tensor]:
    probabilities = t.given["logits"].softmax(-1)
    if not probabilities.numel():
        return [probabilities.new_zeros(())]
    k = min(t.problem.options.get("k", 2), t.problem.experts)
    chosen = torch.zeros_like(probabilities).scatter(1, glulam.route(t.given["logits"].detach(), k).ids.long(), 1.0)
    return [t.problem.experts * (chosen.mean(0) / k * probabilities.mean(0)).sum()]


def router_z_loss(t: Told) -> list[Tensor]:
    logits = t.given["logits"]
    logits = logits[: int(t.given["num_tokens"])] if "num_tokens" in t.given else logits
    return [logits.logsumexp(-1).square().mean() if logits.shape[0] else logits.new_zeros(())]


FORMULAS: dict[str, Callable[[Told], list[Tensor]]] = {
    "grouped_mm": grouped_mm, "adapted_mm": grouped_mm, "grouped_glu": grouped_glu, "adapted_glu": grouped_glu,
    "grouped_mlp": grouped_mlp, "grouped_dglu": grouped_dglu, "adapted_dglu": grouped_dglu,
    "grouped_wgrad": grouped_wgrad, "grouped_bias_grad": grouped_bias_grad, "moe": moe, "moe_of_choices": moe,
    "permute": permute, "combine": combine, "load_balancing_loss": load_balancing_loss,
    "router_z_loss": router_z_loss, "route": route, "Routing.from_topk": from_topk,
}  # fmt: skip
"""Formulas by function name."""
