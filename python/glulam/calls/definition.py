"""Definitions of operators: what each makes, what its launch takes besides arguments, how the CPU computes it.

A definition is data: a layer's, a training step's and that of quantised weights are made of that of the operator which
they are variants of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..choose.problem import Problem
from .launch import Line, Made

Part = tuple[tuple[int, int], torch.dtype] | int
"""Memory of a workspace: a shape and a dtype, passed as a tensor; or bytes, passed as an address."""


class Before(NamedTuple):
    """A step of a launch before it calls the function.

    Attributes:
        line: of Python.
        values: values of kernel arguments from then on, as Python, in place of arguments of the same names.
        names: objects that the line and the values call by name.
    """

    line: Line | None = None
    values: Mapping[str, str] = {}
    names: Mapping[str, Any] = {}


def no_reference(call: Any, problem: Problem, *results: Any) -> None:
    """Refuse to compute on the CPU what is a launch alone."""
    raise NotImplementedError(f"{call.op} is a launch of a step, and has no reference")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Definition:
    """Results of an operator, and what makes them. Functions take a call, `scratch` and `before` its problem as well.

    Attributes:
        results: tensors that are made, in the order in which they are returned. Empty: each call tells its own
            (`Launching.made`).
        returns: called with the results, None for those that are not made. None: one result is returned alone, several
            as a tuple, without those that are not made.
        constants: return values by the names that kernels and `results` have for them, besides the problem's
            dimensions. of_rows: likewise, of values that another number of rows may change.
        scratch: return memory that a launch takes from the workspace, by the kernel's names.
        before: return a step before the function is called, or None.
        looks: check arguments at addresses that are new to a plan for what no metadata tells, besides alignment. They
            take the kind of call, its given outputs, and the arguments that are read, by name.
        cuts: into what a row's sums are cut besides by its GEMM, and by which numbers of the call or of the GPU, in
            words; empty: each row is computed alone. `invariant` calls cut by sizes of the row alone.
        reference: computes on the CPU. It takes the problem, and the results, which it writes.
    """

    results: tuple[Made, ...] = ()
    returns: Callable[..., Any] | None = None
    constants: tuple[Callable[[Any], Mapping[str, Any]], ...] = ()
    of_rows: tuple[Callable[[Any], Mapping[str, Any]], ...] = ()
    scratch: tuple[Callable[[Any, Problem], Mapping[str, Part]], ...] = ()
    before: tuple[Callable[[Any, Problem], Before | None], ...] = ()
    looks: tuple[Callable[[Any, list[Any], dict[str, Any]], None], ...] = ()
    cuts: str = ""
    reference: Callable[..., None] = no_reference

    def extended(
        self, reference: Callable[..., None] | None = None, cuts: str = "", **more: tuple[Any, ...]
    ) -> Definition:  # fmt: skip
        """Return a definition with more of these parts, and another reference and other cuts if they are given."""
        parts: dict[str, Any] = {name: (*getattr(self, name), *added) for name, added in more.items()}
        return dataclasses.replace(self, **parts, reference=reference or self.reference, cuts=cuts or self.cuts)


def numbers_of_activation(call: Any) -> Mapping[str, Any]:
    """Constants of kernels that serve several activations."""
    params: Mapping[str, Any] = call.function.kernel_params
    return params
