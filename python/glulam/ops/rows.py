"""Rows by index, where no kernel reads them so."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..signature import check_indices


def take_rows(op: str, x: Any, rows: Tensor) -> Tensor:
    """x[rows], with indices clamped: those behind the last group may be anything.

    Raises:
        TypeError: x is no tensor, as an MXFP8Tensor is not, or rows are not int32.
        ValueError: rows do not fit.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: x is a {type(x).__name__}, and rows= takes it in 16 bits; give x.dequantize()")
    check_indices(op, rows, x)
    return x.index_select(0, rows.clamp(0, max(x.shape[0] - 1, 0)))
