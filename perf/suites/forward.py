"""Device time of the forward operators against cuBLAS, torch and QuACK."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from rich.progress import track

from ..cases import OPS, Case, forward_cases, select
from ..contestants import Dense, Library, calls, check, libraries
from ..options import Options
from ..problem import Problem, make_problem
from ..routing import skew
from ..timing import measure_device


def _competing(contestants: list[Library], case: Case) -> list[Library]:
    """All of them; in decode, where weights are all that counts, not Dense: it reads one expert's only."""
    return [library for library in contestants if not (case.decode and isinstance(library, Dense))]


def _record(problem: Problem, op: str, contestants: list[Library], budget_s: float) -> dict[str, Any]:
    competing = _competing(contestants, problem.case)
    errors = {library.name: check(library, op, problem.sets[0]) for library in competing}
    times = measure_device({library.name: calls(library, op, problem.sets) for library in competing}, budget_s)
    return {
        "case": dataclasses.asdict(problem.case),
        "skew": dataclasses.asdict(skew(problem.sizes)),
        "active_experts": problem.active_experts,
        "copies": len(problem.sets),
        "op": op,
        "errors": errors,
        "times": {name: dataclasses.asdict(summary) for name, summary in times.items()},
    }


def _measure(case: Case, contestants: list[Library], budget_s: float) -> list[dict[str, Any]]:
    problem = make_problem(case)
    records = [_record(problem, op, contestants, budget_s / len(OPS)) for op in OPS]
    del problem
    torch.cuda.empty_cache()
    return records


def run_forward(options: Options) -> list[dict[str, Any]]:
    """One record for each (case, operator): fused FC1, FC2 and the whole MLP."""
    cases = select(forward_cases(), options.case)
    contestants = libraries(options.quack)
    share = options.budget_s / len(cases)
    return [record for case in track(cases, "forward") for record in _measure(case, contestants, share)]
