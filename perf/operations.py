"""What one kernel computes in a layer, and what its exported function is passed, taken beforehand.

An operation holds one call of its operator on tensors of a case, made for a form: a spec whose tiles do not matter.
Every kernel of that form runs on the same set, so that kernels are compared without dispatch, allocation or Python in
between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.specs import (
    ACTIVATION_FORMS,
    LAYOUT_FORMS,
    GroupedDgluSpec,
    GroupedGluSpec,
    GroupedMlpSpec,
    GroupedMmSpec,
    GroupedWgradSpec,
    Spec,
)
from glulam.calls.launch import launch_nothing
from glulam.choose.kernels import Fixed
from glulam.choose.problem import Problem
from glulam.tuner.tensors import calls_of

from .cases import Case
from .problem import normals, offsets
from .routing import group_sizes

Sizes = tuple[str, int, int, int]
"""An operator, and the widths of its problem: in_features, intermediate, out_features."""


class Kind(NamedTuple):
    """serves: whether kernels of a spec compute the operation. sizes: of its problem, in a case."""

    serves: Callable[[Any], bool]
    sizes: Callable[[Case], Sizes]


def _is(kind: Any, **fields: Any) -> Callable[[Any], bool]:
    """Return a test of specs: this kind, these fields, no adapters."""
    return lambda spec: type(spec) is kind and not spec.adapted and all(
        getattr(spec, name) == value for name, value in fields.items()
    )  # fmt: skip


def _is_mm(transpose_w: bool) -> Callable[[Any], bool]:
    return _is(GroupedMmSpec, transpose_w=transpose_w, in_halves=False)


def _is_wgrad(spec: Any) -> bool:
    return isinstance(spec, GroupedWgradSpec) and spec.operands == "16bit"


OPERATIONS: dict[str, Kind] = {
    "fc1": Kind(_is(GroupedGluSpec), lambda case: ("grouped_glu", case.hidden, case.intermediate, 0)),
    "fc2": Kind(_is_mm(False), lambda case: ("grouped_mm", case.intermediate, 0, case.hidden)),
    "mlp": Kind(
        lambda spec: isinstance(spec, GroupedMlpSpec) and not spec.fc1.save_preact,
        lambda case: ("grouped_mlp", case.hidden, case.intermediate, case.hidden),
    ),
    "dglu": Kind(_is(GroupedDgluSpec, dgrad=None), lambda case: ("grouped_dglu", case.hidden, case.intermediate, 0)),
    "dgrad": Kind(_is_mm(True), lambda case: ("grouped_mm", 2 * case.intermediate, 0, case.hidden)),
    "dw1": Kind(
        _is_wgrad,
        lambda case: ("grouped_wgrad", case.hidden, 0, 2 * case.intermediate),
    ),
    "dw2": Kind(
        _is_wgrad,
        lambda case: ("grouped_wgrad", case.intermediate, 0, case.hidden),
    ),
}
"""dgrad and dw1 are of a gated w1."""


def problem_of(op: str, case: Case, spec: Any) -> Problem:
    """The problem of an operation in a case that kernels of a form serve."""
    name, in_features, inner, out_features = OPERATIONS[op].sizes(case)
    form = spec.fc1 if isinstance(spec, GroupedMlpSpec) else spec
    same = [name for name in ("save_preact", "transpose_w", "out_dtype") if hasattr(form, name)]
    fields: dict[str, Any] = {name: getattr(form, name) for name in same}
    if hasattr(form, "activation"):
        fields["activation"] = ACTIVATION_FORMS[form.activation][0]
        fields["glu_layout"] = LAYOUT_FORMS[form.glu_layout][0]
    return Problem(name, spec.dtype, case.rows, case.experts, in_features, inner, out_features, **fields)


class Operation:
    """One set of tensors: random inputs, scaled so that every result has scale 1, and results full of NaN.

    Attributes:
        call: of the operator. values: what exported functions of the form are passed.
        weight: each [E, ., .] that is read or written. moved: every other tensor that is.
        results: what a call writes.
    """

    def __init__(self, op: str, case: Case, spec: Spec, generator: torch.Generator) -> None:
        self.problem = problem_of(op, case, spec)
        random = normals(generator, getattr(torch, self.problem.dtype))
        (self.call,) = calls_of(self.problem, random, offsets(group_sizes(case), str(generator.device)))
        bare = self.call.bare(self.problem, Fixed(spec, launch_nothing))
        self.values, self.results, self._kept = bare.values, bare.results, bare.memory
        for result in self.results:
            result.fill_(torch.nan)
        tensors = [*(tensor for name, tensor in self.call.tensors() if name != "offs"), *self.results]
        self.weight = tuple(tensor for tensor in tensors if tensor.dim() == 3)
        mid = [value for argument, value in zip(bare.arguments, bare.values, strict=True) if argument.name == "mid"]
        self.moved = (*(tensor for tensor in tensors if tensor.dim() < 3), *mid, *mid)  # it is written and read

    def expected(self) -> tuple[Tensor, ...]:
        """The reference's results, in the order of `results`."""
        made = self.call.reference(self.problem)
        return tuple(one for one in (made if isinstance(made, tuple) else (made,)) if one is not None)

    def dense(self) -> object:
        """cuBLAS on one matrix of the same FLOP: no groups, no activation."""
        call, transpose_w = self.call, self.problem.transpose_w
        if self.problem.op == "grouped_wgrad":
            return torch.mm(call.dy.mT, call.x)
        if self.problem.op == "grouped_dglu":
            return torch.mm(call.dy, _right(call.w2, not transpose_w))
        if self.problem.op == "grouped_mlp":
            torch.mm(call.x, _right(call.w1, transpose_w))
            return torch.mm(self.moved[-1], _right(call.w2, transpose_w))
        return torch.mm(call.x, _right(self.weight[0], transpose_w))


def _right(weights: Tensor, transpose_w: bool) -> Tensor:
    """The right operand of x w: one expert's."""
    return weights[0] if transpose_w else weights[0].mT


def flop(operation: Operation, rows: int) -> int:
    """Useful floating-point operations: two for a multiply-add, activations not counted."""
    return sum(2 * rows * weight[0].numel() for weight in operation.weight)


def bytes_moved(operation: Operation, active: int) -> int:
    """The fewest bytes of a call: each of `active` experts' weights once, each other tensor once."""
    weights = sum(active * weight[0].numel() * weight.element_size() for weight in operation.weight)
    return weights + sum(tensor.numel() * tensor.element_size() for tensor in operation.moved)
