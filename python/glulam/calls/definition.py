"""Definitions of operators: their results, the values that a launch needs besides the call's arguments, and the CPU
reference.

A definition is data. Operators that are variants of another one (a layer's, a training step's, those with quantised
weights) extend its definition.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..choose.problem import Problem
from .launch import Line, ResultTensor

ScratchPart = tuple[tuple[int, int], torch.dtype] | int
"""A piece of scratch memory: (shape, dtype), which a kernel gets as a tensor, or a number of bytes, which it gets as an
address.
"""


class PrologueStep(NamedTuple):
    """A step of a launch before it calls the kernel's function: a line of Python, and expressions for arguments.

    Attributes:
        line: the line of Python, which the launch runs. None: there are only expressions.
        values: by kernel argument, a Python expression for its value, instead of the call's argument of that name.
        names: objects that the line and the expressions use, by name; they become constants of the plan.
    """

    line: Line | None = None
    values: Mapping[str, str] = {}
    names: Mapping[str, Any] = {}


def no_reference(call: Any, problem: Problem, *results: Any) -> None:
    """Raise NotImplementedError: the call is only a launch of a planned step (`backward`), without a CPU reference."""
    raise NotImplementedError(f"{call.op} is a launch of a step, and has no reference")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Definition:
    """The results of an operator and how they are made.

    The functions take a call; those in `scratch` and `prologue` also take the call's problem.

    Attributes:
        results: tensors that a call makes, in the order in which they are returned. Empty: each call has its own
            (`PlanMaker.result_tensors`).
        returns: function that takes the results (None for a result that is not made) and makes the call's return value.
            None: a single result is returned alone, several as a tuple, without those that are not made.
        constants: functions that return values by name, as kernels and `results` use them, besides the problem's
            dimensions; they do not depend on the number of rows.
        of_rows: functions that return further values by name, which may depend on the number of rows.
        scratch: functions that return the memory that a launch takes from the workspace, by the kernel's argument
            names.
        prologue: functions that return a `PrologueStep`, or None.
        overrides: names for which several sources may give a value, of which the last is used: the problem's dimensions
            and options come before `constants`, and each function before the next. Any other name must have one source.
        address_checks: checks of tensors at addresses that a plan has not seen, for properties other than alignment
            that metadata does not show. They take the call's class, the given outputs, and by name the tensors that are
            read.
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
        """Return a copy with the entries `more` added to its fields, and with another reference and cuts if given."""
        parts: dict[str, Any] = {name: (*getattr(self, name), *added) for name, added in more.items()}
        return dataclasses.replace(self, **parts, reference=reference or self.reference, cuts=cuts or self.cuts)


def numbers_of_activation(call: Any) -> Mapping[str, Any]:
    """Return the constants by which kernels that serve several activations choose one and get its numbers."""
    params: Mapping[str, Any] = call.function.kernel_params
    return params
