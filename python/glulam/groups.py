"""Group sizes in their forms: `offs` or `splits`, on the device, or `splits` on the host."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from . import device as gpus
from .errors import CaptureError
from .signature import leading

OFFS_INT32, SPLITS_INT32, SPLITS_INT64 = 0, 1, 2
"""How kernels are told what lies at the groups' address."""

Splits = Tensor | Sequence[int]


def form(groups: Tensor, is_offs: bool) -> int:
    if is_offs:
        return OFFS_INT32
    return SPLITS_INT64 if groups.dtype == torch.int64 else SPLITS_INT32


def ends(op: str, offs: Tensor | None, splits: Splits | None, rows: int) -> list[int]:
    """Where each group ends, read from the host or copied from the device, and checked.

    Raises:
        ValueError: a negative size, or groups that need more than `rows` rows.
        TypeError: a list with something else than integers.
    """
    if offs is not None:
        return _checked_ends(op, "offs", offs.tolist(), rows)
    sizes = splits.tolist() if isinstance(splits, Tensor) else [_integer(op, s) for s in splits or ()]
    for expert, size in enumerate(sizes):
        if size < 0:
            raise ValueError(f"{op}: splits[{expert}] is {size}; a group has 0 rows or more")
    return _checked_ends(op, "splits", list(itertools.accumulate(sizes)), rows)


def _integer(op: str, value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{op}: splits holds {value!r}; give row counts as integers") from None


def _checked_ends(op: str, name: str, values: list[int], rows: int) -> list[int]:
    before = 0
    for expert, end in enumerate(values):
        if end < before:
            raise ValueError(
                f"{op}: offs[{expert}] is {end}, after {before}; offs are cumulative ends and never fall, so sum "
                "splits up first: torch.cumsum(splits, 0, dtype=torch.int32)"
            )
        before = end
    if before > rows:
        what = f"offs end at {before}" if name == "offs" else f"splits sum to {before}"
        raise ValueError(f"{op}: {what}, but {leading(op)} has {rows} rows; every group must lie within them")
    return values


def on_device(op: str, splits: Splits, rows: int, device: torch.device) -> Tensor:
    """Row counts from the host, checked, as an int32 tensor [E] on `device`; the host does not wait for the copy.

    Raises:
        ValueError, TypeError: as `ends`.
        CaptureError: under capture, where the graph would replay these counts for ever.
    """
    if gpus.is_capturing():
        raise CaptureError(
            f"{op}: splits is a list or a CPU tensor, which a CUDA graph would freeze at its present values; pass a "
            "CUDA tensor, and write each replay's row counts into it"
        )
    ends(op, None, splits, rows)
    counts = torch.as_tensor(splits, device="cpu").to(torch.int32)
    return counts.pin_memory().to(device, non_blocking=True)
