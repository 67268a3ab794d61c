"""Named kernels of one or several bundles against each other and against dense cuBLAS, without the dispatcher.

For developers of kernels and tuning tables. A form is a spec without its tiles. An `Operation` holds one call of an
operator on a case's tensors, made for one form. Every kernel of that form runs on the same tensors by its exported
function, with arguments prepared beforehand. Each result is compared with the reference before anything is timed.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels import specs
from cute_kernels.specs import GroupedMlpSpec, Spec
from cute_kernels.tiles import TileConfig
from ffi_bridge import loader, manifest
from glulam.calls.launch import launch_nothing
from glulam.choose.kernels import Fixed
from glulam.choose.problem import Problem
from glulam.choose.shipped import family_of
from glulam.tuner.tensors import calls_of
from glulam.tuner.timing import Call

from ..cases import EVEN_AND_SKEWED, PREFILL, Case, models, sweep
from ..cells import DENSE
from ..contest import Contestant, Results, contest, listed, records_of, relative_error, rotating
from ..mlp import copies_needed, normals, offsets
from ..options import Options, select_ops
from ..results import Record
from ..routing import group_sizes

ARCH = "sm_90a"
MAX_RELATIVE_ERROR = 0.02  # one rounding of a result to 16 bits is about 0.002; a wrong group or layout about 1


class Kind(NamedTuple):
    """An operation of a layer.

    Attributes:
        spec: class of its kernels' specs.
        fields: {field of the spec: the value that it must have}.
        operator: the operator's name.
        widths: in_features, intermediate and out_features of its Problem, as keys "h", "i", "2i", or "" for 0.
    """

    spec: type[Any]
    fields: dict[str, Any]
    operator: str
    widths: tuple[str, str, str]

    def serves(self, spec: Any) -> bool:
        """Return whether a kernel computes the operation, without adapters, and an MLP without its preactivation."""
        if self.spec is GroupedMlpSpec:
            return isinstance(spec, GroupedMlpSpec) and not spec.fc1.save_preact
        wanted = {"adapted": False, **self.fields}
        return type(spec) is self.spec and all(getattr(spec, name, False) == value for name, value in wanted.items())


_MM, _16_BIT = {"in_halves": False}, {"operands": "16bit"}
OPERATIONS = {
    "fc1": Kind(specs.GroupedGluSpec, {}, "grouped_glu", ("h", "i", "")),
    "fc2": Kind(specs.GroupedMmSpec, {**_MM, "transpose_w": False}, "grouped_mm", ("i", "", "h")),
    "mlp": Kind(GroupedMlpSpec, {}, "grouped_mlp", ("h", "i", "h")),
    "dglu": Kind(specs.GroupedDgluSpec, {"dgrad": None}, "grouped_dglu", ("h", "i", "")),
    "dgrad": Kind(specs.GroupedMmSpec, {**_MM, "transpose_w": True}, "grouped_mm", ("2i", "", "h")),
    "dw1": Kind(specs.GroupedWgradSpec, _16_BIT, "grouped_wgrad", ("h", "", "2i")),
    "dw2": Kind(specs.GroupedWgradSpec, _16_BIT, "grouped_wgrad", ("i", "", "h")),
}
"""The operations by name; dgrad and dw1 belong to a gated w1."""


def problem_of(op: str, case: Case, spec: Any) -> Problem:
    """Return the `Problem` (sizes and options) of an operation in a case, with the options of `spec`."""
    kind, sizes = OPERATIONS[op], {"h": case.hidden, "i": case.intermediate, "2i": 2 * case.intermediate, "": 0}
    in_features, inner, out_features = (sizes[name] for name in kind.widths)
    form = spec.fc1 if isinstance(spec, GroupedMlpSpec) else spec
    same = [name for name in ("save_preact", "transpose_w", "out_dtype") if hasattr(form, name)]
    fields: dict[str, Any] = {name: getattr(form, name) for name in same}
    if hasattr(form, "activation"):
        fields["activation"] = specs.ACTIVATION_FORMS[form.activation][0]
        fields["glu_layout"] = specs.LAYOUT_FORMS[form.glu_layout][0]
    return Problem(kind.operator, spec.dtype, case.rows, case.experts, in_features, inner, out_features, **fields)


class Operation:
    """One set of tensors of an operation: random inputs, and results that are filled with NaN.

    Inputs are scaled so that results have scale 1.

    Attributes:
        call: the operator's call.
        values: arguments of the exported functions of the form.
        weight: each tensor [E, ., .] that is read or written.
        moved: every other tensor that is read or written.
        results: tensors that a call writes.
    """

    def __init__(self, op: str, case: Case, spec: Spec, generator: torch.Generator) -> None:
        self.problem, self.rows = problem_of(op, case, spec), case.rows
        random = normals(generator, getattr(torch, self.problem.dtype))
        (self.call,) = calls_of(self.problem, random, offsets(group_sizes(case), str(generator.device))[0])
        bare = self.call.bare(self.problem, Fixed(spec, launch_nothing))
        self.values, self.results, self._kept = bare.values, bare.results, bare.memory
        self.forget()
        tensors = [*(tensor for name, tensor in self.call.tensors() if name != "offs"), *self.results]
        self.weight = tuple(tensor for tensor in tensors if tensor.dim() == 3)
        mid = [value for argument, value in zip(bare.arguments, bare.values, strict=True) if argument.name == "mid"]
        self.moved = (*(tensor for tensor in tensors if tensor.dim() < 3), *mid, *mid)  # it is written and read

    def forget(self) -> None:
        for result in self.results:
            result.fill_(torch.nan)

    def run(self, function: Callable[..., Any]) -> Results:
        function(*self.values)
        return self.results

    def expected(self) -> Results:
        """Return the reference's results, in the order of `results`."""
        return tuple(one for one in listed(self.call.reference(self.problem)) if one is not None)

    def dense(self) -> object:
        """Compute one matrix of the same FLOP with cuBLAS: no groups, no activation."""
        call, transpose_w = self.call, self.problem.transpose_w

        def mm(x: Tensor, weights: Tensor, transpose_w: bool = transpose_w) -> Tensor:
            return torch.mm(x, weights[0] if transpose_w else weights[0].mT)

        if self.problem.op == "grouped_wgrad":
            return torch.mm(call.dy.mT, call.x)
        if self.problem.op == "grouped_dglu":
            return mm(call.dy, call.w2, not transpose_w)
        if self.problem.op == "grouped_mlp":
            return mm(call.x, call.w1), mm(self.moved[-1], call.w2)
        return mm(call.x, self.weight[0])

    def work(self, active: int) -> dict[str, int]:
        """Return {"flop": useful FLOP, "bytes": fewest bytes}.

        The bytes are the weights of `active` experts and all other tensors, each counted once.
        """
        weights = sum(active * weight[0].nbytes for weight in self.weight)
        flop = sum(2 * self.rows * weight[0].numel() for weight in self.weight)
        return {"flop": flop, "bytes": weights + sum(tensor.nbytes for tensor in self.moved)}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An exported function, with the name that tables give it."""

    name: str
    spec: Spec
    function: Callable[..., Any]


def open_bundles(folders: tuple[str, ...]) -> dict[str, loader.Bundle]:
    """Return the bundles (libraries of compiled kernels) by their folders; the usual bundle if no folder is named.

    Bundles may be built from other sources than the installed ones, so that builds can be compared. Raises BundleError
    if a bundle is missing or unreadable.
    """
    roots = [loader.bundle_root(folder) for folder in folders or (None,)]
    return {str(root): loader.Bundle(root / ARCH, manifest.read(root / ARCH)) for root in roots}


def tiles(spec: Spec) -> str:
    """Return the names of the tiles, by which kernels of one form differ."""
    if isinstance(spec, GroupedMlpSpec):
        return f"{spec.fc1.tile.name} + {spec.fc2.tile.name}"
    return getattr(spec, "tile", TileConfig()).name


def form_name(spec: Spec) -> str:
    """Return a spec's name without tiles."""
    return family_of(spec).name.replace(f"_{TileConfig().name}", "")


def candidates(bundles: dict[str, Any], patterns: Sequence[str]) -> list[Candidate]:
    """Return the functions whose names match one of the patterns, in the order of patterns, then of bundles.

    Raises ValueError, with the pattern, if a pattern adds no function.
    """
    found: dict[tuple[str, str], Candidate] = {}
    for pattern in patterns:
        before = len(found)
        for folder, bundle in bundles.items():
            for name in fnmatch.filter(bundle.names(), pattern):
                spec = specs.from_dict(bundle.manifest.functions[name].spec)
                label = tiles(spec) + (f" in {folder}" if len(bundles) > 1 else "")
                found.setdefault((folder, name), Candidate(label, spec, bundle.function(name)))
        if len(found) == before:
            raise ValueError(f"--specs {pattern!r} adds no function of the bundle {', '.join(bundles)}")
    return list(found.values())


class Contest(NamedTuple):
    """The kernels (`competing`) of one form, a spec without its tiles, that compute one operation of a layer."""

    op: str
    spec: Spec
    competing: list[Candidate]


def contests(chosen: list[Candidate], ops: tuple[str, ...]) -> list[Contest]:
    """Return a contest for each pair of an operation in `ops` and a form (with 16-bit operands) that computes it.

    Raises ValueError if no kernel computes any of `ops`.
    """
    wanted, forms = select_ops(tuple(OPERATIONS), ops), dict[Spec, list[Candidate]]()
    for one in chosen:
        if specs.operands_of(one.spec) == "16bit":
            forms.setdefault(family_of(one.spec), []).append(one)
    found = [Contest(op, form, of) for op in wanted for form, of in forms.items() if OPERATIONS[op].serves(form)]
    if not found:
        raise ValueError(f"none of the chosen functions computes any of: {', '.join(wanted)}")
    return found


def make_sets(case: Case, op: str, spec: Spec, most: int = 8, device: str = "cuda") -> list[Operation]:
    """Return so many sets of tensors, at most `most`, that calls which alternate between them find nothing in L2."""
    generator = torch.Generator(device).manual_seed(case.seed)
    sets = [Operation(op, case, spec, generator)]
    copies = min(copies_needed(sets[0].work(case.experts)["bytes"]), most)
    return sets + [Operation(op, case, spec, generator) for _ in range(copies - 1)]


def launches(candidate: Candidate, sets: list[Operation]) -> Call:
    return rotating(lambda one: one.run(candidate.function), sets)


def contestants(sets: list[Operation], competing: list[Candidate]) -> Iterator[Contestant]:
    """Yield each kernel as a contestant. Buffers hold NaN before its checked call, so unwritten elements are errors."""
    wanted = sets[0].expected()

    def build(one: Candidate) -> Call:
        sets[0].forget()
        return launches(one, sets)

    for one in competing:
        yield Contestant(one.name, partial(build, one), lambda got: relative_error(got, wanted), MAX_RELATIVE_ERROR)


def _measure(case: Case, of: Contest, budget_s: float) -> list[Record]:
    sets, sizes = make_sets(case, of.op, of.spec), group_sizes(case)
    every = [*contestants(sets, of.competing)]
    if not case.decode:  # where weights are all that counts, one matrix says nothing
        every.append(Contestant(DENSE, lambda: rotating(Operation.dense, sets)))
    fields: Record = {"op": of.op, "form": form_name(of.spec), **sets[0].work(sum(size > 0 for size in sizes))}
    record = contest(case, every, budget_s, sizes, where=of.op, **fields)
    return [record] if record["errors"] else []


def run_compare(options: Options) -> list[Record]:
    """Measure and return one record for each (case, operation, form)."""
    if not options.specs:
        raise ValueError("compare needs --specs: names of exported functions, or patterns such as 'grouped_mm_bf16_*'")
    found = contests(candidates(open_bundles(options.bundles), options.specs), options.ops)
    cases = sweep(models(options.case, PREFILL), options.rows_per_expert, options.routings or EVEN_AND_SKEWED)
    return records_of("compare", [partial(_measure, case, of) for of in found for case in cases], options.budget_s)
