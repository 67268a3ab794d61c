"""What one kernel computes in a layer, and the arguments of its exported function made beforehand.

An operation holds one set of tensors of a case, made for a form: a spec whose tiles do not matter. Every kernel of that
form runs on the same set, so that kernels are compared without dispatch, allocation or Python in between.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any

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
from glulam import groups, reference
from glulam.activations import ActivationParams, kernel_params
from glulam.ops.grouped_dglu import partials_shape
from glulam.tickets import new_counters

from .cases import Case
from .problem import offsets
from .routing import group_sizes

PARAMS = ActivationParams()


@dataclasses.dataclass(frozen=True)
class Groups:
    """How the rows are split: sizes on the host, offs int32 [E] on the device. counters: for tickets, zeros."""

    sizes: list[int]
    ends: list[int]
    offs: Tensor
    counters: Tensor

    @property
    def arguments(self) -> dict[str, int]:
        """As exported functions take them, with counters for tickets, which no other stream shares."""
        return groups.arguments(self.offs, self.counters)


def make_groups(case: Case, device: str) -> Groups:
    sizes = group_sizes(case)
    offs = offsets(sizes, device)
    return Groups(sizes, offs.tolist(), offs, new_counters(device))


@dataclasses.dataclass(frozen=True)
class Maker:
    """Makes a case's tensors: random inputs, scaled so that every result has scale 1, and outputs full of NaN."""

    case: Case
    groups: Groups
    dtype: torch.dtype
    generator: torch.Generator

    def _random(self, *shape: int, scale: float = 1.0) -> Tensor:
        made = torch.empty(shape, dtype=self.dtype, device=self.generator.device)
        return made.normal_(0.0, scale, generator=self.generator)

    def rows(self, width: int) -> Tensor:
        return self._random(self.case.rows, width)

    def weights(self, rows: int, columns: int, contracted: int) -> Tensor:
        return self._random(self.case.experts, rows, columns, scale=contracted**-0.5)

    def forward_weights(self, n: int, k: int, transpose_w: bool) -> Tensor:
        """Of x [T,K] -> [T,N]."""
        return self.weights(*((k, n) if transpose_w else (n, k)), k)

    def row_scale(self) -> Tensor:
        made = torch.empty(self.case.rows, device=self.generator.device)
        return made.uniform_(0.1, 1.0, generator=self.generator)

    def out(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype or self.dtype, device=self.generator.device)

    def width(self, spec: GroupedGluSpec | GroupedDgluSpec) -> int:
        """Columns of the preactivation."""
        return (2 if spec.gated else 1) * self.case.intermediate


class Operation(ABC):
    """One set of tensors. `weight`: each [E, ., .] that is read or written. `moved`: every other tensor that is.
    `results`: what a call writes.
    """

    weight: tuple[Tensor, ...]
    moved: tuple[Tensor, ...]
    results: tuple[Tensor, ...]

    @abstractmethod
    def __init__(self, make: Maker, spec: Any) -> None: ...

    @staticmethod
    @abstractmethod
    def serves(spec: Spec) -> bool:
        """Whether kernels of this spec compute the operation."""

    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """Of the exported function by name, num_sms left out."""

    @abstractmethod
    def expected(self) -> tuple[Tensor, ...]:
        """The reference's results, in the order of `results`."""

    @abstractmethod
    def dense(self) -> object:
        """cuBLAS on one matrix of the same FLOP: no groups, no activation."""


def served(spec: GroupedGluSpec) -> tuple[str, str]:
    """An activation and a gate layout that a kernel computes."""
    return ACTIVATION_FORMS[spec.activation][0], LAYOUT_FORMS[spec.glu_layout][0]


def flop(operation: Operation, rows: int) -> int:
    """Useful floating-point operations: two for a multiply-add, activations not counted."""
    return sum(2 * rows * weight[0].numel() for weight in operation.weight)


def bytes_moved(operation: Operation, active: int) -> int:
    """The fewest bytes of a call: each of `active` experts' weights once, each other tensor once."""
    weights = sum(active * weight[0].numel() * weight.element_size() for weight in operation.weight)
    return weights + sum(tensor.numel() * tensor.element_size() for tensor in operation.moved)


def _right(weights: Tensor, transpose_w: bool) -> Tensor:
    """The right operand of x w: one expert's."""
    return weights[0] if transpose_w else weights[0].mT


class Fc1(Operation):
    """act[, preact] = grouped_glu(x, w1)."""

    def __init__(self, make: Maker, spec: GroupedGluSpec) -> None:
        hidden, width = make.case.hidden, make.width(spec)
        self.spec, self.groups = spec, make.groups
        self.x = make.rows(hidden)
        self.w1 = make.forward_weights(width, hidden, spec.transpose_w)
        self.act = make.out(make.case.rows, make.case.intermediate)
        self.preact = make.out(make.case.rows, width) if spec.save_preact else None
        self.results = (self.act,) if self.preact is None else (self.act, self.preact)
        self.weight, self.moved = (self.w1,), (self.x, *self.results)

    @staticmethod
    def serves(spec: Spec) -> bool:
        return isinstance(spec, GroupedGluSpec)

    def arguments(self) -> dict[str, Any]:
        preact = {} if self.preact is None else {"preact": self.preact}
        return {
            "x": self.x, "w": self.w1, "act": self.act, **preact,
            **self.groups.arguments, **kernel_params(*served(self.spec), PARAMS)._asdict(),
        }  # fmt: skip

    def expected(self) -> tuple[Tensor, ...]:
        made = tuple(torch.empty_like(result) for result in self.results)
        form = (*served(self.spec), PARAMS)
        results = made[0], (*made, None)[1]
        reference.grouped_glu(self.x, self.w1, self.groups.ends, None, None, form, *results, self.spec.transpose_w)
        return made

    def dense(self) -> object:
        return torch.mm(self.x, _right(self.w1, self.spec.transpose_w))


class _Mm(Operation):
    """y = grouped_mm(x, w): what FC2 and the gradient of FC1's input share."""

    x: Tensor
    w: Tensor

    def __init__(self, make: Maker, spec: GroupedMmSpec) -> None:
        self.spec, self.groups = spec, make.groups
        self.make_inputs(make)
        self.y = make.out(make.case.rows, make.case.hidden)
        self.weight, self.moved, self.results = (self.w,), (self.x, self.y), (self.y,)

    @abstractmethod
    def make_inputs(self, make: Maker) -> None: ...

    def arguments(self) -> dict[str, Any]:
        return {"x": self.x, "w": self.w, "y": self.y, **self.groups.arguments}

    def expected(self) -> tuple[Tensor, ...]:
        y = torch.empty_like(self.y)
        reference.grouped_mm(self.x, self.w, self.groups.ends, None, None, self.spec.transpose_w, y)
        return (y,)

    def dense(self) -> object:
        return torch.mm(self.x, _right(self.w, self.spec.transpose_w))


class Fc2(_Mm):
    """y = grouped_mm(mid, w2)."""

    @staticmethod
    def serves(spec: Spec) -> bool:
        return isinstance(spec, GroupedMmSpec) and not spec.transpose_w

    def make_inputs(self, make: Maker) -> None:
        inner = make.case.intermediate
        self.x, self.w = make.rows(inner), make.weights(make.case.hidden, inner, inner)


class Dgrad(_Mm):
    """dx = grouped_mm(dpreact, w1, transpose_w=True), w1 gated."""

    @staticmethod
    def serves(spec: Spec) -> bool:
        return isinstance(spec, GroupedMmSpec) and spec.transpose_w and not spec.in_halves

    def make_inputs(self, make: Maker) -> None:
        width = 2 * make.case.intermediate
        self.x, self.w = make.rows(width), make.weights(width, make.case.hidden, width)


class Mlp(Operation):
    """y = grouped_mlp(x, w1, w2)."""

    def __init__(self, make: Maker, spec: GroupedMlpSpec) -> None:
        case, width = make.case, make.width(spec.fc1)
        self.spec, self.groups = spec, make.groups
        self.x = make.rows(case.hidden)
        self.w1 = make.forward_weights(width, case.hidden, spec.fc1.transpose_w)
        self.w2 = make.forward_weights(case.hidden, case.intermediate, spec.fc2.transpose_w)
        self.mid, self.y = make.out(case.rows, case.intermediate), make.out(case.rows, case.hidden)
        self.weight, self.results = (self.w1, self.w2), (self.y,)
        self.moved = (self.x, self.mid, self.mid, self.y)  # mid is written and read

    @staticmethod
    def serves(spec: Spec) -> bool:
        return isinstance(spec, GroupedMlpSpec) and not spec.fc1.save_preact

    def arguments(self) -> dict[str, Any]:
        tensors = {name: getattr(self, name) for name in ("x", "w1", "w2", "mid", "y")}
        numbers = kernel_params(*served(self.spec.fc1), PARAMS)._asdict()
        return {**tensors, **self.groups.arguments, **numbers}

    def expected(self) -> tuple[Tensor, ...]:
        y, form = torch.empty_like(self.y), (*served(self.spec.fc1), PARAMS)
        transpose_w = self.spec.fc1.transpose_w
        reference.grouped_mlp(self.x, self.w1, self.w2, self.groups.ends, None, None, None, form, y, transpose_w)
        return (y,)

    def dense(self) -> object:
        torch.mm(self.x, _right(self.w1, self.spec.fc1.transpose_w))
        return torch.mm(self.mid, _right(self.w2, self.spec.fc2.transpose_w))


class Dglu(Operation):
    """dpreact, act, d_row_scale = grouped_dglu(dy, w2, preact), with a row scale."""

    def __init__(self, make: Maker, spec: GroupedDgluSpec) -> None:
        case, width = make.case, make.width(spec)
        self.spec, self.groups = spec, make.groups
        self.dy, self.preact, self.scale = make.rows(case.hidden), make.rows(width), make.row_scale()
        self.w2 = make.forward_weights(case.intermediate, case.hidden, not spec.transpose_w)
        self.dpreact, self.act = make.out(case.rows, width), make.out(case.rows, case.intermediate)
        self.d_scale = make.out(case.rows, dtype=torch.float32)
        self.partials = make.out(*partials_shape(case.rows, case.intermediate), dtype=torch.float32)
        self.weight, self.results = (self.w2,), (self.dpreact, self.act, self.d_scale)
        self.moved = (self.dy, self.preact, self.scale, *self.results)

    @staticmethod
    def serves(spec: Spec) -> bool:
        return type(spec) is GroupedDgluSpec and not spec.dgrad

    def arguments(self) -> dict[str, Any]:
        tensors = {name: getattr(self, name) for name in ("dy", "w2", "preact", "dpreact", "act")}
        addresses = {name: getattr(self, name).data_ptr() for name in ("scale", "d_scale", "partials")}
        return {**tensors, **self.groups.arguments, **addresses, **PARAMS._asdict()}

    def expected(self) -> tuple[Tensor, ...]:
        dpreact, act, d_scale = (torch.empty_like(result) for result in self.results)
        form = (self.spec.activation, self.spec.glu_layout, PARAMS)
        reference.grouped_dglu(
            self.dy, self.w2, self.preact, self.groups.ends, self.scale, form, dpreact, act, d_scale,
            self.spec.transpose_w,
        )  # fmt: skip
        return dpreact, act, d_scale

    def dense(self) -> object:
        return torch.mm(self.dy, _right(self.w2, not self.spec.transpose_w))


class _Wgrad(Operation):
    """dw = grouped_wgrad(dy, x), overwriting."""

    dy: Tensor
    x: Tensor

    def __init__(self, make: Maker, spec: GroupedWgradSpec) -> None:
        self.groups = make.groups
        self.make_inputs(make)
        shape = (make.case.experts, self.dy.shape[1], self.x.shape[1])
        self.dw = make.out(*shape, dtype=getattr(torch, spec.out_dtype))
        self.weight, self.moved, self.results = (self.dw,), (self.dy, self.x), (self.dw,)

    @abstractmethod
    def make_inputs(self, make: Maker) -> None: ...

    @staticmethod
    def serves(spec: Spec) -> bool:
        return isinstance(spec, GroupedWgradSpec)

    def arguments(self) -> dict[str, Any]:
        return {"dy": self.dy, "x": self.x, "dw": self.dw, **self.groups.arguments}

    def expected(self) -> tuple[Tensor, ...]:
        dw = torch.empty_like(self.dw)
        reference.grouped_wgrad(self.dy, self.x, self.groups.ends, [False] * len(self.groups.ends), dw)
        return (dw,)

    def dense(self) -> object:
        return torch.mm(self.dy.mT, self.x)


class Dw1(_Wgrad):
    """The gradient of w1, gated, from dpreact and x."""

    def make_inputs(self, make: Maker) -> None:
        self.dy, self.x = make.rows(2 * make.case.intermediate), make.rows(make.case.hidden)


class Dw2(_Wgrad):
    """The gradient of w2, from dy and the activation."""

    def make_inputs(self, make: Maker) -> None:
        self.dy, self.x = make.rows(make.case.hidden), make.rows(make.case.intermediate)


OPERATIONS: dict[str, type[Operation]] = {
    "fc1": Fc1,
    "fc2": Fc2,
    "mlp": Mlp,
    "dglu": Dglu,
    "dgrad": Dgrad,
    "dw1": Dw1,
    "dw2": Dw2,
}
