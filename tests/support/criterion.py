"""The pass criterion for results: errors against float64, compared with the errors of torch's own arithmetic.

Errors are taken row by row, relative to the largest value of the row, so that a row a thousand times smaller than its
neighbours counts as much. A result passes if both its largest and its root-mean-square error are at most twice the
errors of the same computation by torch in the same dtype, plus FLOOR. On this scale a result of zeros has error 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOOR = 1e-5
MAX_TOLERANCE = 0.1


def _errors(got: Tensor, exact: Tensor, scale: Tensor) -> tuple[float, float]:
    relative = (got.double() - exact).abs() / scale
    return float(relative.max()), float(relative.square().mean().sqrt())


def assert_close(got: Tensor, exact: Tensor, same_dtype: Tensor, rows: int) -> None:
    """Check the first `rows` rows of `got` by the criterion.

    Args:
        got: the result.
        exact: the oracle's result in float64.
        same_dtype: torch's result in got's dtype.
    """
    assert got.shape == exact.shape == same_dtype.shape
    if rows == 0:
        return
    got, exact, same_dtype = got[:rows], exact[:rows], same_dtype[:rows]
    scale = exact.abs().amax(dim=1, keepdim=True)
    assert bool((scale > 0).all()), "a row of the expected result is zero: a result of zeros would pass"
    for kind, error, yardstick, of_zeros in zip(
        ("largest", "rms"),
        _errors(got, exact, scale),
        _errors(same_dtype, exact, scale),
        _errors(torch.zeros_like(got), exact, scale),
        strict=True,
    ):
        tolerance = 2 * yardstick + FLOOR
        assert tolerance < MAX_TOLERANCE * of_zeros, f"vacuous: tolerance {tolerance:.2g}, zeros err by {of_zeros:.2g}"
        assert error <= tolerance, f"{kind} error {error:.3g} above {tolerance:.3g}"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors have equal dtypes, shapes and bits, including NaN payloads and signs of zeros."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(integer), b.view(integer))
