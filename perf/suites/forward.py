"""Device time of the forward operators against cuBLAS, torch and QuACK, on several lists of cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..cases import OPS, Case, decode_cases, forward_cases, rows_cases, skew_cases
from ..contest import make_record, or_left_out, records_of
from ..contestants import Dense, Library, calls, check, libraries
from ..options import Options, select_ops
from ..problem import Problem, make_problem
from ..quack import Quack
from ..results import Record
from ..timing import measure_device


def prepared(contestants: list[Library], problem: Problem, ops: tuple[str, ...]) -> tuple[list[Library], Any]:
    """Who can compete on this problem, and what was chosen in tuning. In decode, where weights are all that counts, not
    Dense: it reads one expert's only.
    """
    chosen, tunings = [], {}
    for library in contestants:
        if problem.case.decode and isinstance(library, Dense):
            continue
        with or_left_out(f"{problem.case.label}: {library.name}"):
            if isinstance(library, Quack):
                tunings[library.name] = library.prepare_forward(problem.sets, ops)
            chosen.append(library)
    return chosen, tunings


def checked(contestants: list[Library], op: str, problem: Problem) -> tuple[list[Library], dict[str, float]]:
    """Who computes `op`, and each one's error. A peer that fails or is wrong is left out with a warning; we may not."""
    errors = {}
    for library in contestants:
        with or_left_out(f"{problem.case.label}, {op}: {library.name}", required=library is contestants[0]):
            errors[library.name] = check(library, op, problem.sets[0])
    return [library for library in contestants if library.name in errors], errors


def _measure(case: Case, ops: tuple[str, ...], contestants: list[Library], budget_s: float) -> Iterator[Record]:
    problem = make_problem(case)
    able, tuning = prepared(contestants, problem, ops)
    for op in ops:
        competing, errors = checked(able, op, problem)
        calls_of = {library.name: calls(library, op, problem.sets) for library in competing}
        times = measure_device(calls_of, budget_s / len(ops))
        yield make_record(case, times, problem.sizes, op=op, errors=errors, tuning=tuning)


def forward_suite(name: str, cases: Callable[[str | None], list[Case]]) -> Callable[[Options], list[Record]]:
    """A suite: one record for each (case, operator): fused FC1, FC2 and the whole MLP.

    cases: from what the user wants of them to the cases.
    """

    def run(options: Options) -> list[Record]:
        chosen, ops = cases(options.case), select_ops(OPS, options.ops)
        contestants, share = libraries(options.quack), options.budget_s / len(chosen)
        return records_of(name, chosen, lambda case: _measure(case, ops, contestants, share))

    return run


run_forward = forward_suite("forward", forward_cases)
run_decode = forward_suite("decode", decode_cases)
run_rows = forward_suite("rows", rows_cases)
run_skew = forward_suite("skew", skew_cases)
