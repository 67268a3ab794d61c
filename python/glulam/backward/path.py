"""Class `Path`: the forward and backward of a differentiable operator, described once for launches and operator calls.

A step is the forward of one call together with its backward. A part is one computation of a step, such as FC1 or the
gradient of w2. A path describes the parts of both directions. For common calls on a GPU each part is a kernel launch,
and the launches are kept for later calls (a planned step, see `planned`). For other calls (on the CPU, in traces, of a
single row) each part is a call of a public operator, which runs, is traced and is checked like any other call.
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
PartFunction = Callable[..., Any]
"""A function that computes one part of a step: it takes the tensors of the part's call by name, and group sizes as
`groups`, and returns the call's results.
"""
Declared = tuple[type[Call], dict[str, Any]]
"""Declaration of a part: the class of the part's call, and the call's options that have no default."""


def grouped_by(call: Call) -> str:
    """Return the name of the argument that has a call's group sizes: "offs" or "splits"."""
    return "offs" if call.splits is None else "splits"


def with_table(op: str, name: str, tensors: Any) -> Any:
    """Convert a list of experts' tensors to an `ExpertList` with a table of addresses, ready for the current stream.

    If no table of these addresses is kept, the tensors' memory and alignment are checked, and a table is made.

    Args:
        op: the operator, for errors.
        name: the argument.
        tensors: the list, whose shapes were checked.
    """
    kind = TABLES[name]
    found = experts.with_kept_table(kind, tensors)
    if found is not tensors:
        return found
    for label, tensor in tensors_of(name, tensors):
        check_plain(op, label, tensor)
        if kind == "weight":
            check_alignment(op, label, tensor)
    return experts.enter(kind, tensors)


class Launches:
    """The kernel launches of one planned step.

    The plan of a launch is made when its part of the step first runs, from the tensors of this run.

    Attributes:
        plans: {name of a part: (its plan, the problem of its call)}.
    """

    def __init__(self, grouped_by: str, problem: Problem, like: Launches | None = None) -> None:
        """Make launches without plans.

        Args:
            grouped_by: the argument that has group sizes, "offs" or "splits".
            problem: the problem of the step's call.
            like: the launches of a step that differs only in its number of rows; their plans are copied and resized.
                None: there is no such step.
        """
        self.plans: dict[str, tuple[Plan, Problem]] = {}
        self._grouped_by, self._world_experts = grouped_by, problem.world_experts
        self._invariant = problem.invariant
        self._like: Mapping[str, tuple[Plan, Problem]] = {} if like is None else like.plans

    def first(self, part: str, declared: Callable[[], Declared]) -> PartFunction:
        """Return the function of a part that has no plan yet. Its first call makes the plan, keeps it, and runs it.

        Args:
            part: name of the part.
            declared: function that returns the class and options of the part's call.
        """

        def planned(**tensors: Any) -> Any:
            kind, options = declared()
            plan, _ = self.plans[part] = self._planned(part, kind, {**options, **tensors})
            return plan.run(**tensors)

        return planned

    def _planned(self, part: str, kind: type[Call], given: dict[str, Any]) -> tuple[Plan, Problem]:
        """Make the plan of a part; return it with the problem of the part's call.

        If there is a step that differs only in its number of rows, its plan is used, or copied and resized.

        Args:
            part: name of the part.
            kind: class of the part's call.
            given: arguments of the call; this function may change the dict.
        """
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
    """The forward and the gradients of an operator, computed in parts: the operator's GEMMs and other kernels.

    Each operator has a subclass, which computes both with functions that the method `part` returns. In a planned step
    (see `planned`) such a function launches kernels; otherwise it calls a public operator.

    Attributes:
        inputs: names of the operator's tensor arguments, except group sizes.
        grouped_by: the argument that has group sizes, "offs" or "splits".
        launches: the kernel launches of a planned step. None: this is no planned step, so each part calls a public
            operator.
        transpose_w: True: weights are [E, K, N]. False: [E, N, K].
        in_halves: True: w1 is a GateUp.
        wide: names of weights whose gradients are float32 although x is 16-bit.
        wgrad_recipe: name of the recipe of weight gradients.
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
        """Compute the results.

        Args:
            given: arguments by name, group sizes as "groups"; this method may change the dict.
            wanted: names of the arguments that require a gradient.
            out: buffer for the result. None: a new tensor.

        Returns:
            (the results, {name: tensor to save for backward}). The dict does not have the arguments.
        """
        raise NotImplementedError

    def reads(self, wanted: frozenset[str]) -> Mapping[str, bool]:
        """Return {argument: True if backward reads it}, so that only such arguments are saved.

        Arguments that are not in the dict are read, too.

        Args:
            wanted: names of the arguments that require a gradient.
        """
        raise NotImplementedError

    def gradients(
        self, saved: dict[str, Any], targets: Targets, wanted: frozenset[str], *dy: Tensor
    ) -> dict[str, Any]:  # fmt: skip
        """Compute the gradients of the arguments in `wanted`.

        Args:
            saved: {name: saved tensor}: arguments (group sizes as "groups"), and tensors that forward made. This method
                may remove entries.
            targets: buffers for gradients.
            wanted: names of the arguments that require a gradient.
            dy: the gradients of the results.

        Returns:
            Gradients by argument name; for a list of E tensors, one tensor [E, ...] or a list of E gradients.
        """
        raise NotImplementedError

    def planned(self, call: Call, problem: Problem, like: Path | None) -> Path:
        """Return a copy of this path for a planned step: its parts are launches, each planned when it first runs.

        Args:
            call: a checked call.
            problem: the call's problem.
            like: the planned path of a call that differs only in its number of rows. None: there is none.
        """
        launches = Launches(self.grouped_by, problem, None if like is None else like.launches)
        return dataclasses.replace(self, launches=launches)

    def part(self, name: str, declared: Callable[[], Declared]) -> PartFunction:
        """Return the function that computes a part of the step: by a launch, or by a call of the public operator.

        Args:
            name: name of the part. Within a step all calls with one name have the same class and options.
            declared: function that returns the class and options of the part's call. It is not called if the part's
                launch is planned already.
        """
        if self.launches is None:
            return functools.partial(self._by_operator, declared)
        found = self.launches.plans.get(name)
        return self.launches.first(name, declared) if found is None else found[0].run

    def _by_operator(self, declared: Callable[[], Declared], groups: Any, **tensors: Any) -> Any:
        """Compute a part of forward or backward, such as a GEMM, by calling its public operator; return the results.

        Args:
            declared: function that returns the class of the part's call (a `Call`, which has the operator) and the
                call's options.
            groups: group sizes.
            tensors: the part's other tensor arguments.
        """
        kind, options = declared()
        return kind.operator(**{**options, **tensors, self.grouped_by: groups})

    def sizes(self, groups: Tensor) -> dict[str, Any]:
        """Return group sizes as a keyword of public operators: {"offs": groups} or {"splits": groups}."""
        return {self.grouped_by: groups}

    def times_w(self, part: str, transpose_w: bool) -> PartFunction:
        """Return the function that computes the part named `part`, a GEMM x w_e^T, or with transpose_w x w_e."""
        return self.part(part, lambda: (GroupedMmCall, {"transpose_w": transpose_w}))

    def data_gradient(self, targets: Targets, dy: Tensor, w: Any, groups: Tensor) -> Tensor:
        """Compute x's gradient dy w_e, zero after the last group, into the buffer of `targets` or a new tensor.

        Args:
            targets: buffers for gradients.
            dy: gradient of the product x w_e^T.
            w: the weight.
            groups: group sizes.
        """
        dx = targets.new_grad_input(dy, contracted(w, self.transpose_w))
        made: Tensor = self.times_w("x", not self.transpose_w)(x=dy, w=w, groups=groups, out=dx)
        return made

    def weight_gradient(
        self, targets: Targets, name: str, dy: Tensor, x: Tensor, groups: Tensor, dy_rows: Any = None,
        x_rows: Any = None,
    ) -> Any:  # fmt: skip
        """Compute a weight's gradient, in the layout of the weight; for a GateUp, return a list of two.

        Args:
            targets: if `targets.weights` has a function for this weight, it is called instead of `grouped_wgrad`.
            name: the weight's name.
            dy: gradient of the product x w_e^T.
            x: the matrix with which the weight was multiplied.
            groups: group sizes.
            dy_rows, x_rows: int32 [T], indices of the rows of dy and of x. None: rows lie in order.
                At most one of the two is given.
        """
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
        """Compute a weight's gradient by the caller's function instead of `grouped_wgrad`; return its result.

        The result is the gradient, or None if autograd shall get none (`parts.WeightGrad`).

        Args:
            write: the caller's function for this weight (`Targets.weights`). It is called with dy, x, and a dict of
                keywords of `grouped_wgrad`: group sizes, `dy_rows`, `x_rows` and the recipe.
            dy: gradient of the product x w_e^T.
            x: the matrix with which the weight was multiplied.
            groups: group sizes.
            rows: `dy_rows` and `x_rows` of `weight_gradient`.
        """
        return write(dy, x, {**self.sizes(groups), **rows, "recipe": self.wgrad_recipe})

    def weight_gradient_call(self, name: str) -> Declared:
        """Return the class and options of the call that computes the gradient of weight `name`."""
        out_dtype = torch.float32 if name in self.wide else None
        return GroupedWgradCall, {"out_dtype": out_dtype, "accumulate": False, "recipe": self.wgrad_recipe}
