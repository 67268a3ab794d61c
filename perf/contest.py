"""The contest that every suite runs: who competes, who is left out, how errors are judged, and the record of it."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from rich.progress import track
from torch import Tensor

from glulam.tuner.timing import Call

from .cases import cases_of
from .options import Options
from .results import Record
from .routing import routed
from .timing import Run, Times, measure_device

Results = tuple[Tensor, ...]
Measure = Callable[[float], Iterable[Record]]
OfCase = Callable[[Any, float], Iterable[Record]]
TimesOf = Callable[[dict[str, Call], float], Times]
"""Functions that measure for a number of seconds; they return records, of a case or not, or the times of calls."""
PART_ELEMENTS = 2**28  # elements that are compared at once


class Wrong(RuntimeError):
    """Raised if a contestant's result is wrong, and the text says by how much: it is left out, or the run ends."""


@dataclasses.dataclass(frozen=True)
class Contestant:
    """An implementation that is timed against others.

    Attributes:
        build: prepares weights, compiles and tunes; returns the call that is timed, a function of the call's
            number.
        error: returns a result's relative error; None: nothing is compared, as for a copy of as many bytes.
        bound: the largest error that rounding explains.
        required: one of ours; if it fails, the run ends, except for exceptions of the types in `unless`.
    """

    name: str
    build: Callable[[], Call]
    error: Callable[[Any], float] | None = None
    bound: float = 0.0
    required: bool = False
    unless: tuple[type[Exception], ...] = ()


@contextmanager
def or_left_out(
    who: str,
    required: bool = False,
    unless: tuple[type[Exception], ...] = (),
    noting: tuple[dict[str, str], str] | None = None,
) -> Iterator[None]:
    """Turn any exception of the block into a warning that contestant `who` is left out: a foreign package must not cost
    the run.

    Args:
        required: exceptions propagate, except the types in `unless`.
        noting: a dict that keeps the reason, and the key to keep it under.
    """
    try:
        yield
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".removeprefix("Wrong: ").split())
        if required and not isinstance(error, unless):
            if isinstance(error, Wrong):
                raise Wrong(f"{who}: {why}; nothing was timed") from None
            raise
        if noting:
            noting[0][noting[1]] = why
        warnings.warn(f"{who} is left out: {why}", stacklevel=4)


class Admitted(NamedTuple):
    """Calls and errors of the contestants to be timed, by name, and why the others are left out."""

    calls: dict[str, Call]
    errors: dict[str, float]
    left_out: dict[str, str]


def within(error: float, bound: float) -> float:
    """Return a result's error. Raises Wrong if it exceeds its bound or is NaN."""
    if not error <= bound:
        raise Wrong(f"wrong, relative error {error:.2g}")
    return error


def _error(one: Contestant, call: Call) -> float | None:
    """Return the error of a call's result, which is freed with this function; None if nothing is compared."""
    result = call(0)
    return within(one.error(result), one.bound) if one.error else None


def admitted(where: str, contestants: Iterable[Contestant]) -> Admitted:
    """Build every contestant and check one result of each; the time of one that fails or is wrong would say nothing."""
    found = Admitted({}, {}, {})
    for one in contestants:
        with or_left_out(f"{where}: {one.name}", one.required, one.unless, (found.left_out, one.name)):
            call = one.build()
            if (error := _error(one, call)) is not None:
                found.errors[one.name] = error
            found.calls[one.name] = call
    return found


def contest(
    case: Any,
    contestants: Iterable[Contestant],
    budget_s: float,
    sizes: Sequence[int] = (),
    *,
    where: str = "",
    measure: TimesOf | None = None,
    **fields: Any,
) -> Record:
    """Return the record of a contest: check every contestant, then time the admitted ones in turns.

    Args:
        sizes: each expert's rows, if the routing matters.
        where: the contest's name in warnings, after the case's.
        measure: how calls are timed; None: device time, in turns.
    """
    who = admitted(", ".join(filter(None, (case.label, where))), contestants)
    return make_record(case, (measure or measure_device)(who.calls, budget_s), sizes, **fields, errors=who.errors)


def make_record(case: Any, times: Times, sizes: Sequence[int] = (), **fields: Any) -> Record:
    """Return the record of a contest: its case, the skew of `sizes` if given, further fields, and times."""
    return {"case": dataclasses.asdict(case), **(routed(list(sizes)) if sizes else {}), **fields, "times": times}


def records_of(title: str, measures: Sequence[Measure], budget_s: float) -> list[Record]:
    """Return the records of all measurements, which share the budget; what one held on the GPU is freed after it."""
    records: list[Record] = []
    for measure in track(measures, title):
        records += measure(budget_s / len(measures))
        torch.cuda.empty_cache()
    return records


def over_cases(suite: str) -> Callable[[OfCase], Callable[[Options], list[Record]]]:
    """Return a decorator of a function that measures one case, which makes of it the suite's function of options: each
    of the suite's cases gets an equal share of the budget.
    """

    def run(measure: OfCase, options: Options) -> list[Record]:
        return records_of(suite, [partial(measure, case) for case in cases_of(suite, options.case)], options.budget_s)

    return lambda measure: partial(run, measure)


def numbered(call: Run) -> Call:
    """Return `call` as a function of a call's number, which it ignores."""
    return lambda number: call()


def rotating(call: Callable[[Any], Any], sets: Sequence[Any]) -> Call:
    """Return a function of a call's number that runs `call` on each of the sets of tensors in turn."""
    return lambda number: call(sets[number % len(sets)])


def of_calls(
    calls: Mapping[str, Run], compared: str, wanted: Run | None, bound: float, required: bool = True
) -> Iterator[Contestant]:
    """Contestants that are ready calls; the result of `compared` is held to what `wanted` returns."""
    for name, call in calls.items():
        error = (lambda got: relative_error(got, wanted())) if wanted and name == compared else None
        yield Contestant(name, partial(numbered, call), error, bound, required)


def listed(value: Any) -> Results:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


@torch.no_grad()
def relative_error(got: Any, wanted: Any) -> float:
    """Return the largest relative error among the tensors, by Frobenius norms; NaN if one of them is NaN."""
    errors = [_relative_error(a, b) for a, b in zip(listed(got), listed(wanted), strict=True)]
    return max(errors, key=lambda error: (error != error, error))


def _relative_error(got: Tensor, wanted: Tensor) -> float:
    """Return one tensor's relative error, added up over chunks: converted to float32 at once, a model's weights would
    not fit beside their gradients.
    """
    size = max(PART_ELEMENTS // max(wanted[:1].numel(), 1), 1)
    parts = list(zip(got.split(size), wanted.split(size), strict=True))
    difference = math.hypot(*(float((a.float() - b.float()).norm()) for a, b in parts))
    norm = math.hypot(*(float(b.float().norm()) for _, b in parts))
    return difference / norm if norm else math.nan
