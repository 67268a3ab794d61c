"""grouped_bias_grad: the sum of dy over each expert's rows, computed by the kernel of the weight gradient.

A weight gradient against a matrix of ones is exact in float32, deterministic, limited to the groups' rows, and reads dy
once. The alternatives in torch are worse: segment sums through index_add are not deterministic; a one-hot matmul reads
the rows after the last group (0 * NaN) and costs E times the FLOP; differences of a cumulative sum cancel.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..calls.checks import check_alignment, check_out_dtype, check_plain, check_x, refuse_gradients, runs_kernels
from ..calls.group_checks import check_indices, check_scale, count_groups
from ..errors import ARGUMENT_ERRORS
from ..host import groups
from ..host.groups import Splits, part_of
from .grouped_wgrad import grouped_wgrad

OP = "grouped_bias_grad"
groups.declare(OP, leads="dy", after_groups=groups.REACH_NO_RESULT)
COLUMNS = 8
"""Columns of the matrix of ones: the fewest that a kernel accepts."""


def grouped_bias_grad(
    dy: Tensor,
    *,
    offs: Tensor | None = None,
    splits: Splits | None = None,
    rows: Tensor | None = None,
    row_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute the gradient of the bias in y = ... + s b_e: for each expert, the sum of s dy over its rows.

    Rows after the last group do not affect any result. The sums are in float32, deterministic, and rounded once.

    Args:
        dy: [T, N], bfloat16 or float16; on the CPU also float32 or float64. N is a multiple of 8 on a GPU.
        offs, splits: group sizes as in the forward, see `grouped_mm`; their length is E.
        rows: int32 [T]: row t is dy[rows[t]], as in `grouped_wgrad`; dy then has any number of rows. None: rows of dy
            lie in order.
        row_scale: float32 [T], the factor s of each row. None: 1.
        out_dtype: dtype of the result: dy's dtype, or float32 if dy is 16-bit. None: dy's dtype.

    Returns:
        [E, N]; zeros for an expert without rows.

    Raises:
        The errors of `grouped_wgrad`.
    """
    if torch.is_grad_enabled():
        refuse_gradients(OP, dy=dy, row_scale=row_scale)
    try:
        check_out_dtype(OP, out_dtype, dy)
        sum_dtype = torch.float32 if dy.dtype.itemsize == 2 else dy.dtype
        with nullcontext() if is_dynamo_compiling() else part_of(OP):
            weights = _weights(dy, (dy if rows is None else rows).shape[0], row_scale)
            by_column = grouped_wgrad(weights, dy, offs=offs, splits=splits, x_rows=rows, out_dtype=sum_dtype)
    except ARGUMENT_ERRORS:
        _check(dy, offs, splits, rows, row_scale, out_dtype)
        raise
    sums = by_column[:, 0] if row_scale is None else by_column.sum(dim=1)
    return sums.to(out_dtype or dy.dtype)


def _check(dy: Any, offs: Any, splits: Any, rows: Any, row_scale: Any, out_dtype: Any) -> None:
    """Check the arguments again after a failure, so that the error names this operator and its argument."""
    given = {"dy": dy, "offs": offs, "splits": splits, "rows": rows, "row_scale": row_scale}
    for name, tensor in given.items():
        if isinstance(tensor, Tensor):
            check_plain(OP, name, tensor)
    check_x(OP, dy)
    check_indices(OP, rows, dy, of="dy")
    count_groups(OP, offs, splits, dy)
    check_scale(OP, "row_scale", row_scale, dy if rows is None else dy.new_empty(rows.shape[0], 0))
    check_out_dtype(OP, out_dtype, dy)
    if runs_kernels(dy):
        check_alignment(OP, "dy", dy)


def _weights(dy: Tensor, rows: int, row_scale: Tensor | None) -> Tensor:
    """Return a matrix [T, 8] in dy's dtype whose row t sums up to row_scale[t]; all ones if row_scale is None.

    A float32 factor is the sum of three bfloat16 numbers, in three columns, so that no bit of the factor is lost. The
    other columns are zeros.
    """
    if row_scale is None:
        return dy.new_ones(rows, COLUMNS)
    check_scale(OP, "row_scale", row_scale, dy.new_empty(rows, 0))
    check_plain(OP, "row_scale", row_scale)  # torch's own operators read it first
    parts, rest = dy.new_zeros(rows, COLUMNS), row_scale
    for column in range(3 if dy.dtype.itemsize == 2 else 1):
        part = rest.to(dy.dtype)
        parts[:, column] = part
        rest = rest - part.to(rest.dtype)
    return parts
