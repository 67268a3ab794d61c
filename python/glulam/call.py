"""A call that no plan serves yet: route it, check it, plan it, run it. Nothing here is on the fast path."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from . import device as gpus
from . import experts, groups, kernels
from .changed import changed
from .experts import GateUp
from .plan import ENV_CHECK, Launch, checking, launch_nothing
from .plans import Plans
from .problem import Problem
from .signature import (
    MAX_ROWS,
    check_alignment,
    check_no_overlap,
    check_plain,
    check_written,
    extent,
    leading,
    refuse_gradients,
    refuse_out,
    runs_kernels,
    tensors_of,
)


@dataclasses.dataclass
class Call:
    """The arguments of one call of an operator. Fields are named as the operator's parameters.

    A subclass says what its arguments mean (`check`), how the CPU computes it (`reference`), what is constant over
    calls (`plan`) and how to pass the rest to the plan (`run`).
    """

    op: ClassVar[str]
    operator: ClassVar[Callable[..., Any]]
    reads: ClassVar[tuple[str, ...]]  # arguments whose addresses a plan looks at, in its order
    plans: ClassVar[Plans[Any]]
    matrices: ClassVar[tuple[str, ...]] = ("x", "out")
    outputs: ClassVar[tuple[str, ...]] = ("out",)
    gradients: ClassVar[tuple[str, ...]] = ()  # outputs that are packed or a list, as weights are
    weights: ClassVar[tuple[str, ...]]
    biases: ClassVar[tuple[str, ...]]
    tabled: ClassVar[tuple[str, ...] | None] = None  # weights that kernels take as lists; by default all
    scales: ClassVar[tuple[str, ...]]
    rowwise: ClassVar[tuple[str, ...]] = ("x", "out", "row_scale")  # arguments with a row for each of the lead's
    of_tokens: ClassVar[tuple[str, ...]] = ()  # arguments of a layer that its rows' MLP has not
    given: ClassVar[tuple[str, ...]] = ("lead",)  # what plans are found by, in their order, as far as `free` needs it
    of_any_rows: ClassVar[tuple[str, ...]] = ("lead",)  # of these, what `indices` are of, and what has tokens of it
    data_path: ClassVar[Any] = None  # of its gradient (`backward.data_path`), where another than the recipe's own
    with_backward: ClassVar[Callable[..., Any]]  # set by `backward.entry`, which is made of operators, and so of calls
    through_torch: ClassVar[Callable[..., Any]]  # set by `library`, which lists them

    offs: Tensor | None
    splits: Any

    def check(self) -> Problem:
        """The problem, from metadata alone. Raises ValueError or TypeError."""
        raise NotImplementedError

    def results(self, problem: Problem) -> Any:
        """New tensors for what is returned, uninitialised."""
        raise NotImplementedError

    def reference(self, problem: Problem) -> Any:
        raise NotImplementedError

    def reference_rows(self, out: Tensor) -> Tensor:
        """Of an MLP: `out`, with its result of each row."""
        raise NotImplementedError

    def without_rows(self, problem: Problem) -> Any:
        """The result for T = 0, where that takes work that a kernel without rows would not do."""
        return NotImplemented

    def plan(self, problem: Problem, launch: Launch) -> Any:
        raise NotImplementedError

    def sizes(self, problem: Problem, launch: Launch) -> dict[str, Any]:
        """The fields of a plan that depend on the number of rows, but for those of a Launch."""
        return {}

    def run(self, plan: Any) -> Any:
        raise NotImplementedError

    @property
    def lead(self) -> Tensor:
        """The argument that gives T, dtype and device to the others."""
        lead: Tensor = getattr(self, leading(self.op))
        return lead

    @property
    def indices(self) -> Tensor | None:
        """Which of the lead's rows each row is; None where they are its rows."""
        found: Tensor | None = getattr(self, "rows", None)
        return found

    def by_index(self) -> tuple[Any, ...]:
        """What a plan's `run` takes last, where rows come by index."""
        return () if self.indices is None else (self.indices,)

    @property
    def free(self) -> tuple[int, ...]:
        """Which of what is given have rows of any number: those that others are indices of."""
        if self.indices is None:
            return ()
        present = [name for name in self.given if getattr(self, name, None) is not None]
        return tuple(place for place, name in enumerate(present) if name in self.of_any_rows)

    @property
    def num_rows(self) -> int:
        """T, which a trace may have as a symbol."""
        return (self.lead if self.indices is None else self.indices).shape[0]

    @property
    def groups(self) -> Any:
        """Group sizes, in whichever form they were given."""
        return self.offs if self.splits is None else self.splits

    def arguments(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def again(self) -> Any:
        """Through the operator's front door."""
        return type(self).operator(**self.arguments())

    def differentiate(self, key: Hashable = None, plan: Any = None, failure: Exception | None = None) -> Any:
        """As `settle`, for a call of which an argument requires a gradient."""
        if gpus.is_traced(self.lead):  # one operator in a graph, as without a gradient; its backward comes with it
            refuse_out(self.op, getattr(self, "out", None))
            return self.dispatch()
        return self.with_backward(self, key, plan, failure)

    def refuse_gradients(self) -> None:
        """For operators without a gradient: raises GradientNotSupported where an argument requires one."""
        names = (*self.matrices, *self.weights, *self.biases, *self.scales)
        refuse_gradients(self.op, **{name: getattr(self, name) for name in names})

    def settle(
        self, key: Hashable, plan: Any, failure: Exception | None, found: Mapping[str, Any] = MappingProxyType({})
    ) -> Any:
        """The result of a call for which the fast path found no plan, or failed.

        Args:
            key: of the plan; None where it could not be built.
            plan: the plan that failed, if any did.
            failure: what the fast path raised, if it did.
            found: what the key was built from in place of arguments, with their names.
        """
        try:
            if key is not None and failure is None:
                try:
                    ready = changed(self, **found) if found else self
                    plan = ready.plan_alike(key)
                    if plan is not None:
                        return ready.run(plan)
                except Exception as error:
                    failure = error
            if is_dynamo_compiling() or self.is_traced():
                return self.dispatch()
            return self.execute(key, plan, failure)
        finally:
            del failure  # as in the operators

    def plan_alike(self, key: Hashable) -> Any:
        """A plan, which is kept, where a call that differs in its rows alone was checked; else None."""
        settled = self.settled(key, self.plans)
        if settled is None:
            return None
        problem, like = settled
        plan = self.resized(like, problem.rows, **self.sizes(problem, like))
        self.plans.keep(key, plan)
        return plan

    def settled(self, key: Hashable, plans: Plans[Any]) -> tuple[Problem, Any] | None:
        """The problem, and a plan to be resized, where a call was checked that differs in its rows alone.

        The layout of a single row is arbitrary, so that nothing is known of it.
        """
        rows = self.num_rows
        if not 1 < rows < MAX_ROWS or checking():
            return None
        known = plans.settled(key, (rows,))
        return None if known is None else (changed(known[0], rows=rows), known[1])

    def resized(self, like: Any, rows: int, reads: tuple[str, ...] | None = None, **sizes: Any) -> Any:
        """A plan like another one, for a problem with so many rows. `sizes`: of its own fields, as of `sizes`;
        `reads`: as of `launch`."""
        function, draws_tickets = like.serving.at(rows)
        rowwise, names = self.rowwise, self.reads if reads is None else reads
        extents = zip(names, like.extents, strict=True)
        return changed(
            like,
            apart=set(),
            function=function,
            draws_tickets=draws_tickets,
            rows=rows,
            extents=tuple([_extent(getattr(self, name)) if name in rowwise else size for name, size in extents]),
            out_extents=self._out_extents() if like.out_extents else (),
            **sizes,
        )

    def settle_rows(self, key: Hashable, plans: Plans[Any], problem: Problem, plan: Any) -> None:
        """Let `settled` know this call, which was checked, and its plan."""
        if problem.rows > 1:
            count = sum(getattr(self, name) is not None for name in self.rowwise)
            free = self.free
            plans.settle(key, (problem.rows,), count - len(free), (problem, plan), free)

    @property
    def form(self) -> str:
        """The name of this call as an operator of torch's: `library.FORMS` lists them."""
        return self.op if getattr(self, "out", None) is None else f"{self.op}_out"

    def assembled(self, returned: Any) -> Any:
        """What the call returns, given what its operator of torch's does: only what is not in a given buffer."""
        out = getattr(self, "out", None)
        return returned if out is None else out

    def dispatch(self) -> Any:
        """Through torch's dispatcher, as an operator that traces see as one."""
        return self.through_torch(self)

    def execute(self, key: Hashable = None, plan: Any = None, failure: Exception | None = None) -> Any:
        """Check everything, then compute: on the CPU by the reference, else by a new plan. See `settle`."""
        self.check_plain()
        problem = self.check()
        self.check_addresses()
        if plan is not None and failure is not None:
            raise failure  # no argument's fault
        if not runs_kernels(self.lead):
            with torch.autocast(self.lead.device.type, enabled=False):  # it would round the reference's operands
                return self.reference(problem)
        if not problem.rows and (result := self.without_rows(problem)) is not NotImplemented:
            return result
        ready = self.prepared()
        if ready is not self:
            return ready.again()
        if failure is not None:
            raise failure
        plan = self.plan(problem, self.launch(problem))
        if checking():
            self._check_group_sizes()
        elif key is not None:
            self.plans.keep(key, plan)
            self.settle_rows(key, self.plans, problem, plan)
        return self.run(plan)

    def is_traced(self) -> bool:
        """Whether the call is the business of torch's dispatcher: it leads on meta, or an argument is of a subclass."""
        given = (*self.tensors(), *self.written())
        return gpus.is_traced(self.lead) or any(type(tensor) not in gpus.PLAIN_TENSORS for _, tensor in given)

    def check_plain(self) -> None:
        """Tensors that are nothing but numbers in memory."""
        written = self.written()
        for label, tensor in (*self.tensors(), *written):
            check_plain(self.op, label, tensor)
        for label, tensor in written:
            check_written(self.op, label, tensor)

    def check_addresses(self) -> None:
        """Alignment, on a GPU, and an output that shares no memory with an input."""
        named = {name: getattr(self, name) for name in (*self.matrices, *self.weights, *self.outputs)}
        if runs_kernels(self.lead):
            for name, value in named.items():
                for label, tensor in tensors_of(name, value):
                    check_alignment(self.op, label, tensor)
        written = self.written()
        for label, tensor in self.tensors() if written else ():
            if tensor.device == self.lead.device:
                for out_label, out in written:
                    check_no_overlap(self.op, out_label, out, label, tensor)

    def tensors(self) -> list[tuple[str, Tensor]]:
        """All inputs, those of lists one by one, under the names that errors give them."""
        names = (*self.matrices, *self.weights, *self.biases, *self.scales, "offs", "splits")
        read = (name for name in names if name not in self.outputs)
        return [pair for name in read for pair in tensors_of(name, getattr(self, name))]

    def written(self) -> list[tuple[str, Tensor]]:
        """The outputs that were given, likewise."""
        return [pair for name in self.outputs for pair in tensors_of(name, getattr(self, name))]

    def host_ends(self) -> list[int]:
        """Where each group ends; waits for the device where they are there. Raises ValueError out of range."""
        return groups.ends(self.op, self.offs, self.splits, self.num_rows)

    def prepared(self) -> Any:
        """This call with tables for its lists and with group sizes on the device; itself where nothing is to do."""
        changes: dict[str, Any] = {}
        weights = self.weights if self.tabled is None else self.tabled
        for kind, names in (("weight", weights), ("bias", self.biases), ("gradient", self.gradients)):
            for name in names:
                value = getattr(self, name)
                if isinstance(value, (list, tuple)) and not isinstance(value, GateUp):
                    changes[name] = experts.enter(kind, value)
        if self.splits is not None and _on_host(self.splits):
            changes["splits"] = groups.on_device(self.op, self.splits, self.num_rows, self.lead.device)
        return changed(self, **changes) if changes else self

    def launch(self, problem: Problem, reads: tuple[str, ...] | None = None) -> Launch:
        """The kernel that serves a problem, which is this call's or a part of it, and the constants of its calls.

        `reads`: where a plan looks at the addresses of other arguments.
        """
        lead, index = self.lead, self.lead.get_device()
        serving = kernels.serving(problem, gpus.gpu(index))
        served = serving.at(problem.rows)
        return Launch(
            op=self.op,
            device=lead.device,
            index=index,
            only=gpus.is_only_one(),
            dtype=lead.dtype,
            group_form=groups.form(self.groups, is_offs=self.splits is None),
            experts=problem.experts,
            sm_count=gpus.gpu(index).sm_count,
            serving=serving,
            function=served.function if problem.rows else launch_nothing,
            draws_tickets=served.draws_tickets,
            rows=problem.rows,
            extents=self.extents(self.reads if reads is None else reads),
            out_extents=self._out_extents(),
        )

    def extents(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """The bytes that arguments reach over, as of `Launch.extents`; 0 of one that the operator has not."""
        return tuple(_extent(getattr(self, name, None)) for name in names)

    def _out_extents(self) -> tuple[int, ...]:
        values = [getattr(self, name) for name in self.outputs]
        parts = [value if isinstance(value, (list, tuple)) else [value] for value in values]
        return tuple([_extent(one) for part in parts for one in part if one is not None])

    def _check_group_sizes(self) -> None:
        if gpus.is_capturing():
            warnings.warn(f"{self.op}: {ENV_CHECK} cannot read group sizes under graph capture", stacklevel=4)
        else:
            self.host_ends()


def _on_host(splits: Any) -> bool:
    return not isinstance(splits, Tensor) or (splits.device.type == "cpu" and gpus.KERNEL_DEVICE != "cpu")


def _extent(value: Any) -> int:
    """Of what has one: no list, and not None."""
    return extent(value) if isinstance(value, Tensor) else 0
