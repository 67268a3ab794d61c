"""The torch.autograd.Function of the grouped operators, and the step that it runs.

A step goes through an operator's `Path` in both directions: by public operators here, so that a backward runs, is
traced and is checked like any other call, and by launches of its own where it is kept (`planned`).
"""

from __future__ import annotations

import builtins
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ..calls.autograd import as_result, check_saved, once_differentiable, taken, usable
from ..calls.generated import compiled_one_of_many
from ..calls.launch import indented, wrapped
from ..host.experts import ExpertList, GateUp
from ..host.groups import caller, part_of
from ..host.invariance import held, is_on
from .parts import Targets, backward_of, tensor_groups
from .path import Path

SINGLE, PAIR = -1, -2


@functools.cache  # equal steps have the same
def picker(*places: int) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that picks these places of a sequence as a tuple, a single one included."""
    return itemgetter(*places) if len(places) > 1 else itemgetter(slice(places[0], places[0] + 1))


MAX_LAYOUTS = 1024


class Layout:
    """Which arguments lie where among flat inputs. `sizes`: tensors of a list, SINGLE for a tensor or None, PAIR for a
    GateUp. `absent`: names of arguments that are None and no inputs.

    Attributes:
        several: of arguments of several tensors the place, name, size and first input, from the last to the first.
        named: returns the arguments by name, of flat inputs; lists as lists.
    """

    __slots__ = ("named", "names", "several", "slices")

    def __init__(self, names: tuple[str, ...], sizes: tuple[int, ...], absent: tuple[str, ...] = ()) -> None:
        self.names = names
        begins = itertools.accumulate(map(abs, sizes), initial=0)
        self.slices = tuple(zip(names, sizes, begins, strict=False))
        places = [(place, *one) for place, one in enumerate(self.slices) if one[1] != SINGLE]
        self.several = tuple(reversed(places))
        self.named = self._namer(absent)

    def _namer(self, absent: tuple[str, ...]) -> Callable[[Sequence[Any]], dict[str, Any]]:
        """Return a generated function: a dict display takes 0.2 us, and `dict(zip(..., strict=True))` 0.5 us."""
        inputs: list[str] = []
        items: list[str] = []
        for name, size, begin in self.slices:
            tensors = [f"t{place}" for place in range(begin, begin + abs(size))]
            inputs += tensors
            value = {SINGLE: "{}", PAIR: "GateUp({})"}.get(size, "[{}]").format(", ".join(tensors))
            items.append(f"{name!r}: {value}")
        items += [f"{name!r}: None" for name in absent]
        lines = ["def named(flat):", *indented([*wrapped("[", inputs, "] = flat"), *wrapped("return {", items, "}")])]
        code = compiled_one_of_many("\n".join(lines), "glulam layout")
        return FunctionType(code, {"GateUp": GateUp, "__builtins__": builtins})

    def flat(self, values: Iterable[Any]) -> list[Any]:
        """The inputs that arguments, in their order, are made of."""
        inputs = [*values]
        for place, *_ in self.several:
            value = inputs[place]
            inputs[place : place + 1] = value.tensors if value.__class__ is ExpertList else value
        return inputs

    def wanted(self, needs_grad: Sequence[bool]) -> frozenset[str]:
        """Names of the arguments of which a tensor needs a gradient."""
        if not self.several:
            return frozenset(itertools.compress(self.names, needs_grad))
        return frozenset(name for name, size, begin in self.slices if any(needs_grad[begin : begin + abs(size)]))

    def flat_gradients(
        self, gradients: dict[str, Any], needs_grad: Callable[[], Sequence[bool]]
    ) -> list[Tensor | None]:
        """Gradients by name, those of lists and GateUps packed or as lists, one for each flat input.

        Args:
            needs_grad: tells which inputs need one, for tensors of several that do not all.
        """
        flat: list[Tensor | None] = [*map(gradients.get, self.names)]
        if self.several:
            needed = needs_grad()
            for place, name, size, begin in self.several:
                value = gradients.get(name)
                parts = [None] * abs(size) if value is None else value
                of = needed[begin : begin + abs(size)]
                flat[place : place + 1] = [
                    part if is_needed else None for part, is_needed in zip(parts, of, strict=True)
                ]
        return flat


layout_of = functools.lru_cache(MAX_LAYOUTS)(Layout)


def flatten(arguments: dict[str, Any], absent: tuple[str, ...] = ()) -> tuple[Layout, list[Any]]:
    """The layout of arguments, and the flat inputs."""
    sizes = [
        (PAIR if isinstance(value, GateUp) else len(value)) if isinstance(value, (list, tuple)) else SINGLE
        for value in arguments.values()
    ]
    layout = layout_of(tuple(arguments), tuple(sizes), absent)
    return layout, layout.flat(arguments.values())


class Step:
    """Both directions of a call, whose parts are calls of public operators.

    Attributes:
        op: what errors name.
        path: what is computed; `layout`: which argument is where among the function's inputs.
        invariant: whether both directions are to be batch-invariant.
    """

    def __init__(self, op: str, path: Path, layout: Layout) -> None:
        self.op, self.path, self.layout = op, path, layout
        self.invariant = is_on()

    def forward(self, ctx: Any, targets: Targets, flat: tuple[Any, ...]) -> Any:
        given, wanted = self.layout.named(flat), self.layout.wanted(ctx.needs_input_grad[2:])
        with part_of(self.op):
            result, made = self.path.forward(dict(given), wanted, targets.out)
        reads = self.path.reads(wanted)
        read = {name: value for name, value in given.items() if reads.get(name, True)}
        ctx.saved_layout, saved = flatten({**read, **made})
        ctx.save_for_backward(*saved)
        return result

    def backward(self, ctx: Any, targets: Targets, *dy: Tensor) -> Any:
        return self.differentiate(ctx, targets, ctx.saved_layout.named(taken(ctx)), dy)

    def differentiate(self, ctx: Any, targets: Targets, saved: dict[str, Any], dy: tuple[Tensor, ...]) -> Any:
        """The gradients of the inputs, of incoming gradients as they come; errors name the operator."""
        needed = ctx.needs_input_grad[2:]
        wanted = self.layout.wanted(needed)
        with backward_of(self.op), held(self.invariant):
            check_saved(self.op, saved, {"groups": self.path.grouped_by})
            gradients = self.path.gradients(saved, targets, wanted, *map(usable, dy))
        return once_differentiable(self.op, self.layout.flat_gradients(gradients, lambda: needed))


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


def apply(call: Any, path: Path, targets: Targets) -> Any:
    """The result of a call, differentiable, by public operators."""
    (groups,) = tensor_groups(call.op, call.offs, call.splits, call.x).values()
    arguments = {name: getattr(call, name) for name in (*path.inputs, *call.beside_weights, *call.of_tokens)}
    layout, flat = flatten({**arguments, "groups": groups})
    step = Step(caller(call.op), path, layout)
    return Differentiable.apply(step, targets, *flat)  # type: ignore[no-untyped-call]
