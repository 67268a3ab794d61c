"""The MLP in MXFP8, quantising its input included: each recipe against BF16 and torch's FP8."""

from __future__ import annotations

from collections.abc import Iterator

from glulam.formats.prepared import PREPARED

from ..cases import Case, cases_of
from ..contest import contest, records_of
from ..mlp import make_buffers
from ..options import Options, select_ops
from ..quantised import CONTESTANTS, contestants
from ..results import Record


def run_fp8(options: Options) -> list[Record]:
    """One record a case. `--op`: contestants."""
    cases, names = cases_of("fp8", options.case), select_ops(CONTESTANTS, options.ops)

    def measure(case: Case) -> Iterator[Record]:
        sets = make_buffers(case)
        yield contest(case, contestants(names, sets), options.budget_s / len(cases), sets[0].sizes, op="mlp")
        PREPARED.clear()

    return records_of("fp8", cases, measure)
