"""Helpers of all suites around their measuring: who is left out, how errors are judged, and the record of a contest."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from rich.progress import track
from torch import Tensor

from .results import Record
from .routing import skew
from .timing import Call, Summary

Item = TypeVar("Item")


class Wrong(Exception):
    """A contestant's result is wrong; the text says by how much."""


@contextmanager
def or_left_out(
    who: str,
    required: bool = False,
    unless: tuple[type[Exception], ...] = (),
    noting: tuple[dict[str, str], str] | None = None,
) -> Iterator[None]:
    """Warn that a contestant is left out if the block raises, whatever a foreign package raises; it must not cost the
    run.

    Args:
        required: of our own, who may not be left out, `unless` it is one of these that they raise.
        noting: where the reason is kept, and under which name.
    """
    try:
        yield
    except Exception as error:
        if required and not isinstance(error, unless):
            raise
        why = " ".join(f"{type(error).__name__}: {error}".removeprefix("Wrong: ").split())
        if noting:
            noting[0][noting[1]] = why
        warnings.warn(f"{who} is left out: {why}", stacklevel=4)


def check_error(what: str, got: Tensor, wanted: Tensor, most: float) -> float:
    """Return the relative error in Frobenius norms. Raises RuntimeError above `most`: a wrong result's time says
    nothing.
    """
    error = float((got.float() - wanted.float()).norm() / wanted.float().norm())
    if not error <= most:
        raise RuntimeError(f"{what}: relative error {error:.2g}; nothing was timed")
    return error


def numbered(calls: Mapping[str, Callable[[], object]]) -> dict[str, Call]:
    """Return calls that take their number, and do the same at each."""

    def ignoring(call: Callable[[], object]) -> Call:
        return lambda number: call()

    return {name: ignoring(call) for name, call in calls.items()}


def as_times(times: Mapping[str, Summary]) -> dict[str, Any]:
    """Return summaries as a record has them."""
    return {name: dataclasses.asdict(summary) for name, summary in times.items()}


def make_record(case: Any, times: Mapping[str, Summary], sizes: Sequence[int] = (), **fields: Any) -> Record:
    """Return the record of a contest. sizes: each expert's rows, where the routing matters."""
    routed: Record = {}
    if sizes:
        routed = {"skew": dataclasses.asdict(skew(list(sizes))), "active_experts": sum(size > 0 for size in sizes)}
    return {"case": dataclasses.asdict(case), **routed, **fields, "times": as_times(times)}


def records_of(title: str, items: Iterable[Item], measure: Callable[[Item], Iterable[Record]]) -> list[Record]:
    """Return the records of all items, one after the other; what an item held on the GPU is freed before the next."""
    records: list[Record] = []
    for item in track(list(items), title):
        records += measure(item)
        torch.cuda.empty_cache()
    return records
