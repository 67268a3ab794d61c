"""Judge a result by its errors against float64: they may be about twice the errors of torch in the result's dtype.

Errors are relative to the largest value of their row, so that a row a thousand times smaller than its neighbours counts
as much. The largest error and the root-mean-square error may each be at most twice that of the CPU reference in the
same dtype, which rounds each result once, plus FLOOR. On this scale the largest error of a result of zeros is 1.
Integers and bytes of quantised tensors must be equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALLOWED = 2.0
FLOOR = 1e-5
MOST_TOLERANCE = 0.1
"""Largest limit, as a share of the error that a result of zeros has.

With a larger limit a comparison proves nothing.
"""


def complaint(got: Tensor, exact: Tensor, rounded: Tensor, tolerance: float | None = None) -> str:
    """Describe what is wrong with a result; empty if the result is right.

    Args:
        got: the kernel's result, on the CPU.
        exact: the reference in float64.
        rounded: the reference in `got`'s dtype.
        tolerance: limit of the largest error, relative to the largest value of the result. None: the rule above.
    """
    if got.shape != rounded.shape or got.dtype != rounded.dtype:
        return f"it is {got.dtype} {list(got.shape)}, not {rounded.dtype} {list(rounded.shape)}"
    if got.numel() == 0:
        return ""
    if not got.is_floating_point() or got.itemsize == 1:
        return _differing(got.contiguous().view(torch.uint8), rounded.contiguous().view(torch.uint8))
    got, exact, rounded = got.double(), exact.double(), rounded.double()
    if not got.isfinite().equal(exact.isfinite()):
        return f"{int((~got.isfinite()).sum())} of its {got.numel()} values are not finite"
    if tolerance is not None:
        return _far_off(got, exact, exact.abs().max(), tolerance)
    return _by_rows(*(values.reshape(-1, values.shape[-1] if values.dim() else 1) for values in (got, exact, rounded)))


def _differing(got: Tensor, wanted: Tensor) -> str:
    count = int((got != wanted).sum())
    return f"{count} of its {got.numel()} bytes differ" if count else ""


def _far_off(got: Tensor, exact: Tensor, scale: Tensor, tolerance: float) -> str:
    error = float((got - exact).abs().max() / scale.clamp_min(torch.finfo(torch.float32).tiny))
    return f"its largest error is {error:.2g} of its largest value, {tolerance:.2g} are allowed" * (error > tolerance)


def _by_rows(got: Tensor, exact: Tensor, rounded: Tensor) -> str:
    scale = exact.abs().amax(dim=1, keepdim=True)
    is_zero = scale == 0
    if bool((got * is_zero).any()):
        return "rows of it that should be zeros are not"
    scale = scale.masked_fill(is_zero, 1.0)
    errors, yardsticks, of_zeros = (
        ((values - exact) / scale).abs() for values in (got, rounded, torch.zeros_like(got))
    )
    for kind, of in (("largest", torch.max), ("root mean square", lambda values: values.square().mean().sqrt())):
        error, limit = float(of(errors)), ALLOWED * float(of(yardsticks)) + FLOOR
        if float(of(of_zeros)) and limit >= MOST_TOLERANCE * float(of(of_zeros)):
            return f"{limit:.2g} of a row's largest value are allowed, by which nothing is decided"
        if error > limit:
            return f"its {kind} error is {error:.2g} of its row's largest value, {limit:.2g} are allowed"
    return ""
