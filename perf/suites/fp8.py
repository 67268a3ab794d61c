"""Device time of the whole MLP in MXFP8, quantising its input included: each recipe against BF16 and torch's FP8."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
from rich.progress import track

from ffi_bridge import BundleError
from glulam.formats.prepared import PREPARED

from ..cases import EVEN_AND_SKEWED, Case, fp8_cases
from ..fp8 import CONTESTANTS, Mlp, calls, check, make
from ..options import Options, select_ops
from ..problem import Problem, make_problem
from ..routing import skew
from ..targets import TORCH_FP8
from ..timing import measure_device


def _competing(problem: Problem, names: tuple[str, ...]) -> tuple[dict[str, Mlp], dict[str, float]]:
    """Contestants and their errors. A peer that fails or is wrong, and a recipe that the bundle lacks, are left out
    with a warning; a recipe may not be wrong.
    """
    chosen, errors = {}, {}
    for name in names:
        try:
            mlp = make(name, problem.sets)
            errors[name] = check(name, mlp, problem.sets[0])
            chosen[name] = mlp
        except Exception as error:
            if name != TORCH_FP8 and not isinstance(error, BundleError):
                raise
            warnings.warn(f"{problem.case.label}: {name} is left out: {error}", stacklevel=2)
    return chosen, errors


def _measure(case: Case, names: tuple[str, ...], budget_s: float) -> dict[str, Any]:
    problem = make_problem(case)
    competing, errors = _competing(problem, names)
    times = measure_device({name: calls(mlp, problem.sets) for name, mlp in competing.items()}, budget_s)
    return {
        "case": dataclasses.asdict(case),
        "skew": dataclasses.asdict(skew(problem.sizes)),
        "active_experts": problem.active_experts,
        "op": "mlp",
        "errors": errors,
        "times": {name: dataclasses.asdict(summary) for name, summary in times.items()},
    }


def run_fp8(options: Options) -> list[dict[str, Any]]:
    """One record a case. `--op`: contestants."""
    cases, names = fp8_cases(options.case, EVEN_AND_SKEWED), select_ops(CONTESTANTS, options.ops)
    records = []
    for case in track(cases, "fp8"):
        records.append(_measure(case, names, options.budget_s / len(cases)))
        PREPARED.clear()
        torch.cuda.empty_cache()
    return records
