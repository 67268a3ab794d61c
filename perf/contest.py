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
    """Raised if a contestant's result is wrong; the message has its error.

    The contestant is then left out; if it is required, the run ends.
    """


@dataclasses.dataclass(frozen=True)
class Contestant:
    """An implementation that is timed against others.

    Attributes:
        name: the name in records and warnings.
        build: prepares weights, compiles and tunes; returns the call that is timed, a function of the call's
            number (0, 1, ...), by which the call picks its set of tensors.
        error: function that returns the relative error of a result. None: results are not compared, for example those
            of a plain copy.
        bound: the largest error that rounding explains.
        required: True: this is Glulam's own; if it fails, the run ends. False: it is left out with a warning.
        unless: types of exceptions after which even a required contestant is only left out.
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
    """Turn any exception of the block into a warning that contestant `who` is left out.

    So a failure in another package does not end the run.

    Args:
        who: the contestant, for messages.
        required: True: exceptions propagate, except the types in `unless`.
        unless: types of exceptions that never propagate.
        noting: (a dict in which the reason is stored, the key under which it is stored). None: not stored.
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
    """Calls and errors of the contestants to be timed, by name; and why each of the others is left out."""

    calls: dict[str, Call]
    errors: dict[str, float]
    left_out: dict[str, str]


def within(error: float, bound: float) -> float:
    """Return a result's error. Raises Wrong if it exceeds its bound or is NaN."""
    if not error <= bound:
        raise Wrong(f"wrong, relative error {error:.2g}")
    return error


def _error(one: Contestant, call: Call) -> float | None:
    """Run a call once and return its result's error; None if nothing is compared. Raises Wrong.

    The result is freed when this function returns.
    """
    result = call(0)
    return within(one.error(result), one.bound) if one.error else None


def admitted(where: str, contestants: Iterable[Contestant]) -> Admitted:
    """Build every contestant, and check one result of each.

    Contestants that fail or are wrong are left out with a warning, since their times would say nothing. Raises if a
    required contestant fails.

    Args:
        where: the contest's name in warnings.
        contestants: built one after the other.
    """
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
    """Check every contestant, time the contestants that pass alternately, and return the record.

    Args:
        case: the sizes; its label begins the contest's name in warnings.
        contestants: the implementations to compare.
        budget_s: seconds of measuring.
        sizes: each expert's rows, if the routing matters.
        where: the rest of the contest's name in warnings.
        measure: function (calls by name, seconds) that returns their times. None: device time (`measure_device`).
        fields: further fields of the record.
    """
    who = admitted(", ".join(filter(None, (case.label, where))), contestants)
    return make_record(case, (measure or measure_device)(who.calls, budget_s), sizes, **fields, errors=who.errors)


def make_record(case: Any, times: Times, sizes: Sequence[int] = (), **fields: Any) -> Record:
    """Return the record of a contest: its case, the skew of `sizes` if given, further fields, and times."""
    return {"case": dataclasses.asdict(case), **(routed(list(sizes)) if sizes else {}), **fields, "times": times}


def records_of(title: str, measures: Sequence[Measure], budget_s: float) -> list[Record]:
    """Run all measurements, and return their records. Each gets an equal share of the budget.

    GPU memory is freed after each measurement.

    Args:
        title: text before the progress bar.
        measures: functions (seconds) that measure, and return records.
        budget_s: seconds for all measurements.
    """
    records: list[Record] = []
    for measure in track(measures, title):
        records += measure(budget_s / len(measures))
        torch.cuda.empty_cache()
    return records


def over_cases(suite: str) -> Callable[[OfCase], Callable[[Options], list[Record]]]:
    """Return a decorator that turns a function (case, seconds) into the suite's function of options.

    The new function measures each of the suite's cases, with an equal share of the budget, and returns all records.
    """

    def run(measure: OfCase, options: Options) -> list[Record]:
        return records_of(suite, [partial(measure, case) for case in cases_of(suite, options.case)], options.budget_s)

    return lambda measure: partial(run, measure)


def numbered(call: Run) -> Call:
    """Return `call` as a function of a call's number, which it ignores."""
    return lambda number: call()


def rotating(call: Callable[[Any], Any], sets: Sequence[Any]) -> Call:
    """Return a function of a call's number that runs `call` on one set of tensors: number modulo their count."""
    return lambda number: call(sets[number % len(sets)])


def of_calls(
    calls: Mapping[str, Run], compared: str, wanted: Run | None, bound: float, required: bool = True
) -> Iterator[Contestant]:
    """Yield a contestant for each call, which needs no preparation.

    Args:
        calls: functions without arguments, by name.
        compared: name of the call whose result is checked; the others are not.
        wanted: function that returns the right result. None: nothing is checked.
        bound: the largest relative error that rounding explains.
        required: True: a failure ends the run. False: the contestant is left out with a warning.
    """
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
    """Return the relative error of one tensor, by Frobenius norms.

    It is added up over chunks of rows: a float32 copy of all weights of a model would not fit beside their gradients.
    """
    size = max(PART_ELEMENTS // max(wanted[:1].numel(), 1), 1)
    parts = list(zip(got.split(size), wanted.split(size), strict=True))
    difference = math.hypot(*(float((a.float() - b.float()).norm()) for a, b in parts))
    norm = math.hypot(*(float(b.float().norm()) for _, b in parts))
    return difference / norm if norm else math.nan
