"""Checks of all six gradients of a grouped_mlp against the oracle, which torch differentiates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import oracle
from .criterion import assert_close
from .inputs import Case

F64 = torch.float64
INPUTS = ("x", "w1", "w2", "row_scale", "b1", "b2")


def inputs(c: Case) -> dict[str, Tensor]:
    return {**{name: getattr(c, name) for name in INPUTS}, "row_scale": c.row_scale.to(c.x.dtype)}


def leaves(c: Case, wanted: tuple[str, ...] = INPUTS) -> dict[str, Tensor]:
    """Return new input tensors of a grouped_mlp; those in `wanted` require a gradient."""
    scale = c.row_scale.double() if c.x.dtype == F64 else c.row_scale
    values = {**inputs(c), "row_scale": scale}
    return {name: value.detach().clone().requires_grad_(name in wanted) for name, value in values.items()}


def grads(given: dict[str, Any]) -> dict[str, Tensor]:
    """Return the gradients of the tensors that have one, by the tensors' names."""
    return {name: value.grad for name, value in given.items() if value.grad is not None}


def transposed_leaves(c: Case, wanted: tuple[str, ...] = INPUTS) -> dict[str, Tensor]:
    """Return `leaves` with transposed weights, [E, H, 2I or I] and [E, I, H]."""
    given = leaves(c, wanted)
    for name in ("w1", "w2"):
        given[name] = given[name].detach().mT.contiguous().requires_grad_(name in wanted)
    return given


def transposed_back(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Transpose the weights' gradients of `transposed_leaves` back to the layout that `check_gradients` expects."""
    return {name: value.mT if name in ("w1", "w2") else value for name, value in gradients.items()}


def check_gradients(c: Case, dy: Tensor, got: dict[str, Tensor], form: tuple[str, str] = ("swiglu", "concat")) -> None:
    """Check gradients by the criterion, against float64 and against torch in x's dtype."""
    if not c.rows:
        assert not any(bool(value.any()) for value in got.values())
        return
    exact, same = (oracle_gradients(c, dy, dtype, form) for dtype in (F64, c.x.dtype))
    filled = [e for e, size in enumerate(c.sizes) if size]
    for name in ("w1", "w2", "b1", "b2"):
        triple = [value[name][filled].flatten(1) for value in (got, exact, same)]
        assert_close(*triple, rows=triple[0].shape[0])
        assert not any(bool(one.any()) for e, one in enumerate(got[name]) if e not in filled), name
    assert_close(got["x"], exact["x"], same["x"], c.rows)
    assert not bool(got["x"][c.rows :].any()) and not bool(got["row_scale"][c.rows :].any()), "the tail"
    scales = [value["row_scale"][None, : c.rows] for value in (got, exact, same)]
    assert_close(*scales, rows=1)


def oracle_gradients(c: Case, dy: Tensor, dtype: torch.dtype, form: tuple[str, str]) -> dict[str, Tensor]:
    given = {name: value[: c.rows] if name in ("x", "row_scale") else value for name, value in inputs(c).items()}
    given = {name: value.to(dtype).detach().requires_grad_() for name, value in given.items()}
    with torch.enable_grad():
        y = _mlp(given, c, form, dtype)
    found = torch.autograd.grad(y, list(given.values()), dy[: c.rows].to(dtype))
    result = dict(zip(given, found, strict=True))
    for name in ("x", "row_scale"):
        pad = torch.zeros(c.x.shape[0] - c.rows, *result[name].shape[1:], dtype=dtype, device=c.x.device)
        result[name] = torch.cat((result[name], pad))
    return result


def _mlp(given: dict[str, Tensor], c: Case, form: tuple[str, str], dtype: torch.dtype) -> Tensor:
    """Compute the MLP with h replaced by the 16-bit preactivation that a forward saves.

    All computations must use the same rounded h: derivatives jump at clamps and at relu's kink, and rounding decides on
    which side a value lies.
    """
    h = oracle.grouped_mm(given["x"], given["w1"], c.ends, bias=given["b1"], dtype=dtype)
    with torch.no_grad():
        saved = oracle.grouped_mm(c.x[: c.rows], c.w1, c.ends, bias=c.b1).to(c.x.dtype).to(dtype)
    h = h + (saved - h).detach()
    formula = oracle.activation if dtype == F64 else oracle.torch_activation
    act = formula(h, *form) * given["row_scale"][:, None]
    return oracle.grouped_mm(act, given["w2"], c.ends, bias=given["b2"], bias_scale=given["row_scale"], dtype=dtype)
