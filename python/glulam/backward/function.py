"""The one torch.autograd.Function of all operators, and the general way to go through it.

A step says what forward and backward do: a plan (`planned`) for the common call, whose launches are known, or a
`General`, which is made of public operators, so that a backward runs, is traced and is checked like any other call: on
a GPU by kernels, on the CPU by the reference, of packed weights and of lists.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..calls.autograd import as_result, check_saved, once_differentiable, taken, usable
from ..host.experts import GateUp
from ..host.groups import caller, part_of
from .parts import Operators, Targets, backward_of, tensor_groups

SINGLE, PAIR = -1, -2
MAX_LAYOUTS = 1024


class Layout:
    """Which arguments lie where among flat inputs. `sizes`: tensors of a list, SINGLE for a tensor or None, PAIR for a
    GateUp.
    """

    __slots__ = ("all_single", "names", "slices")

    def __init__(self, names: tuple[str, ...], sizes: tuple[int, ...]) -> None:
        self.names = names
        self.all_single = all(size == SINGLE for size in sizes)
        begins = itertools.accumulate(map(abs, sizes), initial=0)
        self.slices = tuple(zip(names, sizes, begins, strict=False))

    def named(self, flat: Sequence[Any]) -> dict[str, Any]:
        """The arguments by name, lists as lists."""
        if self.all_single:
            return dict(zip(self.names, flat, strict=True))
        return {name: _taken(flat, size, begin) for name, size, begin in self.slices}

    def wanted(self, needs_grad: Sequence[bool]) -> frozenset[str]:
        """Names of the arguments of which a tensor needs a gradient."""
        if self.all_single:
            return frozenset(itertools.compress(self.names, needs_grad))
        return frozenset(name for name, size, begin in self.slices if any(needs_grad[begin : begin + abs(size)]))

    def flat_gradients(self, gradients: dict[str, Any], needs_grad: Sequence[bool]) -> list[Tensor | None]:
        """Gradients by name, those of lists and GateUps packed or as lists, one for each flat input that needs one."""
        flat: list[Tensor | None] = []
        for name, size, _ in self.slices:
            value = gradients.get(name)
            if size == SINGLE:
                flat.append(value)
            else:
                flat.extend([None] * abs(size) if value is None else value)
        return [value if needed else None for value, needed in zip(flat, needs_grad, strict=True)]


def _taken(flat: Sequence[Any], size: int, begin: int) -> Any:
    if size == SINGLE:
        return flat[begin]
    values = flat[begin : begin + abs(size)]
    return GateUp(*values) if size == PAIR else list(values)


_layout = functools.lru_cache(MAX_LAYOUTS)(Layout)


def flatten(arguments: dict[str, Any]) -> tuple[Layout, list[Any]]:
    """The layout of arguments, and the flat inputs."""
    sizes: list[int] = []
    flat: list[Any] = []
    for value in arguments.values():
        if isinstance(value, (list, tuple)):
            sizes.append(PAIR if isinstance(value, GateUp) else len(value))
            flat.extend(value)
        else:
            sizes.append(SINGLE)
            flat.append(value)
    return _layout(tuple(arguments), tuple(sizes)), flat


class Formula(NamedTuple):
    """An operator's result and gradients, by name.

    Attributes:
        inputs: of the operator's arguments, those that are tensors, group sizes left out.
        operators: of a call, what makes it and its gradients the general way.
        gradients: of what was saved, which may be emptied, the operators or a plan, the targets, the names of what is
            trained and the results' gradients: theirs.
    """

    inputs: tuple[str, ...]
    operators: Callable[[Any], Operators]
    gradients: Callable[..., dict[str, Any]]

    def backward(
        self,
        op: str,
        saved: dict[str, Any],
        operators: Operators,
        targets: Targets,
        wanted: frozenset[str],
        *dy: Tensor,
    ) -> dict[str, Any]:
        """`gradients`, of incoming gradients as they come; errors name `op`."""
        with backward_of(op):
            check_saved(op, saved)
            return self.gradients(saved, operators, targets, wanted, *map(usable, dy))


class General(NamedTuple):
    """A step made of public operators. `layout`: which argument is where among the function's inputs."""

    op: str
    formula: Formula
    operators: Operators
    layout: Layout

    def forward(self, ctx: Any, targets: Targets, flat: tuple[Any, ...]) -> Any:
        given, wanted = self.layout.named(flat), self.layout.wanted(ctx.needs_input_grad[2:])
        with part_of(self.op):
            result, made = self.operators.forward(given, wanted, targets.out)
        reads = self.operators.reads(wanted)
        read = {name: value for name, value in given.items() if reads.get(name, True)}
        ctx.saved_layout, saved = flatten({**read, **made})
        ctx.save_for_backward(*saved)
        return result

    def backward(self, ctx: Any, targets: Targets, *dy: Tensor) -> Any:
        needed = ctx.needs_input_grad[2:]
        saved, wanted = ctx.saved_layout.named(taken(ctx)), self.layout.wanted(needed)
        gradients = self.formula.backward(self.op, saved, self.operators, targets, wanted, *dy)
        return once_differentiable(self.op, self.layout.flat_gradients(gradients, needed))


class Differentiable(torch.autograd.Function):
    """Inputs: the step, where the result and gradients go, and the step's tensors."""

    @staticmethod
    def forward(ctx: Any, step: Any, targets: Targets, *inputs: Any) -> Any:
        ctx.step, ctx.targets = step, targets
        result = step.forward(ctx, targets, inputs)
        return result if targets.out is None else as_result(result)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        return None, None, *ctx.step.backward(ctx, ctx.targets, *dy)


apply_untransformed: Callable[..., Any] = super(torch.autograd.Function, Differentiable).apply
"""Differentiable.apply without its look at every argument for what functorch left behind, which takes 2 us."""


def apply(call: Any, formula: Formula, targets: Targets) -> Any:
    """The result of a call, differentiable, the general way."""
    operators = formula.operators(call)
    groups = tensor_groups(call.op, call.offs, call.splits, call.x)
    arguments = {name: getattr(call, name) for name in (*formula.inputs, *call.beside_weights, *call.of_tokens)}
    layout, flat = flatten({**arguments, **groups})
    step = General(caller(call.op), formula, operators, layout)
    return Differentiable.apply(step, targets, *flat)  # type: ignore[no-untyped-call]
