"""When a result is right: close to float64, row by row, compared with what torch's own arithmetic achieves.

Errors are relative to the largest value of their row, so that a row a thousand times smaller than its neighbours
counts as much. A result passes when both its largest and its root-mean-square error are at most twice those of the
same computation by torch in the same dtype, plus FLOOR. On this scale a result of zeros errs by 1.
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
    """`got` against the oracle's `exact` float64 and the same by torch in got's dtype, over the first `rows` rows."""
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
    """Equal, NaN for NaN and sign for sign."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(integer), b.view(integer))
