"""Trials of the kernels around a layer's experts: routing, copies of tokens to rows and back, activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from cute_kernels.specs import GATED, GLU_LAYOUTS, UNGATED, LayerSpec

from ..activations import Numbers, packer
from ..layer import Routing, combine, permute, route
from ..layer.few_tokens import MOST_ROUTED, route_few
from ..layer.routing import MOST_SORTED
from ..ops.gate import gate_rows, gate_rows_backward
from .inputs import FULL, Size, randn
from .trial import Given, Trial, gradients

TOP_K = 4
RULES: dict[str, dict[str, Any]] = {
    "softmax": {}, "softmax, not normalised": {"normalize": False}, "softmax of the largest": {"score": "topk_softmax"},
    "sigmoid, groups of experts": {"score": "sigmoid", "num_groups": 4, "top_groups": 2, "scale": 2.5},
}  # fmt: skip
Gate = tuple[str, str, Numbers]
"""An activation as `gate_rows` takes it: its name, its column layout, and the constants of all activations."""
NUMBERS_OF_TRIALS: Numbers = packer("numbers")(limit=1.5, gate_cap=1.5, up_cap=2.0)
CLOSE = 1e-5
"""Tolerance for weights of choices, which are float32."""
assert max(FULL.tokens) * TOP_K > MOST_SORTED


def _tables(made: Routing) -> list[Tensor]:
    """Return offs, row_of, token_of_row and weight_of_row of a routing.

    The last two are cut after the last group's rows, since later entries are undefined.
    """
    end = int(made.offs[-1])
    return [made.offs, made.row_of, made.token_of_row[:end], made.weight_of_row[:end]]


def _chosen(made: Routing) -> list[Tensor]:
    return [made.ids, made.weights, *_tables(made)]


def _logits(tokens: int, experts: int) -> Tensor:
    """Return logits [tokens, experts] for which routers in all dtypes choose the same experts.

    Some logits of a token are equal; the others differ by more than any rounding.
    """
    generator = torch.Generator().manual_seed(tokens)
    order = torch.stack([torch.randperm(experts, generator=generator) for _ in range(tokens)])
    return order.clamp_max(min(experts, 64) - 1) / 8


def _sizes(spec: LayerSpec, size: Size) -> Iterator[tuple[int, int]]:
    """Yield (tokens, experts): each number of tokens with the most experts that the kernel serves, and with fewer."""
    return product(size.tokens, (spec.experts, spec.experts - spec.experts // 4 - 4))


def _ids(tokens: int, experts: int) -> Tensor:
    """Return ids, int32 [tokens, TOP_K]; some are experts of other ranks, or -1 for no expert."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(-1, experts + experts // 4, (tokens, TOP_K), dtype=torch.int32, generator=generator)


def _expert_map(experts: int) -> Tensor:
    """Return an expert map, int32, that places experts in random order.

    A quarter of the ids have -1 or an invalid place. The map is shorter than the largest id that `_ids` returns, so
    that ids outside of the map are tried, too.
    """
    count = experts + experts // 8
    places = torch.randperm(count, generator=torch.Generator().manual_seed(experts))
    return places.where(places % 4 > 0, places % 8 // 4 * (experts + 1) - 1).int()


def _route(options: dict[str, Any], given: Given) -> list[Tensor]:
    return _chosen(route(given["logits"], TOP_K, bias=given.get("bias"), num_tokens=given["num_tokens"], **options))


def routed(spec: LayerSpec, size: Size) -> Iterator[Trial]:
    for tokens, experts in _sizes(spec, size):
        given = {
            "logits": _logits(tokens, experts), "bias": randn(experts, seed=3) / 64,
            "num_tokens": torch.tensor([tokens - tokens // 3], dtype=torch.int32),
        }  # fmt: skip
        for rule, options in RULES.items():
            used = given if "groups" in rule else {name: given[name] for name in ("logits", "num_tokens")}
            what = f"{rule}, {tokens} tokens, {experts} experts"
            yield Trial(what, used, partial(_route, options), tolerance=CLOSE)


def few_tokens(spec: LayerSpec, size: Size) -> Iterator[Trial]:
    """Yield trials of the router for few tokens, which computes the logits x weight^T in the same call.

    Each token is a unit vector, so its logits are exactly a column of the weight.
    """
    dtype: torch.dtype = getattr(torch, spec.dtype)

    def call(given: Given) -> list[Tensor]:
        made = route_few(given["x"], given["weight"], None, TOP_K, torch.float32)
        assert made.logits is not None
        return [*_chosen(made), made.logits]

    for tokens in (1, 5, MOST_ROUTED):
        experts = spec.experts - 4
        x = torch.zeros(tokens, 2 * size.row_width)
        x[:, :tokens] = torch.eye(tokens)
        weight = torch.zeros(experts, 2 * size.row_width)
        weight[:, :tokens] = _logits(tokens, experts).mT
        yield Trial(f"{tokens} tokens, {experts} experts", {"x": x.to(dtype), "weight": weight.to(dtype)}, call)


def sorted_choices(spec: LayerSpec, size: Size) -> Iterator[Trial]:
    for tokens, experts in _sizes(spec, size):
        for dtype in (torch.int32, torch.int64):
            given = {"ids": _ids(tokens, experts).to(dtype), "weights": randn(tokens, TOP_K, seed=4)}

            def call(given: Given, experts: int = experts) -> list[Tensor]:
                return _tables(Routing.from_topk(given["ids"], given["weights"], experts, first=3))

            yield Trial(f"{tokens} tokens, {experts} experts, {dtype}", given, call, tolerance=CLOSE)

            def mapped(given: Given, experts: int = experts) -> list[Tensor]:
                routing = Routing.from_topk(given["ids"], given["weights"], experts, expert_map=given["expert_map"])
                return _tables(routing)

            given = {**given, "expert_map": _expert_map(experts)}
            yield Trial(f"{tokens} tokens, a map to {experts} experts, {dtype}", given, mapped, tolerance=CLOSE)


def _with_routing(function: Callable[..., Any]) -> Callable[[Given], list[Tensor]]:
    """Return a call of `function` with a routing made from the given ids and weights, and the other arguments."""

    def call(given: Given) -> list[Tensor]:
        others = {name: value for name, value in given.items() if name not in ("ids", "weights")}
        made: list[Tensor] = function(Routing.from_topk(given["ids"], given["weights"], 32), **others)
        return made

    return call


def rows(spec: LayerSpec, size: Size) -> Iterator[Trial]:
    """Yield trials of `permute` or `combine`."""
    dtype: torch.dtype = getattr(torch, spec.dtype)

    def permuted(routing: Routing, x: Tensor) -> list[Tensor]:
        return [permute(x, routing)[: int(routing.offs[-1])]]

    def combined(routing: Routing, y: Tensor, residual: Tensor | None = None) -> list[Tensor]:
        return [combine(y, routing, residual)]

    for tokens in size.tokens:
        choices = {"ids": _ids(tokens, 32), "weights": randn(tokens, TOP_K, seed=4)}
        if spec.kernel == "permute":
            x = randn(tokens, size.row_width, seed=5, dtype=dtype)
            yield Trial(f"{tokens} tokens", {**choices, "x": x}, _with_routing(permuted))
            continue
        y = randn(tokens * TOP_K, size.row_width, seed=6, dtype=dtype)
        residual = randn(tokens, size.row_width, seed=7, dtype=dtype)
        yield Trial(f"{tokens} tokens", {**choices, "y": y}, _with_routing(combined))
        yield Trial(
            f"{tokens} tokens and a residual", {**choices, "y": y, "residual": residual}, _with_routing(combined)
        )


def gates(spec: LayerSpec, size: Size) -> Iterator[Trial]:
    """Yield trials of the kernel of activations alone, or of its backward, for every activation and layout."""
    dtype = getattr(torch, spec.dtype)
    forms = [*product(GATED, GLU_LAYOUTS), *((name, "concat") for name in UNGATED)]
    for number, (activation, layout) in enumerate(forms):
        tokens, width = size.tokens[number % len(size.tokens)], 32 * (1 + number % 3)
        gate = activation, layout, NUMBERS_OF_TRIALS
        columns = width * (2 if activation in GATED else 1)
        given = {
            "preact": randn(tokens, columns, seed=number, dtype=dtype), "scale": randn(tokens, seed=2).exp(),
            "d_act": randn(tokens, width, seed=3, dtype=dtype),
        }  # fmt: skip
        for scaled in (True, False):
            call = partial(_GATES[spec.kernel], gate, scaled)
            yield Trial(f"{activation}, {layout}, {'with' if scaled else 'without'} scales", given, call)


def _gate(gate: Gate, scaled: bool, given: Given) -> list[Tensor]:
    return [gate_rows(given["preact"], given["scale"] if scaled else None, *gate)]


def _gate_backward(gate: Gate, scaled: bool, given: Given) -> list[Tensor]:
    scale = given["scale"] if scaled else None
    made = gate_rows_backward(given["d_act"], given["preact"], scale, *gate, of_row_scale=scaled)
    return list(made) if scaled else [made[0]]


_GATES: dict[str, Callable[[Gate, bool, Given], list[Tensor]]] = {
    "gate": _gate,
    "gate_backward": _gate_backward,
}


def route_gradient(spec: LayerSpec, size: Size) -> Iterator[Trial]:
    def call(options: dict[str, Any], given: Given) -> list[Tensor]:
        return gradients(
            lambda logits: route(logits, TOP_K, **options).weights, [given["logits"]], lambda *_: given["upstream"]
        )

    for tokens in size.tokens:
        given = {"logits": randn(tokens, 96, seed=8), "upstream": randn(tokens, TOP_K, seed=9)}
        for rule, options in RULES.items():
            yield Trial(f"{rule}, {tokens} tokens", given, partial(call, options), tolerance=1e-4)


def row_weights_gradient(spec: LayerSpec, size: Size) -> Iterator[Trial]:
    def call(given: Given) -> list[Tensor]:
        def row_weights(weights: Tensor) -> Tensor:
            return Routing.from_topk(given["ids"], weights, 32).weight_of_row

        return gradients(row_weights, [given["weights"]], lambda *_: given["upstream"])

    for tokens in size.tokens:
        given = {"ids": _ids(tokens, 32), "weights": randn(tokens, TOP_K, seed=4)}
        yield Trial(f"{tokens} tokens", {**given, "upstream": randn(tokens * TOP_K, seed=9)}, call, tolerance=CLOSE)
