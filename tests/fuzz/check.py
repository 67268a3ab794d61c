"""Check of one problem: call it, compare with float64, and repeat calls that must give the same bits."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_kernels.formats import DENSE, OPERANDS
from glulam import GradientNotSupported, Routing, UnsupportedDevice
from glulam.formats.scaled import Scaled
from glulam.recipes import RECIPES
from glulam.validate import judge
from glulam.validate.inputs import rows_of
from glulam.validate.streams import ERRORS
from glulam.validate.training import TOLERANCE

from . import declared, exact, formulas
from .problem import Problem
from .tensors import arguments, group_sizes, tensors_of, values

Given = dict[str, Any]
NOT_TRAINED = {"offs", "splits", "rows", "ids", "num_tokens", "expert_map", "mask", "out"}
OF_FP8 = 0.15
"""Tolerance of a gradient computed from FP8 operands, relative to the largest value of the gradient in float64."""
OF_AN_ACTIVATION = 0.13
"""Tolerance of a result whose activations are rounded to E4M3, relative to its largest value.

One activation halfway between two numbers may become either. The two are up to an eighth of it apart, and the
activation may be nearly all of a small result.
"""
OK, REFUSED, UNDECIDED = "passed", "refused", "undecided"
OPINIONS = 4
SUM_TO_ZERO = ("load_balancing_loss", "route")
"""Functions whose gradients are differences that may cancel out."""
_capturing = threading.Lock()


class Wrong(Exception):
    """Raised for a wrong result; the message says which one, and why."""


def each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return an argument with `change` applied to each of its tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Scaled):
        return type(value).unchecked(*[change(getattr(value, n)) if n in value.names else getattr(value, n)
                                       for n in value.fields])  # fmt: skip
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[change(one) for one in value])
    if isinstance(value, (list, tuple)):
        return type(value)(change(one) if isinstance(one, Tensor) else one for one in value)
    return value


def leaves_of(problem: Problem, given: Given) -> list[str]:
    """Return the names of the arguments for which gradients are computed."""
    if not problem.train:
        return []
    is_frozen = problem.form not in ("packed", "list", "GateUp") or not RECIPES[problem.recipe].trains
    found = []
    for name, value in given.items():
        tensors = values(value)
        if name in NOT_TRAINED or not tensors or not all(one.is_floating_point() for one in tensors):
            continue
        if isinstance(value, Scaled) or (is_frozen and name in declared.weights_of(problem.call)):
            continue
        if "lora" in problem.options and name in declared.weights_of(problem.call):
            continue  # adapters are trained beside fixed weights
        found.append(name)
    return found


def flat(result: Any) -> list[Tensor]:
    """Return the tensors of a result."""
    if result is None:
        return []
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, Scaled):
        return [getattr(result, name) for name in result.names]
    if isinstance(result, Routing):
        return [result.weights, result.weight_of_row]
    if dataclasses.is_dataclass(result):
        return [one for field in dataclasses.fields(result) for one in flat(getattr(result, field.name))]
    return [tensor for one in result for tensor in flat(one)]


def upstream(problem: Problem, place: int, result: Tensor) -> Tensor:
    """Return the incoming gradient of a result; NaN in rows after the last group."""
    if result.dim() < 2:
        return torch.ones_like(result)
    is_of_rows = result.shape[0] == problem.total and problem.call.startswith("grouped")
    used = problem.rows if is_of_rows else result.shape[0]
    used = problem.rows if problem.call == "permute" else used
    made = rows_of(result.shape[0], result[0].numel() if result.shape[0] else 0, torch.bfloat16, used, 50 + place)
    return made.view(result.shape).to(result)


def results(problem: Problem, given: Given, function: Callable[[Given], list[Tensor]]) -> list[Tensor]:
    """Return the results of `function` on the problem's tensors, followed by the gradients."""
    names = leaves_of(problem, given)
    if not names:
        with torch.no_grad():
            return function(given)
    leaves = {name: each(given[name], lambda one: one.detach().clone().requires_grad_()) for name in names}
    with torch.enable_grad():
        made = function({**given, **leaves})
        tensors = [one for name in names for one in values(leaves[name])]
        wanted = [one for one in made if one.requires_grad]
        incoming = [upstream(problem, place, one) for place, one in enumerate(wanted)]
        found = torch.autograd.grad(wanted, tensors, incoming, allow_unused=True) if wanted else [None] * len(tensors)
    grads = [torch.zeros_like(t) if g is None else g for g, t in zip(found, tensors, strict=True)]
    return [*[one.detach() for one in made], *grads]


def call(problem: Problem, given: Given) -> list[Tensor]:
    return flat(declared.FUNCTIONS[problem.call](**arguments(problem, given)))


def _wide(value: Any, dtype: torch.dtype) -> Any:
    """Return an argument in another dtype; quantised arguments are exact and stay unchanged."""
    if isinstance(value, Scaled):
        return value
    return each(value, lambda one: one.to(dtype) if one.is_floating_point() and one.itemsize > 1 else one)


def expected(problem: Problem, given: Given, dtype: torch.dtype) -> list[Tensor]:
    """Return the results by the formula or, if there is none, by the function itself in `dtype`."""
    formula = formulas.FORMULAS.get(problem.call)
    keeps = formula is None and dtype != torch.float64  # functions take float32 coefficients of 16-bit streams
    told = {name: value if keeps else _wide(value, dtype) for name, value in given.items()}
    if formula is None:
        told.pop("out", None)
        return results(problem, told, lambda one: call(problem, one))
    return results(problem, told, lambda one: formula(formulas.Told(problem, one, dtype)))


def tolerance_of(problem: Problem, is_gradient: bool) -> float | None:
    """Return the largest error allowed, relative to the largest value; None: twice torch's error in the same dtype."""
    recipe = RECIPES[problem.recipe]
    is_fp8 = OPERANDS[recipe.operands].act != DENSE if problem.recipe != "bf16" else False
    if is_fp8 and problem.call != "grouped_wgrad":
        return OF_FP8 if is_gradient else OF_AN_ACTIVATION
    if problem.call in ("aggregate", "post_mix", "project", "pre", "sinkhorn", "boundary"):
        return max(ERRORS[declared.DTYPES[problem.dtype]][is_gradient], ERRORS[torch.float32][is_gradient])
    if problem.call in ("route", "Routing.from_topk"):
        return 1e-4  # in float32, whatever logits are in
    if problem.call in ("quantize_fp8_block", "quantize_nvfp4") or problem.recipe == "mxfp8_wgrad":
        return TOLERANCE
    return None


def _within_rounding(
    problem: Problem, given: Given, place: int, is_gradient: bool, got: Tensor, exact: Tensor
) -> bool:  # fmt: skip
    """Return True if perturbing the inputs by one rounding changes the result by as much as its error.

    This is a second opinion for small results, for which torch's own error is not meaningful.
    """
    of_fp8 = is_gradient and tolerance_of(problem, is_gradient) == OF_FP8
    # Half of E4M3's eps: an element is rounded by so much at most, and a gradient that is one sum may cancel to less.
    eps = torch.finfo(torch.float8_e4m3fn).eps / 2 if of_fp8 else torch.finfo(declared.DTYPES[problem.dtype]).eps
    most = torch.zeros_like(exact)
    for opinion in range(OPINIONS):
        generator = torch.Generator().manual_seed(opinion)

        def shaken(one: Tensor, generator: torch.Generator = generator) -> Tensor:
            if not one.is_floating_point() or one.itemsize == 1:
                return one
            noise = torch.rand(one.shape, generator=generator, dtype=torch.float64) * 2 - 1
            return one.double() * (1 + eps * noise)

        other = {n: v if isinstance(v, Scaled) else each(v, shaken) for n, v in given.items()}
        most = torch.maximum(most, (expected(problem, other, torch.float64)[place] - exact).nan_to_num().abs())
    scale = exact.nan_to_num().abs().amax(-1, keepdim=True) if exact.dim() else exact.abs()
    allowed = 2 * most.amax() + 2 * eps * (scale + (problem.call in SUM_TO_ZERO))
    return bool(((got.double() - exact).nan_to_num().abs() <= allowed).all())


def _used(problem: Problem, wanted: Tensor) -> int:
    """Return the number of rows of a result to compare: rows after the last group are NaN in expected results."""
    if not wanted.dim():
        return 0
    is_there = (~wanted.flatten(1).isnan().all(1) if wanted.dim() > 1 else ~wanted.isnan()).nonzero()
    last = int(is_there[-1]) + 1 if len(is_there) else 0
    return last if problem.call in ("route", "Routing.from_topk") else min(max(last, problem.rows), len(wanted))


def _compare(problem: Problem, given: Given, made: list[Tensor]) -> tuple[str, list[int]]:
    """Compare results with float64.

    Returns:
        UNDECIDED if the tolerance is too large to prove anything, else OK; for each result the number of compared rows.

    Raises:
        Wrong: a result is wrong.
    """
    right = expected(problem, given, torch.float64)
    dtype = declared.DTYPES[problem.dtype]
    same = expected(problem, given, dtype)
    if len(made) != len(right):
        raise Wrong(f"there are {len(made)} results, not {len(right)}")
    rows: list[int] = []
    state, count = OK, len(right) - sum(len(values(given[name])) for name in leaves_of(problem, given))
    for place, (got, wanted, rounded) in enumerate(zip(made, right, same, strict=True)):
        used = _used(problem, wanted) if place < count else len(wanted)
        rows.append(used)
        parts = [one[:used] if one.dim() else one for one in (got.cpu(), wanted, rounded.to(got.dtype))]
        if parts[0].dim() > 2:
            parts = [one.flatten(0, -2) for one in parts]
        tolerance = tolerance_of(problem, place >= count)
        if not parts[0].numel() or not bool(parts[1].abs().nan_to_num().any()) and not bool(parts[0].any()):
            continue
        found = judge.complaint(*parts, tolerance)
        if "nothing is decided" in found:
            state = UNDECIDED
            continue
        is_about_size = found and "not finite" not in found and "float" not in found and got.is_floating_point()
        if is_about_size and _within_rounding(problem, given, place, place >= count, *_full(got, wanted, used)):
            continue
        if found:
            what = "gradient" if place >= count else "result"
            raise Wrong(f"{what} {place}: {found}")
    return state, rows


def _full(got: Tensor, wanted: Tensor, used: int) -> tuple[Tensor, Tensor]:
    """Return both tensors, with NaN after the rows that are compared."""
    got = got.cpu().double().reshape(wanted.shape).clone()
    if wanted.dim():
        got[used:] = torch.nan
    return got, wanted


def _moved(value: Any, device: torch.device) -> Any:
    return each(value, lambda one: one.to(device)) if device.type != "cpu" else value


def _bits(one: Tensor) -> Tensor:
    """Return a copy of a tensor's bytes."""
    return torch.empty(one.shape, dtype=one.dtype).copy_(one.detach()).view(-1).view(torch.uint8)


def _same(first: list[Tensor], second: list[Tensor], rows: list[int], what: str) -> None:
    """Raise Wrong if two lists of results differ in bits.

    Args:
        rows: for each result the number of rows to compare. Empty: all rows.
    """
    for place, (one, other) in enumerate(zip(first, second, strict=True)):
        used = rows[place] if rows else None
        if not torch.equal(*[_bits(each[:used] if each.dim() else each) for each in (one, other)]):
            raise Wrong(f"result {place} has other bits {what}")


def check(problem: Problem, device: torch.device) -> str:
    """Run and check a problem.

    Returns:
        OK; REFUSED: the call raised the documented error; or UNDECIDED.

    Raises:
        Wrong: a check failed; other errors of the call propagate.
    """
    given = tensors_of(problem)
    here = {name: _moved(value, device) for name, value in given.items()}
    before = {name: [_bits(one) for one in values(value)] for name, value in here.items()}
    fresh = {name: each(value, Tensor.clone) if name == "out" else value for name, value in here.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = results(problem, fresh, lambda one: call(problem, one))
        except (ValueError, TypeError, GradientNotSupported, UnsupportedDevice) as error:
            if problem.call.rpartition(".")[2] not in str(error) and "Lora" not in str(error):
                raise
            return REFUSED
        for name, tensors in before.items():
            if not all(torch.equal(a, _bits(b)) for a, b in zip(tensors, values(here[name]), strict=True)):
                raise Wrong(f"the call changed its argument {name}")
        state, rows = _special(problem, given, here), list[int]()
        if state is None or problem.call in formulas.FORMULAS:
            state, rows = _compare(problem, given, made)
        again = {name: each(value, Tensor.clone) if name == "out" else value for name, value in here.items()}
        _same(made, results(problem, again, lambda one: call(problem, one)), rows, "in a second call")
        _check_tail(problem, fresh)
        if device.type == "cuda":
            check_graph(problem, here)
    return state


def check_graph(problem: Problem, here: Given) -> None:
    """Capture a call, replay it with other group sizes, and compare with an eager call of these sizes. Raises Wrong."""
    groups = next((here[name] for name in ("offs", "splits") if isinstance(here.get(name), Tensor)), None)
    if groups is None or problem.train or problem.call not in exact.GRAPHED:
        return
    graph = torch.cuda.CUDAGraph()
    # Other threads may take memory during the capture, but they may not begin one: that synchronises the device.
    with _capturing, torch.no_grad(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = call(problem, here)
    used = iter([size for size in problem.sizes if size][::-1])  # experts without rows hold NaN, and stay without
    other = dataclasses.replace(problem, sizes=tuple(next(used) if size else 0 for size in problem.sizes))
    told = group_sizes(other)
    groups.copy_(next(iter(told.values())))
    graph.replay()
    eager = results(other, here, lambda one: call(other, one))
    _same(made, eager, [problem.rows] * len(made), "in a graph that was captured with other groups")


def _check_tail(problem: Problem, given: Given) -> None:
    out = given.get("out")
    if isinstance(out, Tensor) and problem.call.startswith("grouped_m") and not bool(out[problem.rows :].isnan().all()):
        raise Wrong("rows of out after the last group were written")


def _special(problem: Problem, given: Given, here: Given) -> str | None:
    """Check results that must be exact, such as routings. Return None if the function has no such check.

    Raises:
        Wrong: a result differs from its definition.
    """
    compare = exact.CHECKS.get(problem.call + " in MXFP8" * bool(problem.options.get("x_block")))
    if compare is None:
        return None
    with torch.no_grad():
        made = declared.FUNCTIONS[problem.call](**arguments(problem, here))
    try:
        compare(problem, given, made)
    except AssertionError as error:
        raise Wrong(f"it differs from its definition: {error}") from error
    return OK
