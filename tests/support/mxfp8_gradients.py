"""Gradients of a grouped_mlp in MXFP8 by their definition, in float64, and a check of other gradients against them.

Data path: dy in MXFP8 is multiplied by w2 folded along its columns. The gradient of h is stored in 16 bits, quantised
again, and multiplied by w1 folded along its columns. Weight gradients multiply the tensors stored in 16 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import glulam

from . import mxfp8_mlp, oracle
from .inputs import Case

BLOCK = 128
TOLERANCE = {"cpu": 6e-3, "cuda": 1.2e-2}
"""Allowed relative error in norm: root mean square over rows or experts, by device.

Rounding a result to bfloat16 gives 1.7e-3. In addition one in some tens of elements of h's gradient, on tensor cores
one in fewer, rounds to the neighbouring E4M3 number. A missing quantisation, or one along the wrong axis, gives at
least 2.6e-2."""
WORST = 0.3
"""Allowed relative error in norm of a single row or expert."""


def folded(w: Tensor, axis: str) -> Tensor:
    """Return the values [E, N, K] of a weight folded along an axis."""
    return glulam.prepare_mxfp8_weight(w.detach(), axis=axis).dequantize().double().cpu()


def expected(
    c: Case,
    dy: Tensor,
    form: tuple[str, str] = ("swiglu", "concat"),
    params: oracle.Params = oracle.DEFAULTS,
) -> dict[str, Tensor]:
    """Return the expected gradients of all six inputs, on the CPU. Rows after the last group are zero."""
    x, b1, b2, s, dtype = c.x.cpu(), c.b1.cpu(), c.b2.cpu(), torch.nan_to_num(c.row_scale.cpu()), c.x.dtype
    dy = torch.nan_to_num(dy.cpu())
    weights = {(name, axis): folded(getattr(c, name), axis) for name in ("w1", "w2") for axis in ("row", "col")}
    rows = mxfp8_mlp.rounded(torch.nan_to_num(x), BLOCK)
    h = oracle.grouped_mm(rows, weights["w1", "row"], c.ends, bias=b1).to(dtype)
    dh, act, ds = oracle.grouped_dglu(
        mxfp8_mlp.rounded(dy, BLOCK), weights["w2", "col"], h, c.ends, row_scale=s, form=form, params=params
    )
    stored, act = torch.nan_to_num(dh.to(dtype)), torch.nan_to_num(act.to(dtype))
    dx = oracle.grouped_mm(mxfp8_mlp.rounded(stored, BLOCK), weights["w1", "col"], c.ends, transpose_w=True)
    spread = oracle.grouped_mm(dy, b2[:, :, None], c.ends, transpose_w=True)[:, 0]
    return {
        "x": torch.nan_to_num(dx),
        "w1": oracle.grouped_wgrad(stored, torch.nan_to_num(x), c.ends),
        "w2": oracle.grouped_wgrad(dy, act, c.ends),
        "row_scale": torch.nan_to_num(ds + spread),
        "b1": oracle.grouped_bias_grad(stored, c.ends),
        "b2": oracle.grouped_bias_grad(dy, c.ends, row_scale=s),
    }


def check(c: Case, dy: Tensor, got: dict[str, Tensor], *form: Any, **params: Any) -> None:
    """Check every gradient in `got` against its definition: zeros after the last group and for experts without rows."""
    exact = expected(c, dy, *form, **params)
    filled = [e for e, size in enumerate(c.sizes) if size]
    for name, value in got.items():
        wanted, found = exact[name], value.detach().cpu().double()
        assert found.shape == wanted.shape and bool(found.isfinite().all()), name
        if name in ("x", "row_scale"):
            assert not bool(found[c.rows :].any()), f"the tail of {name}"
            wanted, found = wanted[: c.rows], found[: c.rows]
        else:
            assert not any(bool(one.any()) for e, one in enumerate(found) if e not in filled), name
            wanted, found = wanted[filled], found[filled]
        if not c.rows:
            continue
        wanted, found = (v[None] if name == "row_scale" else v.flatten(1) for v in (wanted, found))
        norms = wanted.norm(dim=1)
        assert bool((norms > 0).all()), f"{name}: zeros would pass"
        errors = (found - wanted).norm(dim=1) / norms
        rms, worst, allowed = float(errors.square().mean().sqrt()), float(errors.max()), TOLERANCE[value.device.type]
        assert rms < allowed and worst < WORST, f"{name}: {rms:.2g} in root mean square, {worst:.2g} at most"
