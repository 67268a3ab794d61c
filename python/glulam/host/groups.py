"""Group sizes as callers pass them: reading them back, checking them, copying them to the device, and warnings.

Callers pass `offs` (cumulative ends) on the device, or `splits` (row counts) on the device or in host memory.
"""

from __future__ import annotations

import itertools
import operator
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CaptureError
from . import device as gpus

OFFS_INT32, SPLITS_INT32, SPLITS_INT64 = 0, 1, 2
OFFS_OF_CALL = -1
"""Values of a kernel argument for the type of group sizes. OFFS_OF_CALL: offs that a kernel of the same call writes."""

Splits = Tensor | Sequence[int]

OFFS_OF_SPLITS = "offs=torch.cumsum(splits, 0, dtype=torch.int32)"


UNINITIALISED = "rows after them are uninitialised in the result (as they were in a given out)"
REACH_NO_RESULT = "rows after them reach no result"
"""Texts for `declare`: what happens to rows after the last group.

UNINITIALISED is for operators with a result row for each row, REACH_NO_RESULT for operators that only sum over rows.
"""


class _Grouped(NamedTuple):
    """An operator's leading argument and text on rows after the last group, as passed to `declare`."""

    leads: str
    after_groups: str


_operators: dict[str, _Grouped] = {}


def declare(op: str, leads: str, after_groups: str = "") -> None:
    """Register an operator, so that checks of group sizes know its leading argument and its warning.

    Args:
        op: the operator's name.
        leads: the argument that determines T, dtype and device of the others.
        after_groups: text that says what happens to rows after the last group, for the warning that groups do not fill
            T. Empty: do not warn.
    """
    _operators[op] = _Grouped(leads, after_groups)


OF_A_TRACE = ""
_SPARE_ROWS = "_glulam_spare_rows"


class _Caller(threading.local):
    op: str | None = None


_caller = _Caller()
_warned: set[tuple[str, str]] = set()


class part_of:
    """Context for the operators that `op`, the operator that the user called, calls itself.

    Errors and warnings about groups then name `op`. If `op` is OF_A_TRACE, operators keep their own names and do not
    warn. If contexts are nested, the outermost one counts.
    """

    __slots__ = ("_op", "_outer")

    def __init__(self, op: str) -> None:
        self._op = op

    def __enter__(self) -> None:
        self._outer = _caller.op
        _caller.op = self._op if self._outer is None else self._outer

    def __exit__(self, *_: Any) -> None:
        _caller.op = self._outer


def caller(op: str) -> str:
    """Return the name of the operator that the user called.

    Inside `with part_of(name)` (operators that another operator calls) it is the outermost block's name, else `op`.
    """
    return _caller.op or op


def leading(op: str) -> str:
    """Return the name of an operator's leading argument, which determines T, dtype and device; "x" by default."""
    return _operators[op].leads if op in _operators else "x"


def _after_groups(op: str) -> str:
    """Return the operator's text on rows after the last group, for the warning; empty: do not warn. See `declare`."""
    return _operators[op].after_groups if op in _operators else ""


def code_of(groups: Tensor, is_offs: bool) -> int:
    """Return the kernel argument for the type of group sizes: OFFS_INT32, SPLITS_INT32 or SPLITS_INT64.

    Args:
        groups: the group sizes.
        is_offs: True: they are offs. False: splits.
    """
    if is_offs:
        return OFFS_INT32
    return SPLITS_INT64 if groups.dtype == torch.int64 else SPLITS_INT32


def ends(op: str, offs: Tensor | None, splits: Splits | None, rows: int) -> list[int]:
    """Check the group sizes, and return the end row of each group as a list of integers.

    Sizes on the device are copied to the host, which waits for the device.

    If the groups end before `rows`, this warns once: such offs are allowed, but are often a mistake. Groups of a
    Routing never warn.

    Args:
        op: the operator.
        offs: ends, [E]. None: `splits` is given.
        splits: row counts, [E] or a list. None: `offs` is given.
        rows: T.

    Raises:
        ValueError: a negative size, falling offs, or groups that need more than `rows` rows.
        TypeError: a list that contains non-integers.
    """
    op = caller(op)
    values = _ends(op, offs, splits, rows)
    is_suspect = not hasattr(splits if offs is None else offs, _SPARE_ROWS)
    if values and values[-1] < rows and is_suspect and _after_groups(op) and _caller.op != OF_A_TRACE:
        _warn_of_rows_after(op, offs is not None, values, rows)
    return values


def _ends(op: str, offs: Tensor | None, splits: Splits | None, rows: int) -> list[int]:
    """Do the work of `ends` except for the warning."""
    if offs is not None:
        what, values = "offs end at", offs.tolist()
    else:
        sizes = splits.tolist() if isinstance(splits, Tensor) else [_integer(op, s) for s in splits or ()]
        for expert, size in enumerate(sizes):
            if size < 0:
                raise ValueError(f"{op}: splits[{expert}] is {size}; a group has 0 rows or more")
        what, values = "splits sum to", list(itertools.accumulate(sizes))
    for expert, (before, end) in enumerate(itertools.pairwise((0, *values))):
        if end < before:
            raise ValueError(
                f"{op}: offs[{expert}] is {end}, after {before}; offs are cumulative ends and never fall, so sum "
                f"splits up first: {OFFS_OF_SPLITS}"
            )
    if values and values[-1] > rows:
        raise ValueError(
            f"{op}: {what} {values[-1]}, but {leading(op)} has {rows} rows; every group must lie within them"
        )
    return values


def _integer(op: str, value: object) -> int:
    """Convert an element of splits to an integer. Raises TypeError if it is none."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{op}: splits holds {value!r}; give row counts as integers") from None


def is_after_groups(rows: Tensor, offs: Tensor | None = None, splits: Any = None) -> Tensor:
    """Return bool [T], True for rows after the last group, which operators do not write.

    Args:
        rows: [T, ...].
        offs, splits: the group sizes; one of the two, as a tensor.
    """
    end = splits.sum() if offs is None else offs[-1]
    return torch.arange(rows.shape[0], device=rows.device) >= end


def with_spare_rows(groups: Tensor) -> Tensor:
    """Mark group sizes that end before T by design, as a Routing's may, so that `ends` does not warn; return them.

    The mark is an attribute of this tensor object: it ends with the object, and copies other than `copy.deepcopy`'s do
    not have it.
    """
    if isinstance(groups, Tensor) and not torch.compiler.is_compiling():  # compiled code never warns
        setattr(groups, _SPARE_ROWS, True)
    return groups


def _warn_of_rows_after(op: str, is_offs: bool, ends: list[int], rows: int) -> None:
    """Warn that groups end before the last row: once in this process for each pair of operator and likely cause."""
    if not is_offs:
        cause, hint = "splits", "Check that splits count every row"
    elif sum(ends) == rows:
        cause, hint = "splits as offs", f"offs sum to {rows}, as splits would: give splits=, or {OFFS_OF_SPLITS}"
    elif ends[0] == 0:
        cause, hint = "starts as offs", "offs[0] is 0, as the first of starts would be: give each group's end"
    else:
        cause, hint = "offs", f"Check that offs are ends: not splits, of which give {OFFS_OF_SPLITS}, and not starts"
    if (op, cause) in _warned:
        return
    _warned.add((op, cause))
    warnings.warn(
        f"{op}: the groups end at row {ends[-1]} of {rows}; {_after_groups(op)}. {hint}. Where those rows are padding, "
        "silence this by warnings.filterwarnings('ignore', message='.*the groups end at row')",
        RuntimeWarning,
        stacklevel=_level_of_user(),
    )


def forget_warnings() -> None:
    """Forget which warnings were given, so that they are given again."""
    _warned.clear()


def _level_of_user() -> int:
    """Return the `stacklevel` for warnings.warn that points at the first frame outside of Glulam and torch."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("glulam", "torch"):
        frame, level = frame.f_back, level + 1
    return level


def on_device(op: str, splits: Splits, rows: int, device: torch.device) -> Tensor:
    """Check row counts in host memory, and copy them to an int32 tensor [E] on `device`, without waiting for the copy.

    Raises:
        ValueError: a negative size, or more than `rows` rows in all.
        TypeError: a list that contains non-integers.
        CaptureError: under capture, since every replay of the graph would use these counts.
    """
    if gpus.is_capturing():
        raise CaptureError(
            f"{op}: splits is a list or a CPU tensor, which a CUDA graph would freeze at its present values; pass a "
            "CUDA tensor, and write each replay's row counts into it"
        )
    _ends(op, None, splits, rows)
    counts = torch.as_tensor(splits, device="cpu").to(torch.int32)
    return counts.pin_memory().to(device, non_blocking=True)
