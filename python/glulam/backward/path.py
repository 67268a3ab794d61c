"""How a differentiable operator computes: parts of a step, each a launch of its own or a call of a public operator.

A path describes both directions of an operator once. On the common way its parts are launches, which a plan keeps
(`planned`); elsewhere (on the CPU, in traces, of a single row) each part is a call of a public operator, which runs, is
traced and is checked like any other call.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..activations import packed
from ..calls.call import Call
from ..calls.checks import PLAIN_RECIPE, check_alignment, check_plain
from ..calls.launch import Plan
from ..calls.memory import tensors_of
from ..calls.roles import TABLES
from ..choose.problem import Problem, changed
from ..host import experts
from ..ops.grouped_mm import GroupedMmCall
from ..ops.grouped_wgrad import GroupedWgradCall
from .parts import Targets, WeightGrad, contracted

LISTS = (list, tuple)
"""Classes of lists of experts' tensors."""
Part = Callable[..., Any]
"""A part of a step. It takes a call's tensors by name, group sizes as `groups`, and returns the call's results."""
Declared = tuple[type[Call], dict[str, Any]]
"""The kind of a part's call, and the call's options that have no default."""


def grouped_by(call: Call) -> str:
    """Return the name of the argument that gives a call's group sizes."""
    return "offs" if call.splits is None else "splits"


def with_table(op: str, name: str, tensors: Any) -> Any:
    """Return a list of experts' tensors on a table of addresses, ready for the current stream.

    Args:
        tensors: whose shapes were checked; at addresses of which no table is known memory and alignment are, now.
    """
    kind = TABLES[name]
    found = experts.known(kind, tensors)
    if found is not tensors:
        return found
    for label, tensor in tensors_of(name, tensors):
        check_plain(op, label, tensor)
        if kind == "weight":
            check_alignment(op, label, tensor)
    return experts.enter(kind, tensors)


class Launches:
    """The launches of one step, each planned when it is first made, from the very tensors that it takes.

    Attributes:
        plans: by the name of a part, its plan and the problem of that.
    """

    def __init__(self, grouped_by: str, problem: Problem, like: Launches | None = None) -> None:
        """`problem`: the step's. `like`: those of a step that differs in its rows alone."""
        self.plans: dict[str, tuple[Plan, Problem]] = {}
        self._grouped_by, self._world_experts = grouped_by, problem.world_experts
        self._invariant = problem.invariant
        self._like: Mapping[str, tuple[Plan, Problem]] = {} if like is None else like.plans

    def first(self, part: str, declared: Callable[[], Declared]) -> Part:
        """Return a part that has no plan yet: it makes one when it is called."""

        def planned(**tensors: Any) -> Any:
            kind, options = declared()
            plan, _ = self.plans[part] = self._planned(part, kind, {**options, **tensors})
            return plan.run(**tensors)

        return planned

    def _planned(self, part: str, kind: type[Call], given: dict[str, Any]) -> tuple[Plan, Problem]:
        given[self._grouped_by] = given.pop("groups")
        given.pop("out", None)  # each launch looks whether it is given one
        if "numbers" in kind.names and "numbers" not in given:
            given = packed(given)
        call = kind(**{**dict.fromkeys(kind.names), **given})
        call.invariant = self._invariant
        if part not in self._like:
            problem = changed(call.check(), world_experts=self._world_experts)
            return call.plan(problem, checked=False), problem
        like, old = self._like[part]
        problem = changed(old, rows=call.num_rows)
        return like if like.serves(problem.rows) else call.resized_plan(like, problem), problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Path:
    """An operator's forward and its gradients.

    Attributes:
        inputs: of the operator's arguments, those that are tensors, group sizes left out.
        grouped_by: the argument that gives group sizes, "offs" or "splits".
        launches: of a planned step; None: parts are calls of public operators.
        transpose_w: whether weights lie transposed; `in_halves`: whether w1 is a GateUp.
        wide: names of weights whose gradients are float32 although x is 16-bit.
        wgrad_recipe: the recipe of weight gradients, by name.
    """

    inputs: ClassVar[tuple[str, ...]]
    grouped_by: str = "offs"
    launches: Launches | None = None
    transpose_w: bool = False
    in_halves: bool = False
    wide: frozenset[str] = frozenset()
    wgrad_recipe: str = PLAIN_RECIPE

    def forward(
        self, given: dict[str, Any], wanted: frozenset[str], out: Tensor | None
    ) -> tuple[Any, dict[str, Tensor]]:  # fmt: skip
        """The results, and what is saved besides arguments.

        Args:
            given: the arguments, group sizes as "groups"; it takes them over. wanted: the names of what is trained.
        """
        raise NotImplementedError

    def reads(self, wanted: frozenset[str]) -> Mapping[str, bool]:
        """By name, whether backward reads an argument; those that are left out it does."""
        raise NotImplementedError

    def gradients(
        self, saved: dict[str, Any], targets: Targets, wanted: frozenset[str], *dy: Tensor
    ) -> dict[str, Any]:  # fmt: skip
        """Gradients by name, those of lists packed or as lists.

        Args:
            saved: arguments, group sizes as "groups", and what forward made, by name; it may be emptied.
            wanted: names of what is trained. dy: the results' gradients.
        """
        raise NotImplementedError

    def planned(self, call: Call, problem: Problem, like: Path | None) -> Path:
        """Return this path by launches, for calls like one that was checked. `like`: of a call with other rows."""
        launches = Launches(self.grouped_by, problem, None if like is None else like.launches)
        return dataclasses.replace(self, launches=launches)

    def part(self, name: str, declared: Callable[[], Declared]) -> Part:
        """Return a part: a launch, or a call of the public operator.

        Args:
            name: of the part; one name, one way to call it.
            declared: asked where the part is planned, or the operator called; a warm launch is found by the name alone.
        """
        if self.launches is None:
            return functools.partial(self._by_operator, declared)
        found = self.launches.plans.get(name)
        return self.launches.first(name, declared) if found is None else found[0].run

    def _by_operator(self, declared: Callable[[], Declared], groups: Any, **tensors: Any) -> Any:
        kind, options = declared()
        return kind.operator(**{**options, **tensors, self.grouped_by: groups})

    def sizes(self, groups: Tensor) -> dict[str, Any]:
        """Return group sizes as a keyword."""
        return {self.grouped_by: groups}

    def times_w(self, part: str, transpose_w: bool) -> Part:
        """Return a part that computes x w_e^T, or with transpose_w x w_e."""
        return self.part(part, lambda: (GroupedMmCall, {"transpose_w": transpose_w}))

    def data_gradient(self, targets: Targets, dy: Tensor, w: Any, groups: Tensor) -> Tensor:
        """dy w_e, where x's gradient goes."""
        dx = targets.new_grad_input(dy, contracted(w, self.transpose_w))
        made: Tensor = self.times_w("x", not self.transpose_w)(x=dy, w=w, groups=groups, out=dx)
        return made

    def weight_gradient(
        self, targets: Targets, name: str, dy: Tensor, x: Tensor, groups: Tensor, dy_rows: Any = None,
        x_rows: Any = None,
    ) -> Any:  # fmt: skip
        """Return the gradient as the weight lies, for a GateUp two. `dy_rows`, `x_rows`: see `grouped_wgrad`."""
        if self.transpose_w:
            dy, x, dy_rows, x_rows = x, dy, x_rows, dy_rows
        part = self.part(name, lambda: self.weight_gradient_call(name))
        if name in targets.weights:
            part = functools.partial(self._write, targets.weights[name])
        if self.in_halves and name == "w1":
            halves = dy.chunk(2, dim=1)
            return [part(dy=half, x=x, dy_rows=dy_rows, x_rows=x_rows, groups=groups) for half in halves]
        return part(dy=dy, x=x, dy_rows=dy_rows, x_rows=x_rows, groups=groups)

    def _write(self, write: WeightGrad, dy: Tensor, x: Tensor, groups: Tensor, **rows: Any) -> Any:
        """Make a weight's gradient another way; see `Targets.weights`."""
        return write(dy, x, {**self.sizes(groups), **rows, "recipe": self.wgrad_recipe})

    def weight_gradient_call(self, name: str) -> Declared:
        out_dtype = torch.float32 if name in self.wide else None
        return GroupedWgradCall, {"out_dtype": out_dtype, "accumulate": False, "recipe": self.wgrad_recipe}
