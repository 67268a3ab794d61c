"""Class `Definition`: an operator's results, the kernel arguments that are not the call's, and the CPU reference.

A definition is data. An operator that is a variant of another operator (of a layer, of a training step, with quantised
weights) extends the other's definition.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..choose.problem import Problem
from .launch import Line, ResultTensor

ScratchPart = tuple[tuple[int, int], torch.dtype] | int
"""A piece of scratch memory: (shape, dtype), passed to a kernel as a tensor; or a number of bytes, only its address."""


class PrologueStep(NamedTuple):
    """Generated code that a launch runs before it calls the kernel's function, and expressions for kernel arguments.

    Attributes:
        line: a line of Python that the launch runs. None: there are only expressions.
        values: {kernel argument: Python expression for its value}. They replace call arguments of the same names.
        names: objects that the line and the expressions use, by name; they become constants of the plan.
    """

    line: Line | None = None
    values: Mapping[str, str] = {}
    names: Mapping[str, Any] = {}


def no_reference(call: Any, problem: Problem, *results: Any) -> None:
    """Raise NotImplementedError. The reference of calls that exist only as a launch of a backward step on a GPU."""
    raise NotImplementedError(f"{call.op} is a launch of a step, and has no reference")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Definition:
    """The results of an operator, and the values that a launch passes to the kernel besides the call's arguments.

    All functions take a call; functions in `scratch` and `prologue` also take the call's problem.

    Attributes:
        results: tensors that a call makes, in the order in which they are returned. Empty: each call has its own
            (`PlanMaker.result_tensors`).
        returns: function that makes the call's return value from the results (None for a result that is not made).
            None: the results that are made are returned, a single one alone, several as a tuple.
        constants: functions that return {name: value} for kernels and `results`, besides the problem's dimensions.
            These values do not depend on the number of rows.
        of_rows: functions that return {name: value} as `constants` do, but may depend on the number of rows.
        scratch: functions that return the memory that a launch takes from the workspace, by the kernel's argument
            names.
        prologue: functions that return a `PrologueStep`, or None.
        overrides: names for which several sources may give a value; the last source is used. The problem's dimensions
            and options come before `constants`, and each function before the next. Any other name must have one source.
        address_checks: functions that check tensors at addresses that a plan has not seen, for properties that metadata
            does not show, except alignment, which is always checked. They take the call's class, the given outputs, and
            the tensors that are read by name.
        cuts: text that `glulam.explain` shows after "it cuts": how the kernels cut sums, other than a GEMM's, into
            partial sums, and which numbers of the call or GPU decide this, for example "columns into slices, by the
            numbers of tokens and of SMs". Empty: each row is computed alone. In batch-invariant calls only sizes of the
            row decide.
        reference: function that computes on the CPU. It takes the call, the problem and the results, which it writes.
    """

    results: tuple[ResultTensor, ...] = ()
    returns: Callable[..., Any] | None = None
    constants: tuple[Callable[[Any], Mapping[str, Any]], ...] = ()
    of_rows: tuple[Callable[[Any], Mapping[str, Any]], ...] = ()
    scratch: tuple[Callable[[Any, Problem], Mapping[str, ScratchPart]], ...] = ()
    prologue: tuple[Callable[[Any, Problem], PrologueStep | None], ...] = ()
    overrides: tuple[str, ...] = ()
    address_checks: tuple[Callable[[Any, list[Any], dict[str, Any]], None], ...] = ()
    cuts: str = ""
    reference: Callable[..., None] = no_reference

    def extended(
        self, reference: Callable[..., None] | None = None, cuts: str = "", **more: tuple[Any, ...]
    ) -> Definition:  # fmt: skip
        """Return a copy, with entries added to its tuples (`more`, by field) and `reference` and `cuts` replaced."""
        parts: dict[str, Any] = {name: (*getattr(self, name), *added) for name, added in more.items()}
        return dataclasses.replace(self, **parts, reference=reference or self.reference, cuts=cuts or self.cuts)


def numbers_of_activation(call: Any) -> Mapping[str, Any]:
    """Return arguments of kernels that serve several activations: which activation the call has, and its numbers."""
    params: Mapping[str, Any] = call.function.kernel_params
    return params
