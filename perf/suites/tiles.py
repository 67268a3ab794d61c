"""Every tile of a bundle at every number of rows of the models that a table of choices covers, in one short run.

What the dispatcher's rule is fitted to and held against, so breadth counts more than the third digit: few rounds, short
samples sized by the machine's limits instead of by trial, and each kernel checked once an operation and model. Here
--budget is the time of the whole suite. Numbers of rows come coarse first, so that what does not fit the budget is
every other power of two.
"""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from rich.progress import track

from cute_kernels.specs import Spec

from ..cases import EVEN_AND_SKEWED, Case, tile_cases
from ..operations import Operation, bytes_moved, flop
from ..options import Options
from ..routing import group_sizes
from ..timing import Call, Sampler, device_us, interleave
from .compare import Candidate, calls_of, candidates, checked, contests, open_bundles

FORWARD_AND_DGRAD = ("fc1", "fc2", "dgrad")
SPECS = ("grouped_glu_bf16_swiglu_concat_t*", "grouped_mm_bf16_n?_t*")
CHECK_ROWS = 48  # an expert: whole tiles and tails under skew

MAX_BYTES = 40e9  # of one set of tensors
MAX_US = 5000.0  # by the limits below; larger problems have the choice of the largest that is measured
FLOP_PER_US, BYTES_PER_US, LAUNCH_US = 700e6, 4e6, 5.0  # what an H200 reaches
ROTATION_BYTES = 2**29  # 9 times its L2
MAX_COPIES = 3
SAMPLE_US = 300.0
MAX_CALLS_PER_SAMPLE = 12
ENQUEUE_US = 25.0  # more than the host needs for a call of a bare function
MIN_ROUNDS, MAX_ROUNDS = 3, 9

Contest = tuple[Case, str, Spec, list[Candidate]]
Record = dict[str, Any]


def rough_us(case: Case, op: str) -> float:
    """About how long a good kernel takes, from the machine's limits."""
    moved, work = case_bytes(case, op), 2 * case.rows * math.prod(columns_and_depth(case, op))
    return max(moved / BYTES_PER_US, work / FLOP_PER_US) + LAUNCH_US


def columns_and_depth(case: Case, op: str) -> tuple[int, int]:
    """(N, K) of an expert's GEMM: columns of the result before the gate, and the contraction."""
    hidden, inner = case.hidden, case.intermediate
    return {"fc1": (2 * inner, hidden), "fc2": (hidden, inner), "dgrad": (hidden, 2 * inner)}[op]


def case_bytes(case: Case, op: str) -> int:
    """Every tensor of 16 bits, read or written once."""
    columns, depth = columns_and_depth(case, op)
    return 2 * (case.experts * columns * depth + case.rows * (columns + depth))


def todo(chosen: list[Candidate], options: Options) -> list[Contest]:
    """What to measure, coarse numbers of rows first."""
    cases = tile_cases(options.case, options.routings or EVEN_AND_SKEWED, options.rows_per_expert)
    found = [
        (case, *contest)
        for contest in contests(chosen, options.ops or FORWARD_AND_DGRAD)
        for case in cases
        if case_bytes(case, contest[0]) <= MAX_BYTES and rough_us(case, contest[0]) <= MAX_US
    ]
    return sorted(found, key=lambda contest: _fine(contest[0]))


def _fine(case: Case) -> bool:
    """Whether the rows an expert are an odd power of two."""
    return bool((case.rows // case.experts).bit_length() % 2 == 0)


def make_sets(case: Case, op: str, spec: Spec, device: str = "cuda") -> list[Operation]:
    """A few sets of tensors where one would stay in L2 from call to call."""
    generator = torch.Generator(device).manual_seed(case.seed)
    copies = min(math.ceil(ROTATION_BYTES / case_bytes(case, op)), MAX_COPIES)
    return [Operation(op, case, spec, generator) for _ in range(copies)]


def right_kernels(contest: Contest) -> list[Candidate]:
    """The kernels whose results are right on a skewed case of few rows; a warning for any other."""
    case, op, spec, competing = contest
    small = dataclasses.replace(case, rows=CHECK_ROWS * case.experts, routing="dirichlet")
    errors = checked(make_sets(small, op, spec)[:1], competing)
    return [candidate for candidate in competing if candidate.name in errors]


def _sampler(call: Call, calls: int) -> Sampler:
    call(0)
    return partial(device_us, call, calls, ENQUEUE_US)


def measure(contest: Contest, competing: list[Candidate], budget_s: float) -> Record:
    """One record: the median of each tile in microseconds."""
    case, op, spec, _ = contest
    sets = make_sets(case, op, spec)
    calls = min(math.ceil(SAMPLE_US / rough_us(case, op)), MAX_CALLS_PER_SAMPLE)
    samplers = {name: _sampler(call, calls) for name, call in calls_of(sets, competing).items()}
    times = interleave(samplers, budget_s, MIN_ROUNDS, MAX_ROUNDS)
    return record(contest, sets[0], {name: summary.median_us for name, summary in times.items()})


def record(contest: Contest, made: Operation, us: dict[str, float]) -> Record:
    """The GEMM as the dispatcher knows it, its limits' numerators, and microseconds by tile."""
    case, op = contest[:2]
    columns, depth = columns_and_depth(case, op)
    active = sum(size > 0 for size in group_sizes(case))
    return {
        "model": case.name,
        "op": op,
        "routing": case.routing,
        "experts": case.experts,
        "n": columns,
        "k": depth,
        "rows_per_expert": case.rows // case.experts,
        "flop": flop(made, case.rows),
        "bytes": bytes_moved(made, active),
        "us": us,
    }


def sweep(waiting: list[Contest], budget_s: float) -> Iterator[Record]:
    """A record for each contest that the budget has room for. A kernel that breaks the GPU ends the sweep with a
    warning: what was measured before is kept.
    """
    deadline = time.perf_counter() + budget_s
    right: dict[tuple[str, str], list[Candidate]] = {}
    for done, contest in enumerate(track(waiting, "tiles")):
        to_go, left = len(waiting) - done, deadline - time.perf_counter()
        if left <= 0:
            warnings.warn(f"--budget ended with {to_go} of {len(waiting)} cases to go", stacklevel=2)
            return
        key = contest[0].name, contest[1]
        try:
            if key not in right:
                right[key] = right_kernels(contest)
            if right[key]:
                yield measure(contest, right[key], left / to_go)
        except RuntimeError as failure:
            warnings.warn(f"{key} ended the sweep with {to_go} cases to go: {failure}", stacklevel=2)
            return


def run_tiles(options: Options) -> list[Record]:
    """One record for each (model, operation, routing, rows an expert) that the budget has room for."""
    chosen = candidates(open_bundles(options.bundles), options.specs or SPECS)
    records = list(sweep(todo(chosen, options), options.budget_s))
    return sorted(records, key=lambda r: (r["op"], r["model"], r["routing"], r["rows_per_expert"]))
