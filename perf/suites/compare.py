"""Named kernels of one or several bundles against each other and against dense cuBLAS, without the dispatcher.

For whoever writes kernels and tuning tables. Kernels of one form (the same but for tiles) compete on the same tensors;
each result is compared with the reference before anything is timed.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from cute_kernels.specs import GroupedMlpSpec, Spec, from_dict, operands_of
from cute_kernels.tiles import TileConfig
from ffi_bridge import loader, manifest
from glulam.choose.shipped import family_of

from ..cases import EVEN_AND_SKEWED, Case, compare_cases
from ..contest import Wrong, make_record, or_left_out, records_of
from ..operations import OPERATIONS, Operation, bytes_moved, flop
from ..options import Options, select_ops
from ..problem import MAX_COPIES, ROTATION_BYTES
from ..results import Record
from ..routing import group_sizes
from ..timing import Call, measure_device
from ..training import relative_error

ARCH = "sm_90a"
DENSE = "dense"
MAX_RELATIVE_ERROR = 0.02  # one rounding of a result to 16 bits is about 0.002; a wrong group or layout about 1


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An exported function under the name that tables give it."""

    name: str
    spec: Spec
    function: Callable[..., Any]


def open_bundles(folders: tuple[str, ...]) -> dict[str, loader.Bundle]:
    """Bundles by their folder; the usual one where none is named. From whatever sources they were built: comparing
    builds is what this is for. Raises BundleError where one is missing or unreadable.
    """
    roots = [loader.bundle_root(folder) for folder in folders or (None,)]
    return {str(root): loader.Bundle(root / ARCH, manifest.read(root / ARCH)) for root in roots}


def tiles(spec: Spec) -> str:
    """What tells kernels of one form apart."""
    if isinstance(spec, GroupedMlpSpec):
        return f"{spec.fc1.tile.name} + {spec.fc2.tile.name}"
    return getattr(spec, "tile", TileConfig()).name


def form_name(spec: Spec) -> str:
    """A spec's name without tiles."""
    return family_of(spec).name.replace(f"_{TileConfig().name}", "")


def candidates(bundles: dict[str, Any], patterns: tuple[str, ...]) -> list[Candidate]:
    """The functions whose names match one of the patterns, in the order of bundles and patterns.

    Raises ValueError, naming the pattern, where one matches nothing in any bundle.
    """
    found: dict[tuple[str, str], Candidate] = {}
    for pattern in patterns:
        before = len(found)
        for folder, bundle in bundles.items():
            for name in fnmatch.filter(bundle.names(), pattern):
                spec = from_dict(bundle.manifest.functions[name].spec)
                label = tiles(spec) + (f" in {folder}" if len(bundles) > 1 else "")
                found.setdefault((folder, name), Candidate(label, spec, bundle.function(name)))
        if len(found) == before:
            raise ValueError(f"--specs {pattern!r} adds no function of the bundle {', '.join(bundles)}")
    return list(found.values())


def by_form(chosen: list[Candidate]) -> dict[Spec, list[Candidate]]:
    groups: dict[Spec, list[Candidate]] = {}
    for candidate in chosen:
        groups.setdefault(family_of(candidate.spec), []).append(candidate)
    return groups


def contests(chosen: list[Candidate], ops: tuple[str, ...]) -> list[tuple[str, Spec, list[Candidate]]]:
    """(operation, form, its kernels) for each operation of a layer that a form of 16-bit operands computes.

    Raises ValueError where no kernel computes any of `ops`.
    """
    wanted = select_ops(tuple(OPERATIONS), ops)
    groups = [(spec, group) for spec, group in by_form(chosen).items() if operands_of(spec) == "16bit"]
    found = [(op, spec, group) for op in wanted for spec, group in groups if OPERATIONS[op].serves(spec)]
    if not found:
        raise ValueError(f"none of the chosen functions computes any of: {', '.join(wanted)}")
    return found


def make_sets(case: Case, op: str, spec: Spec, device: str = "cuda") -> list[Operation]:
    """As many sets of tensors as keep repeated calls out of L2."""
    generator = torch.Generator(device).manual_seed(case.seed)
    sets = [Operation(op, case, spec, generator)]
    copies = min(max(math.ceil(ROTATION_BYTES / bytes_moved(sets[0], case.experts)), 1), MAX_COPIES)
    return sets + [Operation(op, case, spec, generator) for _ in range(copies - 1)]


def checked(sets: list[Operation], competing: list[Candidate]) -> dict[str, float]:
    """The relative error of each kernel against the reference. A kernel that fails or is wrong is left out with a
    warning: its time would say nothing.
    """
    wanted = sets[0].expected()
    errors = {}
    for candidate in competing:
        for result in sets[0].results:
            result.fill_(torch.nan)
        with or_left_out(candidate.spec.name):
            candidate.function(*sets[0].values)
            error = relative_error(sets[0].results, wanted)
            if not error <= MAX_RELATIVE_ERROR:
                raise Wrong(f"its relative error is {error:.2g}")
            errors[candidate.name] = error
    return errors


def _call(function: Callable[..., Any], values: list[tuple[Any, ...]]) -> Call:
    return lambda number: function(*values[number % len(values)])


def calls_of(sets: list[Operation], competing: list[Candidate]) -> dict[str, Call]:
    """Each kernel's launch by its name, in rotation over the sets."""
    return {candidate.name: _call(candidate.function, [one.values for one in sets]) for candidate in competing}


def _dense(sets: list[Operation], number: int) -> object:
    return sets[number % len(sets)].dense()


def _record(case: Case, op: str, spec: Spec, competing: list[Candidate], budget_s: float) -> Record | None:
    sets = make_sets(case, op, spec)
    errors = checked(sets, competing)
    calls = calls_of(sets, [c for c in competing if c.name in errors])
    if not calls:
        return None
    if not case.decode:  # where weights are all that counts, one matrix says nothing
        calls[DENSE] = partial(_dense, sets)
    times = measure_device(calls, budget_s)
    sizes = group_sizes(case)
    moved = bytes_moved(sets[0], sum(size > 0 for size in sizes))
    work = {"flop": flop(sets[0], case.rows), "bytes": moved}
    return make_record(case, times, sizes, op=op, form=form_name(spec), **work, errors=errors)


def run_compare(options: Options) -> list[Record]:
    """One record for each (case, operation, form)."""
    if not options.specs:
        raise ValueError("compare needs --specs: names of exported functions, or patterns such as 'grouped_mm_bf16_*'")
    competing = contests(candidates(open_bundles(options.bundles), options.specs), options.ops)
    cases = compare_cases(options.case, options.routings or EVEN_AND_SKEWED, options.rows_per_expert)
    todo = [(case, *contest) for contest in competing for case in cases]

    def measure(contest: tuple[Case, str, Spec, list[Candidate]]) -> list[Record]:
        record = _record(*contest, options.budget_s / len(todo))
        return [record] if record else []

    return records_of("compare", todo, measure)
