"""Adapters of experts, and expected results of calls with them.

In float64 the adapters are merged into the weights; in torch's own dtype the low-rank products are separate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import glulam

from . import oracle
from .criterion import assert_close
from .inputs import Case, experts

SCALE = 0.5
MATRICES = ("a1", "b1", "a2", "b2")
BY_ROW = ("x", "row_scale")
Leaves = dict[str, Tensor]


def matrices(c: Case, rank: int, layers: str = "12") -> Leaves:
    """Return adapter matrices for the layers in `layers` ("1", "2" or "12"); experts differ in scale."""
    count, rows, hidden = c.w1.shape
    out, width = c.w2.shape[1:]
    shapes = {"a1": (rank, hidden), "b1": (rows, rank), "a2": (rank, width), "b2": (out, rank)}
    named = {name: shape for name, shape in shapes.items() if name[1] in layers}
    device = str(c.x.device)
    return {
        name: experts(count, *shape, c.x.dtype, device, seed=20 + place)
        for place, (name, shape) in enumerate(named.items())
    }


def adapter(given: Leaves) -> glulam.ExpertLora:
    return glulam.ExpertLora(*[given.get(name) for name in MATRICES], SCALE)


def trained(c: Case, rank: int, layers: str = "12", addends: tuple[str, ...] = ("b1", "b2", "row_scale")) -> Leaves:
    """Return leaves that require gradients: x, the adapter matrices and the addends.

    Biases are named bias1 and bias2, since b1 and b2 are adapter matrices.
    """
    scale = c.row_scale.to(torch.promote_types(c.x.dtype, torch.float32))
    found = {"x": c.x, **matrices(c, rank, layers)}
    found.update({f"bias{name[1]}" if name != "row_scale" else name: getattr(c, name) for name in addends})
    return {
        name: (scale if name == "row_scale" else value).detach().clone().requires_grad_()
        for name, value in found.items()
    }


def call(c: Case, given: Leaves, w1: Any, w2: Any, form: tuple[str, str] = ("swiglu", "concat"), **options: Any) -> Any:
    return glulam.grouped_mlp(
        given["x"], w1, w2, offs=c.offs, row_scale=given.get("row_scale"), b1=given.get("bias1"),
        b2=given.get("bias2"), activation=form[0], glu_layout=form[1], lora=adapter(given), **options,
    )  # fmt: skip


def _added(given: Leaves, layer: int, w: Tensor) -> Tensor:
    return w + SCALE * given[f"b{layer}"] @ given[f"a{layer}"] if f"a{layer}" in given else w


def merged(c: Case, given: Leaves, w1: Tensor, w2: Tensor, form: tuple[str, str]) -> Tensor:
    """Compute the MLP with the adapters added to the weights."""
    return oracle.grouped_mlp(
        given["x"], _added(given, 1, w1), _added(given, 2, w2), c.ends, b1=given.get("bias1"), b2=given.get("bias2"),
        row_scale=given.get("row_scale"), form=form, dtype=given["x"].dtype,
    )  # fmt: skip


def apart(c: Case, given: Leaves, w1: Tensor, w2: Tensor, form: tuple[str, str]) -> Tensor:
    """Compute the MLP with separate low-rank products, as in plain torch."""
    dtype = given["x"].dtype

    def narrow(x: Tensor, layer: int) -> Tensor | float:
        if f"a{layer}" not in given:
            return 0.0
        product = SCALE * oracle.grouped_mm(x, given[f"a{layer}"], c.ends, dtype=dtype)
        return oracle.grouped_mm(product, given[f"b{layer}"], c.ends, dtype=dtype)

    h = oracle.grouped_mm(given["x"], w1, c.ends, bias=given.get("bias1"), dtype=dtype) + narrow(given["x"], 1)
    act, scale = oracle.torch_activation(h, *form), given.get("row_scale")
    act = act if scale is None else act * scale[:, None].to(dtype)
    y = oracle.grouped_mm(act, w2, c.ends, bias=given.get("bias2"), bias_scale=scale, dtype=dtype)
    return y + narrow(act, 2)


def expected(
    formula: Any, c: Case, leaves: Leaves, w1: Tensor, w2: Tensor, form: tuple[str, str], dy: Tensor, dtype: Any
) -> tuple[Tensor, Leaves]:  # fmt: skip
    """Return the result for the rows in groups, and the gradients of all leaves, computed in `dtype`.

    Args:
        formula: `merged` or `apart`.
        dy: the incoming gradient.
    """
    cut = {name: one.detach()[: c.rows] if name in BY_ROW else one.detach() for name, one in leaves.items()}
    given = {name: one.to(dtype).requires_grad_() for name, one in cut.items()}
    with torch.enable_grad():
        y = formula(c, given, w1.to(dtype), w2.to(dtype), form)
        found = torch.autograd.grad(y, list(given.values()), dy[: c.rows].to(dtype))
    return y.detach(), dict(zip(given, found, strict=True))


def check(
    c: Case, leaves: Leaves, y: Tensor, dy: Tensor, w1: Tensor, w2: Tensor,
    form: tuple[str, str] = ("swiglu", "concat"),
) -> None:  # fmt: skip
    """Check y and the gradients in `leaves` by the criterion.

    Args:
        w1, w2: weights [E, N, K], exact in x's dtype.
    """
    exact = expected(merged, c, leaves, w1, w2, form, dy, torch.float64)
    same = expected(apart, c, leaves, w1, w2, form, dy, c.x.dtype)
    assert_close(y.detach()[: c.rows], exact[0], same[0], c.rows)
    filled = [expert for expert, size in enumerate(c.sizes) if size]
    for name, leaf in leaves.items():
        got = leaf.grad
        assert got is not None and got.dtype == leaf.dtype, name
        if name in BY_ROW:
            assert not bool(got[c.rows :].any()), f"the tail of {name}"
            got = got[: c.rows]
        else:
            assert not bool(got[[e for e, size in enumerate(c.sizes) if not size]].any()), f"an empty group of {name}"
        parts = [got, exact[1][name], same[1][name]]
        if name == "row_scale":
            parts = [one[None] for one in parts]
        elif name not in BY_ROW:
            parts = [one[filled].flatten(1) for one in parts]
        assert_close(*parts, rows=len(parts[0]))
