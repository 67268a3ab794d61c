"""Trials of what `glulam validate` leaves to functions that launch it: training in MXFP8."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cute_kernels.specs import (
    ACTIVATION_FORMS,
    LAYOUT_FORMS,
    FoldMxfp8Spec,
    GroupedDgluSpec,
    GroupedMlpSpec,
    Spec,
    is_gated,
)
from glulam import grouped_mlp
from glulam.validate.catalogue import trials_of
from glulam.validate.grouped import UNREACHED
from glulam.validate.inputs import Size, routings, rows_of, total_rows, weights_of
from glulam.validate.trial import Given, Trial, gradients

MXFP8, MXFP8_BLOCKS = "mxfp8", "mxfp8_blocks"
"""Operands. A GPU that multiplies by scales takes the latter for recipe "mxfp8"."""
TOLERANCE = 5e-2
"""Tolerance of results that were rounded to MXFP8 twice: a value between two numbers may become either."""


def all_trials_of(spec: Spec, size: Size) -> Iterator[Trial]:
    """The trials that the product has for a function, else those from here."""
    found = False
    for trial in trials_of(spec, size):
        found = True
        yield trial
    if not found:
        yield from _more(spec, size)


def _more(spec: Spec, size: Size) -> Iterator[Trial]:
    if isinstance(spec, GroupedMlpSpec) and spec.fc1.operands in (MXFP8, MXFP8_BLOCKS):
        yield from _training(spec, size, (spec.fc1.activation, spec.fc1.glu_layout))
    elif isinstance(spec, GroupedDgluSpec) and spec.operands in (MXFP8, MXFP8_BLOCKS):
        yield from _training(spec, size, (spec.activation, spec.glu_layout))
    elif isinstance(spec, FoldMxfp8Spec):
        yield from _training(spec, size, ("swiglu", "concat"))


def _training(spec: Any, size: Size, form: tuple[str, str]) -> Iterator[Trial]:
    """Result, and the gradient of x, or of the weights alone where no data gradient follows."""
    of_weights = isinstance(spec, GroupedDgluSpec) and not spec.dgrad
    leaves, fixed = (("w1", "w2"), ("x", "offs")) if of_weights else (("x",), ("w1", "w2", "offs"))
    dtype: torch.dtype = getattr(torch, spec.dtype)
    of_rows = torch.bfloat16 if dtype == torch.float32 else dtype  # float32 are master weights
    activation, layout = _member(form)

    def call(given: Given) -> list[Tensor]:
        given = {name: _no_float64(value) for name, value in given.items()}
        others = {name: given[name] for name in fixed}
        mlp = partial(grouped_mlp, **others, activation=activation, glu_layout=layout, recipe=MXFP8, limit=UNREACHED)
        results: list[Tensor] = []

        def kept(*tensors: Tensor) -> Tensor:
            results.append(mlp(**dict(zip(leaves, tensors, strict=True))))
            return results[-1]

        made = gradients(kept, [given[name] for name in leaves], lambda *_: given["dy"])
        return [*made, results[0].detach()]

    for routing in routings(size):
        if routing.rows < 2:
            continue
        total, experts = total_rows(routing), len(routing.sizes)
        hidden, inter = size.in_blocks, size.inter
        given = {
            "x": rows_of(total, hidden, of_rows, routing.rows), "offs": routing.offs,
            "w1": weights_of(experts, inter * (1 + is_gated(activation)), hidden, dtype, seed=2),
            "w2": weights_of(experts, hidden, inter, dtype, seed=3),
            "dy": rows_of(total, hidden, of_rows, routing.rows, seed=5),
        }  # fmt: skip
        yield Trial(
            f"training, {activation}, {layout}, {routing.name}", given, call, (routing.rows, total),
            tolerance=TOLERANCE,
        )  # fmt: skip


def _no_float64(value: Tensor) -> Tensor:
    """MXFP8 is trained in float32 at most, which holds sums of E4M3's products of these sizes almost exactly."""
    return value.float() if value.dtype == torch.float64 else value


def _member(form: tuple[str, str]) -> tuple[str, str]:
    activation = ACTIVATION_FORMS[form[0]][0]
    return activation, LAYOUT_FORMS[form[1]][0] if is_gated(activation) else "concat"
