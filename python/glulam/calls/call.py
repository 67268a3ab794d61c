"""Class `Call`: the slow path of an operator, for calls without a kept plan. It checks them, makes a plan, and runs it.

A plan (`launch.Plan`) is a launch that serves all calls of equal metadata. If a call's plan is kept, the operator's
generated function (`front`) runs it without this module.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..choose import choose
from ..choose.problem import Problem, changed
from ..choose.shipped import TILED, Choice
from ..host import device as gpus
from ..host import experts, groups, invariance
from ..host.experts import GateUp
from ..host.plans import Plans, unplanned
from . import checks, sharding
from .checks import MAX_ROWS, any_requires_grad, check_width, refuse_out, runs_kernels
from .launch import ResultTensor
from .memory import check_dense, extent
from .planning import PlanMaker

ENV_CHECK = "GLULAM_CHECK"


def checking() -> bool:
    """Return True if group sizes must be read back and checked ($GLULAM_CHECK).

    Calls that find a kept plan do not ask. While the variable is set no plan is kept, so that every call asks.
    """
    return os.environ.get(ENV_CHECK, "0") not in ("", "0")


class Call(PlanMaker):
    """One call of an operator: its arguments, and methods that check, compute and differentiate it.

    Each operator has a subclass, which checks the arguments (`check`) and has a `definition`: data that says how the
    operator's results, kernel arguments and reference are made (`definition.Definition`). The rest is derived from the
    operator's parameters and their roles, such as a weight or a dtype (`declare`).

    Attributes:
        explains: True if `glulam.explain` accepts this operator.
        public: the function that users call. Unset (None): it is the operator itself.
        tabled: names of weights that may be lists of experts' tensors, which kernels find by a table of addresses.
            None: all weights.
        differentiable: True if the operator has a gradient.
        beside_weights: names of arguments that hold a quantised weight's scales and global scale.
        tokens: for the MoE layer, the functions that turn tokens into rows and rows into tokens
            (`backward.data_path.TokenFunctions`).
        operator: the operator's generated function.
        quantized: class of the operator's calls with quantised arguments. None: there are none.
        with_backward: function that computes a call with a backward, set by `backward.entry`, which imports this
            module.
        torch_types: an argument's type in torch's schema, by name, where it differs from the type of its role.
        fixed_without_out: for the torch operator without `out`: the values of arguments that its schema lacks, by name.
        fixed_with_out: for the torch operator with `out`: the values of arguments that its schema lacks, by name.
        is_torch_op: True if the operator is registered with torch.
        has_torch_out: True if there are torch operators that write a buffer.
        through_torch: function that calls the torch operator, set by `library`.
    """

    explains: ClassVar[bool] = False
    public: ClassVar[Callable[..., Any] | None] = None
    tabled: tuple[str, ...] | None = None
    differentiable: ClassVar[bool] = False
    beside_weights: ClassVar[tuple[str, ...]] = ()
    tokens: ClassVar[Any] = None
    operator: ClassVar[Callable[..., Any]]
    quantized: ClassVar[Any] = None  # a subclass of `quantized.Quantized`
    with_backward: ClassVar[Callable[..., Any]]  # set by `backward.entry`, which imports this module

    # The call as an operator of torch, see `library`:
    torch_types: ClassVar[dict[str, str]] = {}
    fixed_without_out: ClassVar[dict[str, Any]] = {}
    fixed_with_out: ClassVar[dict[str, Any]] = {}
    is_torch_op: ClassVar[bool] = True
    has_torch_out: ClassVar[bool] = True  # whether there are torch operators that write a buffer
    through_torch: ClassVar[Callable[..., Any]]  # set by `library`, which lists them

    @classmethod
    def arguments_of(cls, public: dict[str, Any]) -> dict[str, Any]:
        """Convert the public function's arguments to the arguments of a call of this class, by name.

        Args:
            public: the public function's arguments by name; may be modified. Shapes may stand for tensors.
        """
        return public

    def served_splits(self) -> tuple[sharding.Split, ...]:
        """Return the ways (`sharding.Split`) in which one dimension of a device mesh may split the call's DTensors.

        Replicating all of them is always possible, and not listed.
        """
        return ()

    def choice(self, problem: Problem, arch: str, gpu: str) -> Choice:
        """Choose the kernel that serves this call on an architecture; return it with the reason.

        Args:
            problem: the call's problem.
            arch: the architecture.
            gpu: the GPU's name.

        Raises:
            ValueError: a width is not a multiple of 8. Tensors on the CPU may have such widths, which no kernel serves.
        """
        for width in (problem.in_features, problem.intermediate, problem.out_features):
            if width:
                check_width(self.op, "a tensor", width, on_gpu=True)
        return choose(problem, arch, gpu)

    def reference(self, problem: Problem) -> Any:
        """Compute the call by torch on the CPU, and return its result."""
        results = self.new_results(problem)
        self.definition.reference(self, problem, *results)
        return self.returned(results)

    def without_rows(self, problem: Problem) -> Any:
        """Return the result of a call with T = 0 rows, computed without a kernel.

        Subclasses override this method if a kernel with no rows would leave its result unwritten. By default it returns
        NotImplemented: the kernel is launched as usual.
        """
        return NotImplemented

    def call_public_operator(self) -> Any:
        """Call the operator's public function with this call's arguments."""
        return type(self).operator(**self.keywords())

    def handle_miss(self, key: Hashable, replacements: dict[str, Any]) -> Any:
        """Compute a call for which the operator's generated function (`front`) found no plan, and return its result.

        Args:
            key: the key under which the call's plan will be kept. None: the call can have no plan, as in a trace.
            replacements: values to use instead of the caller's arguments, by name: an `ExpertList` for a list whose
                table of addresses is kept already, and the prepared tensors of a weight (`formats.prepared`). An
                argument that needs no replacement may be listed with its own value.
        """
        if key is not None:  # another thread may have changed the setting since the key was made
            self.invariant = invariance.is_marked(key)
        if sharding.has_dtensors(self):
            return sharding.run(self)
        lead: Any = self.lead
        if lead is None:  # the key has no place for it, since optional arguments alone may be absent: checks name it
            key = None
        is_planned = key is not None or not (unplanned() or gpus.is_watched())
        if is_planned and torch.is_grad_enabled():
            if not self.differentiable:
                self.refuse_gradients()
            elif any_requires_grad(*(getattr(self, name) for name in self.given if name != "groups")):
                return self.differentiate(key)
        return self.run_without_gradient(key, replacements)

    def may_be_unfound(self) -> bool:
        """After the look-up of this call's plan raised an exception: return True if the call can go on without a plan.

        True: the call cannot have a plan, because it is traced, so that its tensors have no addresses, or because its
        group sizes are a list of integers. Otherwise all arguments are checked, which raises an error if one is wrong.
        False: no argument is wrong, so the exception has another cause.

        Raises:
            ValueError, TypeError: an argument is wrong.
        """
        splits = getattr(self, "splits", None)
        if self.is_traced() or not (splits is None or isinstance(splits, Tensor)):
            return True
        try:
            self.check_after_failure()
        except Exception as wrong:
            raise wrong from None
        return False

    def differentiate(self, key: Hashable = None) -> Any:
        """Compute a call in which an argument requires a gradient, record its backward, and return the result.

        Args:
            key: the key under which the call's plan will be kept. None: the call can have no plan.
        """
        if gpus.is_traced(self.lead):  # one operator in a graph, as without a gradient; its backward comes with it
            for name in self.outputs:
                refuse_out(self.op, getattr(self, name))
            return self.dispatch()
        return self.with_backward(self, key)

    def run_without_gradient(self, key: Hashable, replacements: dict[str, Any]) -> Any:
        """Compute a call that needs no gradient, and return its result.

        If the plan of a call that differs only in its number of rows is kept, a copy for this number of rows is used.

        Args:
            key: the key under which the call's plan will be kept. None: the call can have no plan.
            replacements: values to use instead of the caller's arguments, by name (see `handle_miss`).
        """
        if key is not None:
            ready = changed(self, **replacements)
            plan = ready.resize_kept_plan(key)
            if plan is not None:
                return ready.run(plan)
        if is_dynamo_compiling() or self.is_traced():
            return self.dispatch()
        return self.execute(key)

    def resize_kept_plan(self, key: Hashable) -> Any:
        """Make this call's plan from the kept plan of a call that differs only in its number of rows.

        The new plan is kept under `key` and returned. None: no such plan is kept. This saves the checks of a new plan.
        """
        found = self.find_resizable(key, self.plans)
        if found is None:
            return None
        problem, like = found
        plan = self.resized_plan(like, problem)
        self.plans.keep(key, plan)
        return plan

    def find_resizable(self, key: Hashable, plans: Plans[Any]) -> tuple[Problem, Any] | None:
        """Find a checked call that differs only in its number of rows; return (this call's problem, the other's plan).

        None: there is no such call, or this call has a single row, whose stride torch leaves arbitrary.

        Args:
            key: the key of this call's plan.
            plans: the plans in which to search.
        """
        rows = self.num_rows
        if not 1 < rows < MAX_ROWS or extent(self.lead) > checks.MAX_SPAN or checking():
            return None
        found = plans.find_resizable(key, self.lead_sizes)
        return None if found is None else (changed(found[0], rows=rows), found[1])

    def keep_resizable(self, key: Hashable, plans: Plans[Any], problem: Problem, plan: Any) -> None:
        """Store this call's problem and plan, after all checks passed, for `find_resizable` of later calls.

        Args:
            key: the key of this call's plan.
            plans: the plans among which the plan is stored.
        """
        if problem.rows > 1:
            count = sum(getattr(self, name, None) is not None for name in self.per_row)
            gathered = self.gathered_places
            plans.keep_resizable(key, self.lead_sizes, count - len(gathered), (problem, plan), gathered)

    def execute(self, key: Hashable = None) -> Any:
        """Check all arguments, compute the call, and return its result.

        On the CPU the reference computes the call. On a GPU a plan does: the plan that is kept for the call with
        address tables and group sizes on the device (`prepared`), or else a new plan.

        Args:
            key: the key under which a new plan is kept. None: it is not kept.
        """
        self.check_plain()
        problem = self.check()
        self.check_addresses()
        if not runs_kernels(self.lead):
            if self.invariant and (self.definition.cuts or problem.op in TILED):
                invariance.refuse_on_cpu(self.op, self.lead.device)
            with torch.autocast(self.lead.device.type, enabled=False):  # autocast would round the reference's operands
                return self.reference(problem)
        if not problem.rows and (result := self.without_rows(problem)) is not NotImplemented:
            return result
        ready = self.prepared()
        if checking() and self.groups is not None:
            self._check_group_sizes()
            return ready.run(ready.plan(problem))
        if ready is not self and (key is not None or not unplanned()):
            key = ready.key()
        plan = None if key is None else self.plans.find(key)
        if plan is None:
            plan = ready.plan(problem)
            if key is not None:
                self.plans.keep(key, plan)
                ready.keep_resizable(key, self.plans, problem, plan)
        return ready.run(plan)

    def prepared(self) -> Any:
        """Return a copy of this call with address tables instead of lists of experts, and group sizes on the device.

        If nothing has to be changed, return the call itself.
        """
        changes: dict[str, Any] = {}
        weights = self.weights if self.tabled is None else self.tabled
        for kind, names in (("weight", weights), ("bias", self.biases), ("gradient", self.gradients)):
            for name in names:
                value = getattr(self, name)
                if isinstance(value, (list, tuple)) and not isinstance(value, GateUp):
                    changes[name] = experts.enter(kind, value)
        if getattr(self, "splits", None) is not None and _on_host(self.splits):
            changes["splits"] = groups.on_device(self.op, self.splits, self.num_rows, self.lead.device)
        return changed(self, **changes) if changes else self

    @classmethod
    def optional_results(cls) -> tuple[ResultTensor, ...]:
        """Return the results that a flag of the call (such as return_preact) can leave out.

        Torch's schemas have no optional results. So an operator with one optional result becomes two torch operators,
        without and with it. An operator with several optional results returns a list of the results that are made.
        """
        return tuple([made for made in cls.definition.results if made.when in cls.options])

    @classmethod
    def returns_list(cls) -> bool:
        """Return True if torch's operator returns a list of the results that are made.

        That is so if several results are optional, or if the definition lists none because each call has its own.
        """
        return not cls.definition.results or len(cls.optional_results()) > 1

    @property
    def torch_name(self) -> str:
        """Name of this call's operator in torch.ops.glulam: `torch_op`, and suffixes for an optional result and out."""
        optional = () if self.returns_list() else self.optional_results()
        variant = "".join([made.torch_suffix for made in optional if self.makes_result(made)])
        writes = self.has_torch_out and getattr(self, "out", None) is not None
        return f"{self.torch_op}{variant}" + "_out" * writes

    def assembled(self, returned: Any) -> Any:
        """Return the call's return value, made from the torch operator's and the caller's buffers.

        Args:
            returned: the torch operator's return value: all results for which the caller gave no buffer.
        """
        if isinstance(out := getattr(self, "out", None), (list, tuple)):  # buffers for all results
            return out
        fresh = iter(returned if isinstance(returned, (list, tuple)) else (returned,))

        def result(name: str) -> Any:
            buffer = getattr(self, name) if name in self.outputs else None
            if buffer is None:
                return next(fresh)
            return buffer if self.has_torch_out else buffer.copy_(next(fresh))

        return self.returned([result(name) if is_wanted else None for name, is_wanted in self.returned_results()])

    def dispatch(self) -> Any:
        """Compute the call by its torch operator, through torch's dispatcher, so that traces see one node."""
        if not is_dynamo_compiling():
            for label, tensor in self.tensors():
                check_dense(self.op, label, tensor)
        return self.through_torch(self)

    def _check_group_sizes(self) -> None:
        """Read the group sizes back, and check them. Under graph capture, only warn that they cannot be checked."""
        if gpus.is_capturing():
            warnings.warn(f"{self.op}: {ENV_CHECK} cannot read group sizes under graph capture", stacklevel=4)
        else:
            self.host_ends()


def _on_host(splits: Any) -> bool:
    """Return True if `splits` is in the host's memory: a list, or a CPU tensor (unless tests run kernels there)."""
    return not isinstance(splits, Tensor) or (splits.device.type == "cpu" and gpus.KERNEL_DEVICE != "cpu")
