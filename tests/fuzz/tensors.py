"""Tensors of a problem, with NaN wherever a call must not read.

T rows in groups of E experts, widths H and I (2I for a gated preactivation), N tokens of k choices. NaN fills rows
after the last group, padding between rows, and weights and biases of experts without rows; indices after the last group
are out of range.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from support.inputs import apart, scattered
from torch import Tensor

import glulam
from glulam import GateUp
from glulam.formats.scaled import Parts, Scaled
from glulam.validate.formats import values_of_all_magnitudes
from glulam.validate.inputs import randn, rows_of, scales_of, weights_of

from . import declared
from .problem import Problem

NOWHERE = 2**30
PADDING = 8
INDEXED = {"rows": ("x", "dy"), "x_rows": ("x",), "dy_rows": ("dy",)}
"""For each argument that holds indices: the matrices from which it selects rows."""
STREAMS = 4
COEFFICIENTS = STREAMS * (STREAMS + 2)
RANK, LORA_SCALE = 8, 0.5


class Build:
    """A problem and its sizes under short names, for the functions that make tensors."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.call = problem, problem.call
        self.dtype = declared.DTYPES[problem.dtype]
        self.experts, self.rows, self.total = problem.experts, problem.rows, problem.total
        self.hidden, self.inter = problem.hidden, problem.inter
        self.both = problem.inter * (1 + declared.is_gated(problem))
        self.is_transposed = bool(problem.options.get("transpose_w"))
        self.k = problem.options.get("k", 2)
        self.tokens = -(-self.rows // self.k) + problem.tail
        self.unused = [expert for expert, size in enumerate(problem.sizes) if not size]

    def seed(self, place: int) -> int:
        return 1000 * self.problem.seed + place

    def matrix(self, name: str, columns: int, place: int) -> Tensor:
        """Return a matrix [T, columns], or the matrix from which indices select rows; padded if the problem says so."""
        is_indexed = any(rows in self.problem.given and name in of for rows, of in INDEXED.items())
        count, used = (max(self.rows, 1),) * 2 if is_indexed else (self.total, self.rows)
        made = rows_of(count, columns, self.dtype, used, self.seed(place))
        return with_padding(made) if self.problem.padded else made

    def experts_of(self, rows: int, columns: int, place: int) -> Tensor:
        """Return weights [E, rows, columns], or transposed, with NaN for experts without rows."""
        made = weights_of(self.experts, rows, columns, self.dtype, self.seed(place))
        made = made.mT.contiguous() if self.is_transposed else made
        return made if self.is_quantised else poisoned(made, self.unused)

    @property
    def is_quantised(self) -> bool:
        """Return True if weights are quantised as a whole, which also reads experts without rows."""
        return self.problem.recipe != "bf16" or self.problem.form not in ("packed", "list", "GateUp")

    def bias(self, width: int, place: int) -> Any:
        made = weights_of(self.experts, 1, width, self.dtype, self.seed(place))[:, 0].contiguous()
        made = poisoned(made, self.unused)
        return scattered(made) if self.problem.form == "list" else made

    def scale(self, place: int) -> Tensor:
        made = scales_of(self.total, self.rows, self.seed(place))
        return made.to(self.dtype) if self.dtype.itemsize > 4 else made

    def indices(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed(9))
        made = torch.randint(0, max(self.rows, 1), (self.total,), dtype=torch.int32, generator=generator)
        made[self.rows :] = NOWHERE
        return made

    def choices(self) -> Tensor:
        """Return choices [N, k], shuffled: each expert as often as `sizes` says, and -1."""
        ids = [expert for expert, size in enumerate(self.problem.sizes) for _ in range(size)]
        ids += [-1] * (self.tokens * self.k - len(ids))
        random.Random(self.seed(20)).shuffle(ids)
        return torch.tensor(ids, dtype=torch.int32).view(self.tokens, self.k)

    def of_tokens(self, *shape: int, place: int) -> Tensor:
        return randn(self.tokens, *shape, seed=self.seed(place)).to(self.dtype)

    def lead(self) -> int:
        """The number of tokens of hyper-connections."""
        return max(self.total, 1)


def with_padding(made: Tensor) -> Tensor:
    """Copy rows into wider memory, with NaN between the rows."""
    memory = made.new_full((made.shape[0], made.shape[1] + PADDING), math.nan)
    memory[:, : made.shape[1]] = made
    return memory[:, : made.shape[1]]


def poisoned(made: Tensor, experts: list[int]) -> Tensor:
    """Overwrite the parts of some experts with NaN, or with bytes of ones."""
    for expert in experts:
        if made.is_floating_point() and made.itemsize > 1:
            made[expert] = math.nan
        else:
            made[expert].view(torch.uint8).fill_(0xFF)
    return made


def stored(problem: Problem, name: str, w: Tensor, unused: list[int]) -> Any:
    """Return a weight [E, N, K] as an object of the class that `form` names."""
    recipe = problem.recipe if problem.recipe != "bf16" else declared.recipe_of_form(problem.form)
    form = form_for(problem, name, w, recipe)
    made = (
        form.quantized_tensor(w) if form.kind.__name__ == problem.form else form.tensor_of(form.made(Parts(w), False))
    )
    assert type(made).__name__ == problem.form
    if made.reads_as == form.name or form.is_ready(made.parts):  # what is prepared first is read as a whole
        for part in made.names:
            poisoned(getattr(made, part), unused)
    return made


def form_for(problem: Problem, name: str, w: Any, recipe: str) -> Any:
    """Return the Form of a weight; the two halves of a gated w1 may have separate scales."""
    form = declared.form_of(recipe)
    is_halved = name == "w1" and declared.is_gated(problem) and problem.options.get("glu_layout", "concat") == "concat"
    return form.of_gate(w.shape[-2]) if is_halved else form


def _weight(name: str, rows: Callable[[Build], int], columns: Callable[[Build], int], place: int) -> Any:
    def make(b: Build) -> Any:
        packed, form = b.experts_of(rows(b), columns(b), place), b.problem.form
        if form == "list":
            return scattered(packed)
        if form == "GateUp" and name == "w1":
            return GateUp(*apart(packed))
        if form in ("packed", "GateUp"):
            return packed
        return stored(b.problem, name, packed, b.unused)

    return make


def _expert_map(b: Build) -> Tensor:
    """Return an expert map: the local expert of each of E + 2 ids; two ids have none."""
    places = [*range(b.experts), -1, -1]
    random.Random(b.seed(21)).shuffle(places)
    return torch.tensor(places, dtype=torch.int32)


def _ids(b: Build) -> Tensor:
    """Return choices as ids, according to the problem's expert map or `first`."""
    ids = b.choices()
    if "expert_map" in b.problem.given:
        of_place = torch.full((b.experts + 1,), -1, dtype=torch.int32)
        for one, place in enumerate(_expert_map(b).tolist()):
            of_place[place] = one  # of -1 the last
        return of_place[ids.long()]
    return ids.where(ids < 0, ids + b.problem.options.get("first", 0))


def _lora(b: Build) -> Any:
    return None


def _out_of_experts(b: Build) -> Any:
    """Return an output that results are added to, or NaN; experts without rows are overwritten by zeros."""
    dtype = torch.float32 if b.problem.options.get("out_dtype") == "float32" else b.dtype
    made = weights_of(b.experts, b.inter, b.hidden, dtype, b.seed(12))
    if not b.problem.options.get("accumulate"):
        mask = _mask(b) if "mask" in b.problem.given else torch.zeros(b.experts, dtype=torch.bool)
        made[~mask] = math.nan
    return list(made.unbind()) if b.problem.form == "list" else made


def _mask(b: Build) -> Tensor:
    return (torch.arange(b.experts) + b.problem.seed) % 2 == 0


def _out(width: Callable[[Build], int]) -> Callable[[Build], Tensor]:
    def make(b: Build) -> Tensor:
        made = torch.full((b.total, width(b)), math.nan, dtype=b.dtype)
        return with_padding(made) if b.problem.padded else made

    return make


def _quantised_input(b: Build) -> Tensor:
    return values_of_all_magnitudes((max(b.total, 1), b.hidden), b.dtype)


def _streams(b: Build) -> Tensor:
    return randn(b.lead(), STREAMS, b.hidden, seed=b.seed(30)).to(b.dtype)


def _float32(*shape: int, place: int, scale: float = 1.0) -> Callable[[Build], Tensor]:
    """Return a function that makes a float32 parameter of hyper-connections.

    In `shape`, 0 stands for the number of tokens, -1 for n H, and -2 for H.
    """

    def make(b: Build) -> Tensor:
        sizes = [{0: b.lead(), -1: STREAMS * b.hidden, -2: b.hidden}.get(size, size) for size in shape]
        return randn(*sizes, seed=b.seed(place)) * scale / (math.sqrt(sizes[-1]) if -1 in shape[1:] else 1.0)

    return make


def _low(width: str, contracts: bool) -> dict[str, Any]:
    def low_w(b: Build) -> Tensor:
        size, contracts_rows = getattr(b, width), b.is_transposed != contracts
        made = poisoned(weights_of(b.experts, size, RANK, b.dtype, b.seed(15)), b.unused)
        return made.mT.contiguous() if contracts_rows else made

    return {"low": lambda b: rows_of(b.total, RANK, b.dtype, b.rows, b.seed(14)), "low_w": low_w}


def _logits(b: Build) -> Tensor:
    return randn(b.tokens, b.experts, seed=b.seed(22)).to(b.dtype)


SHARED: dict[str, Callable[[Build], Any]] = {
    "x": lambda b: b.matrix("x", b.hidden, 1),
    "dy": lambda b: b.matrix("dy", b.hidden, 2),
    "preact": lambda b: rows_of(b.total, b.both, b.dtype, b.rows, b.seed(3)),
    "w": _weight("w", lambda b: b.inter, lambda b: b.hidden, 4),
    "w1": _weight("w1", lambda b: b.both, lambda b: b.hidden, 5),
    "w2": _weight("w2", lambda b: b.hidden, lambda b: b.inter, 6),
    "bias": lambda b: b.bias(b.inter, 7),
    "b1": lambda b: b.bias(b.both, 8),
    "b2": lambda b: b.bias(b.hidden, 10),
    "row_scale": lambda b: b.scale(11),
    "bias_scale": lambda b: b.scale(13),
    "rows": Build.indices, "x_rows": Build.indices, "dy_rows": Build.indices,
    "mask": _mask,
    "ids": _ids,
    "weights": lambda b: randn(b.tokens, b.k, seed=b.seed(23)).abs() + 0.1,
    "expert_map": _expert_map,
    "logits": _logits,
    "num_tokens": lambda b: torch.tensor([b.tokens - b.problem.tail], dtype=torch.int32),
    "residual": lambda b: b.of_tokens(b.hidden, place=24),
    "y": lambda b: randn(b.tokens * b.k, b.hidden, seed=b.seed(25)).to(b.dtype),
    "h_pre": _float32(0, STREAMS, place=31), "h_post": _float32(0, STREAMS, place=32),
    "h_res": _float32(0, STREAMS, STREAMS, place=33),
    "weight": _float32(COEFFICIENTS, -1, place=34), "norm_weight": _float32(-1, place=35),
    **{f"alpha_{name}": _float32(1, place=36) for name in ("pre", "post", "res")},
    "out": _out(lambda b: b.hidden),
    "routing": lambda b: None,  # made of ids and weights, or logits, within the call
    "lora": _lora,  # an option that says which matrices there are
}  # fmt: skip
LAYERS = ("moe", "moe_of_choices", "permute")
OWN: dict[str, dict[str, Callable[[Build], Any]]] = {
    **{name: {"x": lambda b: b.of_tokens(b.hidden, place=1), "out": lambda b: torch.full(
        (b.tokens, b.hidden), math.nan, dtype=b.dtype)} for name in (*LAYERS, "combine")},
    "grouped_mm": {"out": _out(lambda b: b.inter)},
    "grouped_glu": {"bias": SHARED["b1"], "out": _out(lambda b: b.inter)},
    "grouped_wgrad": {"dy": lambda b: b.matrix("dy", b.inter, 2), "out": _out_of_experts},
    "adapted_mm": {**_low("inter", False), "out": _out(lambda b: b.inter)},
    "adapted_glu": {**_low("both", False), "bias": SHARED["b1"]},
    "adapted_dglu": _low("inter", True),
    "route": {"bias": _float32(1, place=26)},
    "sinkhorn": {"logits": SHARED["h_res"], "out": lambda b: torch.empty(b.lead(), STREAMS, STREAMS)},
    "aggregate": {"x": _streams, "out": lambda b: torch.empty(b.lead(), b.hidden, dtype=b.dtype)},
    "post_mix": {"residual": _streams, "x": lambda b: randn(b.lead(), b.hidden, seed=b.seed(38)).to(b.dtype),
                 "bias": _float32(-2, place=39), "out": lambda b: torch.empty(
                     b.lead(), STREAMS, b.hidden, dtype=b.dtype)},
    **{name: {"x": _streams, "bias": _float32(COEFFICIENTS, place=37), "out": lambda b: tuple(
        torch.empty(b.lead(), *shape) for shape in ((STREAMS,), (STREAMS,), (STREAMS, STREAMS)))}
       for name in ("pre", "project")},
    "boundary": {
        "streams": _streams, "y": lambda b: randn(b.lead(), b.hidden, seed=b.seed(38)).to(b.dtype),
        "pre": SHARED["h_pre"], "post": SHARED["h_post"], "comb": SHARED["h_res"], "scale": _float32(3, place=36),
        "base": _float32(COEFFICIENTS, place=37), "norm_weight": _float32(-2, place=35),
    },
    "quantize_mxfp8": {"x": _quantised_input, "out": lambda b: None},
    **{name: {"w": lambda b: weights_of(b.experts, b.inter, b.hidden, b.dtype, b.seed(4)), "out": lambda b: None}
       for name in ("quantize_mxfp4", "quantize_nvfp4", "quantize_fp8_block", "prepare_mxfp8_weight",
                    "prepare_mxfp4_weight")},
    "mxfp8_of_square_blocks": {
        "data": lambda b: randn(b.experts, b.inter, b.hidden, seed=b.seed(4)).to(torch.float8_e4m3fn),
        "scale": lambda b: torch.randint(
            120, 130, (b.experts, b.inter // 32, b.hidden // 32), dtype=torch.uint8,
            generator=torch.Generator().manual_seed(b.seed(5))).view(torch.float8_e8m0fnu),
    },
}  # fmt: skip
OWN["route"]["bias"] = lambda b: randn(b.experts, seed=b.seed(26))
MAKERS = {
    **{("", name): make for name, make in SHARED.items()},
    **{(call, name): make for call, makers in OWN.items() for name, make in makers.items()},
}


def group_sizes(problem: Problem) -> dict[str, Any]:
    """Return offs or splits, in the form that the problem asks for."""
    kind, sizes = problem.groups, list(problem.sizes)
    if kind == "offs":
        return {"offs": torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32)}
    if kind == "splits_list":
        return {"splits": sizes}
    return {"splits": torch.tensor(sizes, dtype=getattr(torch, kind.removeprefix("splits_")))}


def _wanted(problem: Problem) -> Iterator[str]:
    """Yield the names of the tensors to make; for a routing, its parts' names."""
    optional = declared.optional_of(problem.call)
    for name in declared.parameters(problem.call):
        if declared.is_option(problem.call, name) or name in ("offs", "splits"):
            continue
        if name in optional and name not in problem.given:
            continue
        if name == "routing":
            yield from ("logits",) if problem.call == "load_balancing_loss" else ("ids", "weights")
        else:
            yield name


def tensors_of(problem: Problem) -> dict[str, Any]:
    """Return all tensors of a call by name, on the CPU."""
    b, given = Build(problem), {}
    for name in _wanted(problem):
        make = MAKERS.get((problem.call, name)) or MAKERS[("", name)]
        given[name] = make(b)
    if "splits" in declared.parameters(problem.call) or "offs" in problem.given:
        given.update(group_sizes(problem))
    if layers := problem.options.get("lora"):
        shapes = {"a1": (RANK, b.hidden), "b1": (b.both, RANK), "a2": (RANK, b.inter), "b2": (b.hidden, RANK)}
        for place, (name, shape) in enumerate(shapes.items()):
            if name[1] in layers:
                made = weights_of(b.experts, *shape, b.dtype, b.seed(40 + place))
                given[f"lora_{name}"] = poisoned(made, b.unused)
    return {name: value for name, value in given.items() if value is not None}


def values(value: Any) -> Any:
    """Return the tensors of an argument as a list."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Scaled):
        return [getattr(value, name) for name in value.names]
    return [one for one in value if isinstance(one, Tensor)] if isinstance(value, (list, tuple)) else []


def arguments(problem: Problem, given: dict[str, Any]) -> dict[str, Any]:
    """Return the function's arguments, made from a problem's tensors and options."""
    named = dict(given)
    options = {name: value for name, value in problem.options.items() if name in declared.parameters(problem.call)}
    if options.get("out_dtype"):
        options["out_dtype"] = getattr(torch, options["out_dtype"])
    lora = {name: named.pop(f"lora_{name}") for name in ("a1", "b1", "a2", "b2") if f"lora_{name}" in named}
    if "lora" in options:
        adapter = (
            glulam.ExpertLora(*[lora.get(name) for name in ("a1", "b1", "a2", "b2")], LORA_SCALE) if lora else None
        )
        options["lora"] = adapter
    names = declared.parameters(problem.call)
    if "routing" in names:
        if "logits" in named:
            named["routing"] = glulam.route(named.pop("logits"), min(problem.options.get("k", 2), problem.experts))
        else:
            named["routing"] = glulam.Routing.from_topk(named.pop("ids"), named.pop("weights"), problem.experts)
    if "num_experts" in names:
        options["num_experts"] = problem.experts
    if "top_groups" in names:
        options["top_groups"] = max(options.get("num_groups", 1) - 1, 1)
    if "numbers" in names:
        options["numbers"] = ()
    return {**named, **options}
