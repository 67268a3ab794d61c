"""Device time of the forward operators against cuBLAS, torch and QuACK, on several lists of cases."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from rich.progress import track

from ..cases import OPS, Case, decode_cases, forward_cases, rows_cases, skew_cases
from ..contestants import Dense, Library, Quack, calls, check, libraries
from ..options import Options, select_ops
from ..problem import Problem, make_problem
from ..routing import skew
from ..timing import measure_device

Records = list[dict[str, Any]]


def prepared(contestants: list[Library], problem: Problem, ops: tuple[str, ...]) -> tuple[list[Library], Any]:
    """Who can compete on this problem, and what was chosen in tuning. In decode, where weights are all that counts, not
    Dense: it reads one expert's only.
    """
    chosen, tunings = [], {}
    for library in contestants:
        if problem.case.decode and isinstance(library, Dense):
            continue
        if isinstance(library, Quack):
            try:
                tunings[library.name] = library.prepare_forward(problem.sets, ops)
            except Exception as error:  # whatever a foreign package raises must not cost the run
                warnings.warn(f"{library.name} is left out of {problem.case.label}: {error}", stacklevel=2)
                continue
        chosen.append(library)
    return chosen, tunings


def checked(contestants: list[Library], op: str, problem: Problem) -> tuple[list[Library], dict[str, float]]:
    """Who computes `op`, and each one's error. A peer that fails or is wrong is left out with a warning; we may not."""
    errors = {}
    for library in contestants:
        try:
            errors[library.name] = check(library, op, problem.sets[0])
        except Exception as error:
            if library is contestants[0]:
                raise
            warnings.warn(f"{problem.case.label}, {op}: {library.name} is left out: {error}", stacklevel=2)
    return [library for library in contestants if library.name in errors], errors


def _record(problem: Problem, op: str, contestants: list[Library], budget_s: float) -> dict[str, Any]:
    competing, errors = checked(contestants, op, problem)
    times = measure_device({library.name: calls(library, op, problem.sets) for library in competing}, budget_s)
    return {
        "case": dataclasses.asdict(problem.case),
        "skew": dataclasses.asdict(skew(problem.sizes)),
        "active_experts": problem.active_experts,
        "op": op,
        "errors": errors,
        "times": {name: dataclasses.asdict(summary) for name, summary in times.items()},
    }


def _measure(case: Case, ops: tuple[str, ...], contestants: list[Library], budget_s: float) -> Records:
    problem = make_problem(case)
    competing, tunings = prepared(contestants, problem, ops)
    records = [_record(problem, op, competing, budget_s / len(ops)) for op in ops]
    for record in records:
        record["tuning"] = tunings
    del problem
    torch.cuda.empty_cache()
    return records


def forward_suite(name: str, cases: Callable[[str | None], list[Case]]) -> Callable[[Options], Records]:
    """A suite: one record for each (case, operator): fused FC1, FC2 and the whole MLP.

    cases: from what the user wants of them to the cases.
    """

    def run(options: Options) -> Records:
        chosen, ops = cases(options.case), select_ops(OPS, options.ops)
        contestants = libraries(options.quack)
        share = options.budget_s / len(chosen)
        return [r for case in track(chosen, name) for r in _measure(case, ops, contestants, share)]

    return run


run_forward = forward_suite("forward", forward_cases)
run_decode = forward_suite("decode", decode_cases)
run_rows = forward_suite("rows", rows_cases)
run_skew = forward_suite("skew", skew_cases)
