"""Every tile of a bundle at every number of rows of the models that a table of choices covers, in one short run; and
the table that the dispatcher reads, made from a result.

The dispatcher's rule is fitted to these results and checked against them, so many cases count more than the third
digit. Therefore a case has few rounds, and short samples whose length is estimated from the machine's limits instead of
tried, and each kernel is checked once for an operation and model. Here --budget is the time of the whole suite. Even
powers of two of rows an expert come first; if the budget ends early, odd powers are missing.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import track

from cute_kernels.sm90.policy import MEASURED
from glulam.tuner.timing import device_us

from ..cases import DOUBLINGS, EVEN_AND_SKEWED, OTHER_MODELS, PREFILL, Case, select, sweep
from ..contest import admitted
from ..options import Options
from ..results import RESULTS, Record, Result, read
from ..routing import group_sizes
from ..timing import in_turns
from .compare import Candidate, Contest, candidates, contestants, contests, launches, make_sets, open_bundles

FORMS = {"fc1": "glu", "fc2": "nt", "dgrad": "nn"}
STAMPED = ("commit", "date", "gpu", "driver", "versions")
DIGITS = 4
Shape = tuple[str, int, int, int]
FORWARD_AND_DGRAD = tuple(FORMS)
SPECS = ("grouped_glu_bf16_swiglu_concat_t*", "grouped_mm_bf16_n?_t*")
CHECK_ROWS = 48  # an expert: whole tiles and tails under skew

MAX_BYTES = 40e9  # bytes of one set of tensors
MAX_US = 5000.0  # by the limits below; larger problems have the choice of the largest that is measured
FLOP_PER_US, BYTES_PER_US, LAUNCH_US = 700e6, 4e6, 5.0  # rates and launch time of an H200
MAX_COPIES = 3  # sets of tensors, where one would stay in L2 from call to call
SAMPLE_US = 300.0
MAX_CALLS_PER_SAMPLE = 12
ENQUEUE_US = 25.0  # more than the host needs for a call of a bare function
MIN_ROUNDS, MAX_ROUNDS = 3, 9


def _mean(records: list[Record]) -> dict[str, float]:
    """Return microseconds by tile: the geometric mean over the routings, for tiles that all of them have."""
    names = [name for name in records[0]["us"] if all(name in record["us"] for record in records)]
    logs = {name: sum(math.log(record["us"][name]) for record in records) / len(records) for name in names}
    return {name: float(f"{math.exp(log):.{DIGITS}g}") for name, log in logs.items()}


def _shape(key: Shape, records: list[Record]) -> dict[str, Any]:
    """Return one line of the table: a GEMM's sizes, and its times by tile and rows an expert."""
    sizes = sorted({record["rows_per_expert"] for record in records})
    means = [_mean([record for record in records if record["rows_per_expert"] == size]) for size in sizes]
    tiles = [name for name in means[0] if all(name in mean for mean in means)]
    us = {name: [mean[name] for mean in means] for name in tiles}
    return {**dict(zip(("form", "experts", "columns", "depth"), key, strict=True)), "rows_per_expert": sizes, "us": us}


def make_table(result: Result) -> dict[str, Any]:
    """Return the table: the times of every GEMM's sizes, and the stamp of their measurement."""
    shapes: dict[Shape, list[Record]] = {}
    for record in result["records"]:
        key = FORMS[record["op"]], record["experts"], record["n"], record["k"]
        shapes.setdefault(key, []).append(record)
    stamp = {name: result["stamp"][name] for name in STAMPED}
    return {"stamp": stamp, "shapes": [_shape(key, records) for key, records in sorted(shapes.items())]}


def text(table: dict[str, Any]) -> str:
    """Return the table as JSON with one line for each shape."""
    lines = ",\n".join(json.dumps(shape, separators=(",", ":")) for shape in table["shapes"])
    return f'{{"stamp": {json.dumps(table["stamp"])},\n"shapes": [\n{lines}\n]}}\n'


def write_table(source: Path = RESULTS / "tiles-h200.csv", path: Path = MEASURED) -> Path:
    """Write the table that ships, made from a result file of suite "tiles"; return the table's path.

    Raises ValueError for a result of another suite.
    """
    result = read(source)
    if result["suite"] != "tiles":
        raise ValueError(f"{source} is a result of suite {result['suite']!r}; a table is made of one of 'tiles'")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text(make_table(result)))
    return path


def rough_us(case: Case, op: str) -> float:
    """Estimate a good kernel's microseconds from the machine's limits."""
    return max(case.bytes(op, case.experts) / BYTES_PER_US, case.flop(op) / FLOP_PER_US) + LAUNCH_US


def todo(chosen: list[Candidate], options: Options) -> list[tuple[Case, Contest]]:
    """Return the pairs (case, contest) to measure, even powers of two of rows an expert first.

    So if the budget ends early, every other power of two is missing.
    """
    models = select([*PREFILL, *OTHER_MODELS], options.case)
    cases = sweep(models, options.rows_per_expert or DOUBLINGS, options.routings or EVEN_AND_SKEWED)
    found = [
        (case, contest)
        for contest in contests(chosen, options.ops or FORWARD_AND_DGRAD)
        for case in cases
        if case.bytes(contest.op, case.experts) <= MAX_BYTES and rough_us(case, contest.op) <= MAX_US
    ]
    return sorted(found, key=lambda each: (each[0].rows // each[0].experts).bit_length() % 2 == 0)


def right_kernels(case: Case, contest: Contest) -> list[str]:
    """Return the names of the kernels whose results are right on a skewed case of few rows; warn of all others."""
    small = dataclasses.replace(case, rows=CHECK_ROWS * case.experts, routing="dirichlet")
    sets = make_sets(small, contest.op, contest.spec, 1)
    return list(admitted(f"{case.name}, {contest.op}", contestants(sets, contest.competing)).calls)


def measure(case: Case, contest: Contest, right: list[str], budget_s: float) -> Record:
    """Return the record: the GEMM (columns N before the gate, depth K), its work, and each tile's median in us."""
    sets = make_sets(case, contest.op, contest.spec, MAX_COPIES)
    calls = min(math.ceil(SAMPLE_US / rough_us(case, contest.op)), MAX_CALLS_PER_SAMPLE)
    samplers = {}
    for one in (one for one in contest.competing if one.name in right):
        call = launches(one, sets)
        call(0)
        samplers[one.name] = partial(device_us, call, calls, ENQUEUE_US)
    times = in_turns(samplers, budget_s, MIN_ROUNDS, MAX_ROUNDS)
    hidden, inner = case.hidden, case.intermediate
    n, k = {"fc1": (2 * inner, hidden), "fc2": (hidden, inner), "dgrad": (hidden, 2 * inner)}[contest.op]
    of_case = {"model": case.name, "op": contest.op, "routing": case.routing, "experts": case.experts, "n": n, "k": k}
    work = {"rows_per_expert": case.rows // case.experts, **sets[0].work(sum(size > 0 for size in group_sizes(case)))}
    return {**of_case, **work, "us": {name: time["median_us"] for name, time in times.items()}}


def measure_all(waiting: list[tuple[Case, Contest]], budget_s: float) -> Iterator[Record]:
    """Yield a record for each contest that fits the budget.

    A kernel that breaks the GPU ends the sweep with a warning; records that were yielded before are kept.
    """
    deadline = time.perf_counter() + budget_s
    right: dict[tuple[str, str], list[str]] = {}
    for done, (case, contest) in enumerate(track(waiting, "tiles")):
        to_go, left = len(waiting) - done, deadline - time.perf_counter()
        if left <= 0:
            warnings.warn(f"--budget ended with {to_go} of {len(waiting)} cases to go", stacklevel=2)
            return
        key = case.name, contest.op
        try:
            if key not in right:
                right[key] = right_kernels(case, contest)
            if right[key]:
                yield measure(case, contest, right[key], left / to_go)
        except RuntimeError as failure:
            warnings.warn(f"{key} ended the sweep with {to_go} cases to go: {failure}", stacklevel=2)
            return


def run_tiles(options: Options) -> list[Record]:
    """Measure and return one record for each (model, operation, routing, rows an expert) that fits the budget."""
    chosen = candidates(open_bundles(options.bundles), options.specs or SPECS)
    records = list(measure_all(todo(chosen, options), options.budget_s))
    return sorted(records, key=lambda r: (r["op"], r["model"], r["routing"], r["rows_per_expert"]))
