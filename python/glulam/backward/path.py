"""How a differentiable operator computes: parts of a step, each a launch of its own or a call of a public operator.

A path describes both directions of an operator once. On the common way its parts are launches, which a plan keeps
(`planned`); elsewhere (on the CPU, in traces, of a single row) each part is a call of a public operator, which runs, is
traced and is checked like any other call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..activations import packed
from ..calls.call import Call
from ..calls.checks import check_alignment, check_plain
from ..calls.launch import Plan
from ..calls.memory import tensors_of
from ..calls.roles import TABLES
from ..choose.problem import Problem, changed
from ..host import experts
from ..ops.grouped_mm import GroupedMmCall
from ..ops.grouped_wgrad import GroupedWgradCall
from .parts import Targets, contracted

LISTS = (list, tuple)
"""Classes of lists of experts' tensors."""
Groups = dict[str, Any]
"""Group sizes, as a keyword."""
Options = Callable[[], dict[str, Any]]
"""Makes a call's options, all that have no default: where the call is planned, or an operator is called."""
Make = Callable[[str, type[Call], Groups, Options, dict[str, Any]], Any]


def by_operator(part: str, kind: type[Call], groups: Groups, options: Options, tensors: dict[str, Any]) -> Any:
    """Return the results of a part of a step, by a call of its operator.

    Args:
        part: its name; one name, one way to call it.
        kind: of the call.
        tensors: the call's, by name; None where they are left out. The caller's own dictionary.
    """
    return kind.operator(**{**options(), **tensors, **groups})


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

    def __init__(self, has_lists: bool, world_experts: int, like: Launches | None = None) -> None:
        """`world_experts`: of the step's problem. `like`: those of a step that differs in its rows alone."""
        self.plans: dict[str, tuple[Plan, Problem]] = {}
        self._has_lists, self._world_experts = has_lists, world_experts
        self._like: Mapping[str, tuple[Plan, Problem]] = {} if like is None else like.plans

    def make(self, part: str, kind: type[Call], groups: Groups, options: Options, tensors: dict[str, Any]) -> Any:
        """Return the results of a part by a launch. For the arguments see `by_operator`."""
        if self._has_lists:
            for name, value in tensors.items():
                if value.__class__ is list:
                    tensors[name] = with_table(kind.op, name, value)
        if tensors.get("out") is not None:
            part += ", into out"
        found = self.plans.get(part)
        if found is None:
            found = self.plans[part] = self._planned(part, kind, {**options(), **tensors, **groups})
        (tensors["groups"],) = groups.values()
        return found[0].run(**tensors)

    def _planned(self, part: str, kind: type[Call], given: dict[str, Any]) -> tuple[Plan, Problem]:
        if "numbers" in kind.names and "numbers" not in given:
            given = packed(given)
        call = kind(**{**dict.fromkeys(kind.names), **given})
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
        make: makes a part of the step; see `by_operator`, the default.
        launches: whose `make` it is, of a planned step; else None.
        transpose_w: whether weights lie transposed; `in_halves`: whether w1 is a GateUp.
        wide: names of weights whose gradients are float32 although x is 16-bit.
    """

    inputs: ClassVar[tuple[str, ...]]
    make: Make = by_operator
    launches: Launches | None = None
    transpose_w: bool = False
    in_halves: bool = False
    wide: frozenset[str] = frozenset()

    def forward(
        self, given: dict[str, Any], wanted: frozenset[str], out: Tensor | None
    ) -> tuple[Any, dict[str, Tensor]]:  # fmt: skip
        """The results, and what is saved besides arguments.

        Args:
            given: the arguments, which it takes over. wanted: the names of what is trained.
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
            saved: arguments and what forward made, by name; it may be emptied.
            wanted: names of what is trained. dy: the results' gradients.
        """
        raise NotImplementedError

    def planned(self, call: Call, problem: Problem, like: Path | None) -> Path:
        """Return this path by launches, for calls like one that was checked. `like`: of a call with other rows."""
        has_lists = any(getattr(call, name).__class__ in LISTS for name in (*call.weights, *call.biases))
        launches = Launches(has_lists, problem.world_experts, None if like is None else like.launches)
        return dataclasses.replace(self, launches=launches, make=launches.make)

    def times_w(self, part: str, groups: Groups, transpose_w: bool, tensors: dict[str, Any]) -> Tensor:
        """x w_e^T, or with transpose_w x w_e. `tensors`: x, w, and grouped_mm's others."""
        made: Tensor = self.make(part, GroupedMmCall, groups, lambda: {"transpose_w": transpose_w}, tensors)
        return made

    def data_gradient(self, targets: Targets, dy: Tensor, w: Any, groups: dict[str, Any]) -> Tensor:
        """dy w_e, where x's gradient goes."""
        dx = targets.new_grad_input(dy, contracted(w, self.transpose_w))
        return self.times_w("x", groups, not self.transpose_w, {"x": dy, "w": w, "out": dx})

    def weight_gradient(
        self, targets: Targets, name: str, dy: Tensor, x: Tensor, groups: dict[str, Any], dy_rows: Any = None,
        x_rows: Any = None,
    ) -> Any:  # fmt: skip
        """Return the gradient as the weight lies, for a GateUp two. `dy_rows`, `x_rows`: see `grouped_wgrad`."""
        if self.in_halves and name == "w1":
            halves = dy.chunk(2, dim=1)
            return [self._weight_gradient(targets, name, half, x, groups, dy_rows, x_rows) for half in halves]
        if self.transpose_w:
            dy, x, dy_rows, x_rows = x, dy, x_rows, dy_rows
        return self._weight_gradient(targets, name, dy, x, groups, dy_rows, x_rows)

    def _weight_gradient(
        self, targets: Targets, name: str, dy: Tensor, x: Tensor, groups: Groups, dy_rows: Any, x_rows: Any
    ) -> Any:
        if name in targets.weights:
            return targets.weights[name](dy, x, {**groups, "dy_rows": dy_rows, "x_rows": x_rows})
        tensors = {"dy": dy, "x": x, "dy_rows": dy_rows, "x_rows": x_rows}
        return self.make(name, self.weight_gradient_kind, groups, lambda: self.weight_gradient_options(name), tensors)

    @property
    def weight_gradient_kind(self) -> type[GroupedWgradCall]:
        return GroupedWgradCall

    def weight_gradient_options(self, name: str) -> dict[str, Any]:
        return {"out_dtype": torch.float32 if name in self.wide else None, "accumulate": False}
