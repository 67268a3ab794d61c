"""Device time of the whole MLP in MXFP8, quantising its input included: each recipe against BF16 and torch's FP8."""

from __future__ import annotations

from collections.abc import Iterator

from ffi_bridge import BundleError
from glulam.formats.prepared import PREPARED

from ..cases import EVEN_AND_SKEWED, Case, fp8_cases
from ..contest import make_record, or_left_out, records_of
from ..fp8 import CONTESTANTS, calls, check, make
from ..options import Options, select_ops
from ..problem import make_problem
from ..results import Record
from ..targets import TORCH_FP8
from ..timing import measure_device


def _measure(case: Case, names: tuple[str, ...], budget_s: float) -> Iterator[Record]:
    """A peer that fails or is wrong, and a recipe that the bundle lacks, are left out with a warning; a recipe may not
    be wrong.
    """
    problem = make_problem(case)
    competing, errors = {}, {}
    for name in names:
        with or_left_out(f"{case.label}: {name}", required=name != TORCH_FP8, unless=(BundleError,)):
            mlp = make(name, problem.sets)
            errors[name] = check(name, mlp, problem.sets[0])
            competing[name] = calls(mlp, problem.sets)
    times = measure_device(competing, budget_s)
    yield make_record(case, times, problem.sizes, op="mlp", errors=errors)
    PREPARED.clear()


def run_fp8(options: Options) -> list[Record]:
    """One record a case. `--op`: contestants."""
    cases, names = fp8_cases(options.case, EVEN_AND_SKEWED), select_ops(CONTESTANTS, options.ops)
    return records_of("fp8", cases, lambda case: _measure(case, names, options.budget_s / len(cases)))
