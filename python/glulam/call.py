"""A call that no plan serves yet: route it, check it, plan it, run it. Nothing here is on the fast path."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from . import device as gpus
from . import dispatch, experts, groups, kernels
from .dispatch import Problem
from .plan import ENV_CHECK, Launch, Plans, checking, launch_nothing
from .signature import check_alignment, check_no_overlap, extent, runs_kernels


@dataclasses.dataclass
class Call:
    """The arguments of one call of an operator. Fields are named as the operator's parameters.

    A subclass says what its arguments mean (`check`), how the CPU computes it (`reference`), what is constant over
    calls (`plan`) and how to pass the rest to the plan (`run`).
    """

    op: ClassVar[str]
    operator: ClassVar[Callable[..., Any]]
    plans: ClassVar[Plans[Any]]
    matrices: ClassVar[tuple[str, ...]] = ("x", "out")
    weights: ClassVar[tuple[str, ...]]
    biases: ClassVar[tuple[str, ...]]
    scales: ClassVar[tuple[str, ...]]

    x: Tensor
    offs: Tensor | None
    splits: Any
    out: Tensor | None

    def check(self) -> Problem:
        """The problem, from metadata alone. Raises ValueError or TypeError."""
        raise NotImplementedError

    def reference(self, problem: Problem) -> Any:
        raise NotImplementedError

    def plan(self, problem: Problem, launch: Launch) -> Any:
        raise NotImplementedError

    def run(self, plan: Any) -> Any:
        raise NotImplementedError

    @property
    def groups(self) -> Any:
        """Group sizes, in whichever form they were given."""
        return self.offs if self.splits is None else self.splits

    def arguments(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def again(self) -> Any:
        """Through the operator's front door."""
        return type(self).operator(**self.arguments())

    def settle(self, key: Hashable, plan: Any, failure: Exception | None) -> Any:
        """The result of a call for which the fast path found no plan, or failed.

        Args:
            key: of the plan; None where it could not be built.
            plan: the plan that failed, if any did.
            failure: what the fast path raised, if it did.
        """
        if is_dynamo_compiling() or _is_traced(self.x):
            return self.dispatch()
        return self.execute(key, plan, failure)

    def dispatch(self) -> Any:
        """Through torch's dispatcher, as an operator that traces see as one."""
        from . import library

        return library.call(self)

    def execute(self, key: Hashable = None, plan: Any = None, failure: Exception | None = None) -> Any:
        """Check everything, then compute: on the CPU by the reference, else by a new plan. See `settle`."""
        problem = self.check()
        self.check_addresses()
        if plan is not None and failure is not None:
            raise failure  # no argument's fault
        if not runs_kernels(self.x):
            return self.reference(problem)
        ready = self.prepared()
        if ready is not self:
            return ready.again()
        if failure is not None:
            raise failure
        plan = self.plan(problem, self._launch(problem))
        if checking():
            self._check_group_sizes()
        elif key is not None:
            self.plans.keep(key, plan)
        return self.run(plan)

    def check_addresses(self) -> None:
        """Alignment, on a GPU, and an output that shares no memory with an input."""
        named = {name: getattr(self, name) for name in (*self.matrices, *self.weights)}
        if runs_kernels(self.x):
            for name, value in named.items():
                for label, tensor in _tensors(name, value):
                    check_alignment(self.op, label, tensor)
        if self.out is None:
            return
        inputs = (*named, *self.biases, *self.scales, "offs", "splits")
        for name in dict.fromkeys(inputs):
            for label, tensor in _tensors(name, getattr(self, name)):
                if name != "out" and tensor.device == self.out.device:
                    check_no_overlap(self.op, "out", self.out, label, tensor)

    def host_ends(self) -> list[int]:
        """Where each group ends; waits for the device where they are there. Raises ValueError out of range."""
        return groups.ends(self.op, self.offs, self.splits, self.x.shape[0])

    def prepared(self) -> Call:
        """This call with tables for its lists and with group sizes on the device; itself where nothing is to do."""
        changes: dict[str, Any] = {}
        for kind, names in (("weight", self.weights), ("bias", self.biases)):
            for name in names:
                value = getattr(self, name)
                if isinstance(value, (list, tuple)):
                    changes[name] = experts.enter(kind, value)
        if self.splits is not None and _on_host(self.splits):
            changes["splits"] = groups.on_device(self.op, self.splits, self.x.shape[0], self.x.device)
        return dataclasses.replace(self, **changes) if changes else self

    def _launch(self, problem: Problem) -> Launch:
        index = self.x.get_device()
        gpu = gpus.gpu(index)
        kernel = kernels.find(dispatch.choose(problem, gpu.arch).spec)
        return Launch(
            op=self.op,
            function=kernel.function if problem.rows else launch_nothing,
            device=self.x.device,
            index=index,
            only=gpus.is_only_one(),
            dtype=self.x.dtype,
            group_form=groups.form(self.groups, is_offs=self.splits is None),
            experts=problem.experts,
            sm_count=gpu.sm_count,
            rows=problem.rows,
            x_extent=extent(self.x),
            out_extent=0 if self.out is None else extent(self.out),
        )

    def _check_group_sizes(self) -> None:
        if gpus.is_capturing():
            warnings.warn(f"{self.op}: {ENV_CHECK} cannot read group sizes under graph capture", stacklevel=4)
        else:
            self.host_ends()


def _is_traced(x: Any) -> bool:
    """Whether x (a fake or meta tensor, a wrapper) is the business of torch's dispatcher."""
    return isinstance(x, Tensor) and (type(x) not in gpus.PLAIN_TENSORS or x.is_meta)


def _on_host(splits: Any) -> bool:
    return not isinstance(splits, Tensor) or (splits.device.type == "cpu" and gpus.KERNEL_DEVICE != "cpu")


def _tensors(name: str, value: Any) -> list[tuple[str, Tensor]]:
    """The tensors of an argument with the names that errors give them."""
    if isinstance(value, Tensor):
        return [(name, value)]
    if isinstance(value, (list, tuple)):
        return [(f"{name}[{i}]", tensor) for i, tensor in enumerate(value) if isinstance(tensor, Tensor)]
    return []
