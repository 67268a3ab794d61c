"""A problem's calls on random tensors, and the arguments that these calls pass to the exported functions.

What is timed is a step: one call of the operator, or for the weight gradients of an MLP two calls, one for each
weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..activations import DEFAULTS
from ..calls.call import Call
from ..calls.launch import Bare, launch_nothing
from ..choose.kernels import Fixed
from ..choose.problem import Problem
from ..choose.shipped import shipped_choice
from ..formats.prepared import prepare
from ..formats.scaled import Parts
from ..host import device as gpus
from ..ops.grouped_dglu import GroupedDgluCall
from ..ops.grouped_glu import GroupedGluCall
from ..ops.grouped_mlp import GroupedMlpCall
from ..ops.grouped_mm import GroupedMmCall
from ..ops.mlp_training import GradientsCall, WeightGradientCall, forward_kind
from ..ops.quantized_mlp import QuantizedMlpCall
from ..ops.quantized_weights import FORMS
from ..recipes import BF16, RECIPES, of_weight_gradients

Random = Callable[..., Tensor]
"""Function (*shape, scale=1.0) -> normal random numbers of the problem's dtype, with standard deviation `scale`."""


def call_with(kind: Any, **given: Any) -> Any:
    """Return a call of class `kind` with these arguments, and usual values for all others."""
    flags = {"accumulate": False, "row_scale_grad": True}
    usual = {"numbers": DEFAULTS, "activation": "swiglu", "glu_layout": "concat", **flags}
    return kind(**{**dict.fromkeys(kind.names), **usual, **given})


def _step(p: Problem) -> tuple[Any, list[dict[str, Any]]]:
    """Return the class of a step's calls, and for each call the sizes of its tensors by argument name.

    A size is an int n for a matrix [T, n], None for a vector [T] (one factor a row), or (N, K) for a weight [E, N, K],
    in the layout of forward.
    """
    w1, w2 = (p.w1_rows, p.in_features), (p.out_features, p.intermediate)
    if p.op == "grouped_wgrad":
        return WeightGradientCall, [{"dy": n, "x": k} for n, k in p.weights]
    if p.op == "grouped_dglu":
        given = {"dy": p.in_features, "preact": p.w1_rows, "row_scale": None, "w2": (p.in_features, p.intermediate)}
        if not p.out_features:
            return GroupedDgluCall, [given]
        return GradientsCall, [{**given, "w1": (p.w1_rows, p.out_features)}]
    if p.operands != "16bit":
        return QuantizedMlpCall, [{"x": p.in_features, "w1": w1, "w2": w2}]
    if p.op == "grouped_mlp":
        kind = forward_kind(GroupedMlpCall) if p.save_preact else GroupedMlpCall
        return kind, [{"x": p.in_features, "w1": w1, "w2": w2}]
    if p.op == "grouped_glu":
        return GroupedGluCall, [{"x": p.in_features, "w1": w1}]
    return GroupedMmCall, [{"x": p.in_features, "w": (p.out_features, p.in_features)}]


def calls_of(problem: Problem, random: Random, offs: Tensor) -> list[Call]:
    """Return the calls that make a step, on random tensors scaled so that results have scale 1.

    Args:
        random: function that makes a tensor of normal random numbers (`Random`).
        offs: int32 [E], the end of each group of rows.
    """
    p, (kind, step) = problem, _step(problem)

    def made(size: Any) -> Tensor:
        if size is None:
            return random(p.rows).float().abs().clamp(0.1, 1.0)
        if isinstance(size, int):
            return random(p.rows, size)
        n, k = size
        contracted = n if p.op == "grouped_dglu" else k
        return random(p.experts, *((k, n) if p.transpose_w else (n, k)), scale=contracted**-0.5)

    options = {
        "activation": p.activation, "glu_layout": p.glu_layout, "transpose_w": p.transpose_w, "offs": offs,
        "return_preact": p.save_preact, "input_grad": bool(p.out_features),
        "out_dtype": getattr(torch, p.out_dtype, None),
        "recipe": of_weight_gradients(p.operands) if p.op == "grouped_wgrad" else BF16.name,
    }  # fmt: skip
    calls = []
    for sizes in step:
        given = {name: made(size) for name, size in sizes.items()}
        if kind is QuantizedMlpCall:
            recipe = next(name for name, recipe in RECIPES.items() if recipe.operands == p.operands)
            for name in ("w1", "w2"):
                parts: tuple[Any, ...] = prepare(FORMS[recipe], Parts(given[name]), report=False)
                given.update(dict(zip(kind.parts_of(name), parts, strict=False)))
            options["recipe"] = recipe
        calls.append(call_with(kind, **options, **given))
    return calls


def launches_of(problem: Problem, gpu: gpus.Gpu, device: torch.device | str, seed: int = 0) -> list[Bare]:
    """Return the launches of a step on one set of tensors; the groups are set later by `of_rows`.

    Args:
        device: "meta": shapes only, nothing is allocated.
        seed: seed of the random numbers.
    """
    generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        made = torch.empty(shape, dtype=getattr(torch, problem.dtype), device=device)
        return made.normal_(0.0, scale, generator=generator)

    offs = torch.zeros(problem.experts, dtype=torch.int32, device=device)
    serving = Fixed(shipped_choice(problem, gpu.arch).spec, launch_nothing)
    return [call.bare(problem, serving, gpu) for call in calls_of(problem, random, offs)]


def num_bytes(problem: Problem, gpu: gpus.Gpu) -> int:
    """Return about how many bytes one set of a step's tensors takes."""
    made = launches_of(problem, gpu, "meta")
    return sum(tensor.nbytes for bare in made for tensor in (*bare.memory, *bare.results))


def of_rows(bare: Bare, rows: int, offs: Tensor) -> tuple[Any, ...]:
    """Return the arguments of a launch for only the first `rows` rows, in groups that end at `offs`."""

    def part(name: str, shape: tuple[str, ...], value: Any) -> Any:
        if name == "groups":
            return offs.data_ptr()
        return value[:rows] if shape[:1] in (("T",), ("R",)) else value

    return tuple(part(a.name, a.shape, value) for a, value in zip(bare.arguments, bare.values, strict=True))
