"""An MLP in MXFP8 by the definition of each recipe, in float64, and weights in every format that recipes take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import glulam
from glulam import MXFP4Tensor, MXFP8Tensor
from glulam.formats.mxfp4 import RebasedWeight
from glulam.formats.mxfp8 import FoldedWeight

from . import mxfp4, mxfp8, oracle
from .criterion import FLOOR, MAX_TOLERANCE
from .inputs import Case

X_BLOCK = {
    "mxfp8": 128, "mxfp8_exact": 32, "mxfp8_weight_only": None, "mxfp4": 128, "mxfp4_weight_only": None,
}  # fmt: skip
RECIPES = tuple(X_BLOCK)
WORST_FLIP = 2.0**-4  # relative change of an element that lies between two E4M3 numbers and may round to either
TENSOR_CORE_RMS, TENSOR_CORE_ROW = 6e-3, 0.15
"""Errors that FP8 wgmma adds to a result: in root mean square, and in norm of a single row.

FP8 wgmma errs by 1.3e-4 over 128 products (docs/recipes.md). So one activation in 100 rounds to the other of two
neighbours, 0.09 of itself away. In root mean square that adds 0.1 x 0.09 x 0.3, since a result is mostly 0.3 of its
row's largest; in norm it adds at most 2^-3 to a row that hangs on one activation. A wrong row errs by 1.4.
tests/gpu/test_mxfp8_kernels.py looks closer.
"""


def values(data: Tensor, scales: Tensor) -> Tensor:
    """Return the values, float64, of E4M3 bytes [..., C] with E8M0 bytes [..., ceil(C / 32)]."""
    data, scales = data.cpu().view(torch.uint8).long(), scales.cpu().view(torch.uint8)
    magnitude = torch.cat((mxfp8.MAGNITUDES, torch.tensor([torch.nan], dtype=torch.float64)))[data % 128]
    powers = torch.where(scales == mxfp8.NAN_SCALE, torch.nan, torch.exp2(scales.double() - 127))
    powers = powers.repeat_interleave(mxfp8.BLOCK, dim=-1)[..., : data.shape[-1]]
    return torch.where(data < 128, magnitude, -magnitude) * powers


def rounded(x: Tensor, size: int | None) -> Tensor:
    """Return rows [T, C], float64, rounded as a recipe multiplies them.

    size: number of elements that share a scale; None: rows are not rounded.
    """
    if size is None:
        return x.double().cpu()
    return values(*mxfp8.quantized_rows(x.float().cpu(), size))


def prepared(w: Tensor, recipe: str) -> Any:
    """Return a weight [E, N, K] in the format that a recipe takes."""
    if recipe == "mxfp8":
        return glulam.prepare_mxfp8_weight(w)
    if recipe == "mxfp4":
        return glulam.prepare_mxfp4_weight(w)
    if recipe == "mxfp4_weight_only":
        return glulam.quantize_mxfp4(w)
    flat = glulam.quantize_mxfp8(w.flatten(0, 1))
    return MXFP8Tensor(flat.data.view(w.shape), flat.scale.view(*w.shape[:2], -1))


def weight_values(weight: FoldedWeight | MXFP8Tensor | MXFP4Tensor | RebasedWeight) -> Tensor:
    """Return the values of a quantised weight, float64 [E, N, K]."""
    if isinstance(weight, (MXFP4Tensor, RebasedWeight)):
        return mxfp4.values(weight.data.view(torch.uint8), weight.scale)
    data, scale = weight.data, weight.scale
    if isinstance(weight, FoldedWeight):
        scale = scale.view(torch.uint8)[..., None].expand(*scale.shape, data.shape[-1] // mxfp8.BLOCK)
    return values(data, scale.contiguous())


def expected(
    c: Case, recipe: str, weights: tuple[Any, Any], *, form: tuple[str, str] = ("swiglu", "concat"), b1: Any = None,
    b2: Any = None, row_scale: Tensor | None = None, params: oracle.Params = oracle.DEFAULTS,
    fc2_dtype: torch.dtype = torch.float64,
) -> Tensor:  # fmt: skip
    """Return y [T, H] on the CPU, by the recipe's definition.

    Args:
        fc2_dtype: dtype in which FC2 multiplies the quantised operands: float64, or the dtype of a plain torch user.
    """
    block = X_BLOCK[recipe]
    w1, w2 = (weight_values(w) for w in weights)
    x = rounded(torch.nan_to_num(c.x), block)
    s = None if row_scale is None else torch.nan_to_num(row_scale.cpu())
    b1, b2 = (None if b is None else [one.cpu() for one in b] for b in (b1, b2))
    act, _ = oracle.grouped_glu(x, w1, c.ends, bias=b1, row_scale=s, form=form, params=params)
    mid = rounded(act.nan_to_num(), block)
    return oracle.grouped_mm(mid, w2, c.ends, bias=b2, bias_scale=s, dtype=fc2_dtype)


def check(c: Case, y: Tensor, recipe: str, weights: tuple[Any, Any], **options: Any) -> None:
    """Check y against the recipe's float64 result, row by row, within the error of one GEMM in the same dtype.

    Kernels sum in another order, so a few activations may round to the neighbouring number: such a flip changes one
    term of a sum over I by WORST_FLIP, and three flips in a row of results are allowed. FP8 tensor cores cause more
    flips: TENSOR_CORE_RMS.
    """
    exact, same = (expected(c, recipe, weights, fc2_dtype=dtype, **options) for dtype in (torch.float64, y.dtype))
    assert y.shape == exact.shape
    if not c.rows:
        return
    exact, same, got = (value.cpu().double()[: c.rows] for value in (exact, same, y))
    scale = exact.abs().amax(dim=1, keepdim=True)
    assert bool((scale > 0).all()), "a row of the expected result is zero: a result of zeros would pass"
    error, yardstick, of_zeros = (((one - exact) / scale).abs() for one in (got, same, torch.zeros_like(exact)))
    flips = 0.0 if X_BLOCK[recipe] is None else 3 * WORST_FLIP / weights[1].shape[-1] ** 0.5
    kinds = [("largest", Tensor.max, flips), ("rms", _rms, 0.0)]
    if recipe in ("mxfp8", "mxfp4") and y.is_cuda:
        kinds = [("rms", _rms, TENSOR_CORE_RMS)]
        assert float(((got - exact).norm(dim=1) / exact.norm(dim=1)).max()) < TENSOR_CORE_ROW
    for kind, of, more in kinds:
        allowed = 2 * float(of(yardstick)) + FLOOR + more
        assert allowed < MAX_TOLERANCE * float(of(of_zeros)), f"vacuous: {kind} {allowed:.2g}"
        assert float(of(error)) <= allowed, f"{kind} error {float(of(error)):.3g} above {allowed:.3g}"


def _rms(values: Tensor) -> Tensor:
    return values.square().mean().sqrt()
