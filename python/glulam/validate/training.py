"""Trials of training in MXFP8: a training step's forward, its data gradients, and the kernels that prepare weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cute_kernels.specs import GroupedDgluSpec, is_gated

from ..ops.grouped_mlp import grouped_mlp
from .inputs import UNREACHED, Routing, rows_of, total_rows, weights_of
from .trial import Given, Trial, gradients

TOLERANCE = 5e-2
"""Tolerance of results that were rounded to MXFP8 twice: a value between two numbers may become either."""
Formed = Iterable[tuple[tuple[str, str], tuple[Routing, int, int]]]
"""Pairs of (activation, gate layout) and (groups, H, I)."""


def steps(spec: Any, recipe: str, formed: Formed) -> Iterator[Trial]:
    """Yield trials of a training step of grouped_mlp. Each compares the step's result and its gradients.

    The compared gradient is that of x. For a grouped_dglu that does not compute dx, it is that of the weights.

    Args:
        spec: the spec of the function that is tried.
        recipe: the recipe's name.
        formed: pairs of (activation, gate layout) and (groups, H, I).
    """
    of_weights = isinstance(spec, GroupedDgluSpec) and not spec.dgrad
    dtype: torch.dtype = getattr(torch, spec.dtype)
    of_rows = torch.bfloat16 if dtype == torch.float32 else dtype  # float32 are master weights
    for (activation, layout), (routing, hidden, inter) in formed:
        if routing.rows < 2:
            continue
        total, experts = total_rows(routing), len(routing.sizes)
        given = {
            "x": rows_of(total, hidden, of_rows, routing.rows), "offs": routing.offs,
            "w1": weights_of(experts, inter * (1 + is_gated(activation)), hidden, dtype, seed=2),
            "w2": weights_of(experts, hidden, inter, dtype, seed=3),
            "dy": rows_of(total, hidden, of_rows, routing.rows, seed=5),
        }  # fmt: skip
        options = {"activation": activation, "glu_layout": layout, "recipe": recipe}
        yield Trial(
            f"training, {activation}, {layout}, {routing.name}", given, partial(_step, options, of_weights),
            (routing.rows, total), tolerance=TOLERANCE,
        )  # fmt: skip


def _step(options: dict[str, Any], of_weights: bool, given: Given) -> list[Tensor]:
    """Return the gradients of a training step (of the weights if `of_weights`, else of x), then its result."""
    leaves, fixed = (("w1", "w2"), ("x", "offs")) if of_weights else (("x",), ("w1", "w2", "offs"))
    given = {name: _no_float64(value) for name, value in given.items()}
    others: dict[str, Any] = {**{name: given[name] for name in fixed}, **options}
    mlp: Any = partial(grouped_mlp, **others, limit=UNREACHED)
    results: list[Tensor] = []

    def kept(*tensors: Tensor) -> Tensor:
        results.append(mlp(**dict(zip(leaves, tensors, strict=True))))
        return results[-1]

    made = gradients(kept, [given[name] for name in leaves], lambda *_: given["dy"])
    return [*made, results[0].detach()]


def _no_float64(value: Tensor) -> Tensor:
    """Convert float64 to float32, the widest dtype for training in MXFP8.

    Sums of E4M3 products of these sizes are almost exact in float32.
    """
    return value.float() if value.dtype == torch.float64 else value
