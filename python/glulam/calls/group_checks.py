"""Checks of group sizes (offs or splits), of row indices, and of vectors with one number for each row or expert.

In signatures, `op` is the operator's name and `name` the argument's name, both for errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..host.groups import leading
from .checks import MAX_ROWS, check_same_device, check_tensor, mismatch, shape_text

SPLITS_DTYPES = (torch.int32, torch.int64)


def _check_numbers(
    op: str, name: str, value: Any, what: str, x: Tensor, dtypes: Sequence[torch.dtype], count: int | None, why: str,
    cast: str = "cast it",
) -> Tensor:  # fmt: skip
    """Check that an argument is a contiguous tensor on x's device, with one of these dtypes; return it.

    Args:
        op, name: the operator and the argument, for errors.
        value: the argument.
        what: the error asks for this if `value` is not a tensor.
        x: a tensor on the required device.
        dtypes: the allowed dtypes.
        count: the required number of elements of a vector. None: any shape.
        why: the error's reason for the count.
        cast: the error's advice for a wrong dtype.
    """
    shape = None if count is None else (count,)
    tensor = check_tensor(op, name, value, what, dtypes=dtypes, cast=cast, shape=shape, why=why)
    check_same_device(op, name, tensor, x)
    return tensor


def check_scale(op: str, name: str, scale: Any, x: Tensor) -> None:
    """Check a scale [T]: float32, or float64 if x is float64. None is allowed: no scale."""
    if scale is not None:
        dtypes = (torch.float32, torch.float64) if x.dtype == torch.float64 else (torch.float32,)
        why = f"it holds a number for each row of {leading(op)}"
        _check_numbers(op, name, scale, "a float32 tensor [T]", x, dtypes, x.shape[0], why, "call .float()")


def check_indices(op: str, rows: Any, x: Tensor, name: str = "rows", of: str = "x", count: int | None = None) -> None:
    """Check indices, int32 [T]: row t of an operand is x[rows[t]]. The values are not checked.

    Args:
        op: the operator.
        rows: the indices. None is allowed: no indices.
        x: the matrix whose rows are selected.
        name: the indices' name in errors.
        of: x's name in errors.
        count: T. None: any number.
    """
    if rows is None:
        return
    why = "the other operand has so many rows"
    rows = _check_numbers(op, name, rows, "an int32 tensor [T]", x, (torch.int32,), count, why)
    if rows.dim() != 1:
        raise ValueError(f"{op}: {name} has shape {shape_text(rows.shape)}; give [T]")
    if isinstance(rows.shape[0], int) and rows.shape[0] >= MAX_ROWS:
        raise ValueError(
            f"{op}: {name} has {rows.shape[0]} indices; at most 2**26 - 1 are possible, so call once for each part"
        )
    if rows.shape[0] and not x.shape[0]:
        raise ValueError(f"{op}: {name} has {rows.shape[0]} indices, but {of} has no row")


def check_mask(op: str, mask: Any, x: Tensor, experts: int) -> None:
    """Check a mask, bool [E] on x's device; True: add to this expert's `out`. None is allowed: no mask."""
    if mask is not None:
        why, cast = "there is one flag for each expert", "cast it: whether to add to each group's out"
        _check_numbers(op, "mask", mask, "a bool tensor [E]", x, (torch.bool,), experts, why, cast)


def count_groups(op: str, offs: Any, splits: Any, x: Tensor) -> int:
    """Check group sizes, and return their number E. For operators in which no other argument has a dimension E."""
    groups = offs if splits is None else splits
    count = len(groups) if isinstance(groups, (list, tuple)) else 0
    if isinstance(groups, Tensor) and groups.dim():
        count = int(groups.shape[0])
    check_groups(op, offs, splits, x, count)
    if not count:
        raise ValueError(f"{op}: {'offs' if splits is None else 'splits'} has 0 groups (E = 0); give at least one")
    return count


def check_groups(
    op: str, offs: Any, splits: Any, x: Tensor, experts: int, counted: str = "", name: str = "offs"
) -> None:
    """Check that exactly one of offs and splits is given, for `experts` groups. The values are not checked.

    Args:
        op: the operator.
        offs, splits: the group sizes.
        x: the leading operand.
        experts: E.
        counted: name of the argument from which E was read, for errors. Empty: E comes from the groups themselves.
        name: the name of offs in errors.
    """
    if (offs is None) == (splits is None):
        got = "neither offs nor splits" if offs is None else "both offs and splits"
        raise ValueError(f"{op}: got {got}; give offs (cumulative ends, int32 [E]) or splits (row counts), not both")
    why = "there is one number for each expert" + (f" of {counted}" if counted else "")
    if splits is None:
        _check_numbers(op, name, offs, "a tensor [E]", x, (torch.int32,), experts, why)
    elif isinstance(splits, (list, tuple)):
        if len(splits) != experts:
            mismatch(op, "splits", (len(splits),), (experts,), why)
    else:
        on_host = isinstance(splits, Tensor) and splits.device.type == "cpu"
        like = splits if on_host else x
        _check_numbers(op, "splits", splits, "a tensor [E] or a list", like, SPLITS_DTYPES, experts, why)
