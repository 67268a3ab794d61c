"""The one torch.autograd.Function of all operators, and the general way to go through it.

A step says what forward and backward do: a plan (`planned`) for the common call, whose launches are known, or a
`General`, which is made of public operators, so that a backward runs, is traced and is checked like any other call: on
a GPU by kernels, on the CPU by the reference, of packed weights and of lists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..groups import caller, part_of
from .layout import Layout, flatten
from .parts import Targets, as_result, backward_of, check_saved, once_differentiable, taken, tensor_groups, usable


class Formula(NamedTuple):
    """An operator's result and gradients, by name.

    Attributes:
        inputs: of the operator's arguments, those that are tensors, group sizes left out.
        options: of a call, what else forward and backward need.
        forward: of the arguments, the names of those that are trained, the options and a buffer: the results, and what
            backward reads.
        gradients: of what forward kept, which may be emptied, the options, the targets, the names of what is trained
            and the results' gradients: theirs.
    """

    inputs: tuple[str, ...]
    options: Callable[[Any], Any]
    forward: Callable[[dict[str, Any], frozenset[str], Any, Tensor | None], tuple[Any, dict[str, Any]]]
    gradients: Callable[..., dict[str, Any]]

    def backward(
        self, op: str, saved: dict[str, Any], options: Any, targets: Targets, wanted: frozenset[str], *dy: Tensor
    ) -> dict[str, Any]:
        """`gradients`, of incoming gradients as they come; errors name `op`."""
        with backward_of(op):
            check_saved(op, saved)
            return self.gradients(saved, options, targets, wanted, *map(usable, dy))


class General(NamedTuple):
    """A step made of public operators. `layout`: which argument is where among the function's inputs."""

    op: str
    formula: Formula
    options: Any
    layout: Layout

    def forward(self, ctx: Any, targets: Targets, flat: tuple[Any, ...]) -> Any:
        given, wanted = self.layout.named(flat), self.layout.wanted(ctx.needs_input_grad[2:])
        with part_of(self.op):
            result, kept = self.formula.forward(given, wanted, self.options, targets.out)
        ctx.saved_layout, saved = flatten(kept)
        ctx.save_for_backward(*saved)
        return result

    def backward(self, ctx: Any, targets: Targets, *dy: Tensor) -> Any:
        needed = ctx.needs_input_grad[2:]
        saved, wanted = ctx.saved_layout.named(taken(ctx)), self.layout.wanted(needed)
        gradients = self.formula.backward(self.op, saved, self.options, targets, wanted, *dy)
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
    options = formula.options(call)
    groups = tensor_groups(call.op, call.offs, call.splits, call.x)
    arguments = {name: getattr(call, name) for name in (*formula.inputs, *call.of_tokens)}
    layout, flat = flatten({**arguments, **groups})
    step = General(caller(call.op), formula, options, layout)
    return Differentiable.apply(step, targets, *flat)  # type: ignore[no-untyped-call]
