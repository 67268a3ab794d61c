"""The torch.autograd.Function of the grouped operators, and the step (one forward and its backward) that it runs.

A step computes an operator's `Path`. In this file the path's parts are calls of public operators, so that a backward
runs, is traced and is checked like any other call; in planned steps the parts are launches (`planned`). Autograd takes
a flat list of tensors, so a `FlatLayout` maps the flat inputs to arguments, which may be lists.
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


@functools.cache  # equal steps share one function
def picker(*places: int) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that picks the elements with indices `places` from a sequence, always as a tuple."""
    return itemgetter(*places) if len(places) > 1 else itemgetter(slice(places[0], places[0] + 1))


MAX_LAYOUTS = 1024


class FlatLayout:
    """Maps arguments by name to a flat list of tensors (the inputs of an autograd function) and back.

    A list of E tensors takes E inputs, a GateUp two, any other argument one.

    Args:
        names: the arguments' names.
        sizes: for each argument: the number of tensors of a list, SINGLE for a tensor or None, PAIR for a GateUp.
        absent: names of more arguments, which are None and have no input.

    Attributes:
        names: the arguments' names.
        slices: (name, size, index of the first input) of each argument.
        several: (index among the arguments, name, size, index of the first input) of each list or GateUp, from the last
            to the first.
        named: function that converts the flat inputs to a dict of arguments.
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
        """Generate the function `named`, which takes the flat inputs and returns the arguments as a dict by name.

        For a tensor x and a list w of two tensors: named([t0, t1, t2]) is {"x": t0, "w": [t1, t2]}. It is generated
        for speed: a dict display takes 0.2 us, `dict(zip(..., strict=True))` 0.5 us.

        absent: names of arguments that are None and have no input.
        """
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
        """Convert arguments (`values`), in the order of `names`, to flat inputs: lists and GateUps become separate
        tensors."""
        inputs = [*values]
        for place, *_ in self.several:
            value = inputs[place]
            inputs[place : place + 1] = value.tensors if value.__class__ is ExpertList else value
        return inputs

    def wanted(self, needs_grad: Sequence[bool]) -> frozenset[str]:
        """Return the names of arguments with a tensor that needs a gradient. `needs_grad`: a flag for each input."""
        if not self.several:
            return frozenset(itertools.compress(self.names, needs_grad))
        return frozenset(name for name, size, begin in self.slices if any(needs_grad[begin : begin + abs(size)]))

    def flat_gradients(
        self, gradients: dict[str, Any], needs_grad: Callable[[], Sequence[bool]]
    ) -> list[Tensor | None]:
        """Convert gradients of arguments to one gradient for each flat input; None: the input needs no gradient.

        Args:
            gradients: {argument: gradient}, for arguments that need one. For a list of E tensors: one tensor [E, ...],
                or a list of E gradients. For a GateUp: a list of two.
            needs_grad: function that returns, for each flat input, True if it needs a gradient. It is called only if
                an argument is a list or GateUp, of which only some tensors may need a gradient; other calls save the
                time of reading autograd's flags.
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


layout_of = functools.lru_cache(MAX_LAYOUTS)(FlatLayout)


def flatten(arguments: dict[str, Any], absent: tuple[str, ...] = ()) -> tuple[FlatLayout, list[Any]]:
    """Return (layout of the arguments, flat inputs: a list of all their tensors).

    Args:
        arguments: arguments by name.
        absent: names of arguments that are None and have no input.
    """
    sizes = [
        (PAIR if isinstance(value, GateUp) else len(value)) if isinstance(value, (list, tuple)) else SINGLE
        for value in arguments.values()
    ]
    layout = layout_of(tuple(arguments), tuple(sizes), absent)
    return layout, layout.flat(arguments.values())


class Step:
    """A step: forward and backward of one call, computed by calls of public operators.

    Attributes:
        op: the operator's name in errors.
        path: the `Path`, which computes forward and gradients.
        layout: maps the flat inputs of the autograd function to arguments.
        invariant: True: both directions must be batch-invariant.
    """

    def __init__(self, op: str, path: Path, layout: FlatLayout) -> None:
        self.op, self.path, self.layout = op, path, layout
        self.invariant = is_on()

    def forward(self, ctx: Any, targets: Targets, flat: tuple[Any, ...]) -> Any:
        """Compute and return the result, and save tensors for backward.

        Args:
            ctx: autograd's context.
            targets: buffers for the result and gradients.
            flat: the inputs, one for each tensor of the arguments (`FlatLayout`).
        """
        given, wanted = self.layout.named(flat), self.layout.wanted(ctx.needs_input_grad[2:])
        with part_of(self.op):
            result, made = self.path.forward(dict(given), wanted, targets.out)
        reads = self.path.reads(wanted)
        read = {name: value for name, value in given.items() if reads.get(name, True)}
        ctx.saved_layout, saved = flatten({**read, **made})
        ctx.save_for_backward(*saved)
        return result

    def backward(self, ctx: Any, targets: Targets, *dy: Tensor) -> Any:
        """Compute the gradients of the inputs that `forward` got as `flat`.

        Args:
            ctx: autograd's context of the forward.
            targets: buffers for the result and gradients.
            dy: the gradients of the results.
        """
        with part_of(self.op):  # autograd's thread is not the caller's
            return self.differentiate(ctx, targets, ctx.saved_layout.named(taken(ctx)), dy)

    def differentiate(self, ctx: Any, targets: Targets, saved: dict[str, Any], dy: tuple[Tensor, ...]) -> Any:
        """Compute the gradients of the flat inputs; errors name the operator.

        Args:
            ctx: autograd's context of the forward.
            targets: buffers for gradients.
            saved: saved tensors by name.
            dy: the gradients of the results, in any layout that autograd passes.
        """
        needed = ctx.needs_input_grad[2:]
        wanted = self.layout.wanted(needed)
        with backward_of(self.op), held(self.invariant):
            check_saved(self.op, saved, {"groups": self.path.grouped_by})
            gradients = self.path.gradients(saved, targets, wanted, *map(usable, dy))
        return once_differentiable(self.op, self.layout.flat_gradients(gradients, lambda: needed))


class Differentiable(torch.autograd.Function):
    """The autograd function of all grouped operators. Inputs: the step, its targets, and the step's flat inputs."""

    @staticmethod
    def forward(ctx: Any, step: Any, targets: Targets, *inputs: Any) -> Any:
        ctx.step, ctx.targets = step, targets
        result = step.forward(ctx, targets, inputs)
        return result if targets.out is None else as_result(result)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        return None, None, *ctx.step.backward(ctx, ctx.targets, *dy)


apply_untransformed: Callable[..., Any] = super(torch.autograd.Function, Differentiable).apply
"""Differentiable.apply without torch's search of every argument for tensors of functorch, which takes 2 us."""


def apply(call: Any, path: Path, targets: Targets) -> Any:
    """Compute a differentiable call by public operators, now its forward and later its backward; return the result.

    Args:
        path: the forward and gradients of the call's operator.
        targets: buffers for the result and gradients.
    """
    (groups,) = tensor_groups(call.op, call.offs, call.splits, call.x).values()
    arguments = {name: getattr(call, name) for name in (*path.inputs, *call.beside_weights, *call.of_tokens)}
    layout, flat = flatten({**arguments, "groups": groups})
    step = Step(caller(call.op), path, layout)
    return Differentiable.apply(step, targets, *flat)  # type: ignore[no-untyped-call]
