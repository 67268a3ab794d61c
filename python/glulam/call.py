"""Calls: what an operator does with arguments that no plan serves yet: route them, check them, plan them, run them.

Nothing here is on the fast path (`front`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable
from types import CodeType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from cute_kernels.signatures import Signature

from . import device as gpus
from . import experts, groups, kernels, workspace
from .activations import ActivationParams
from .arguments import BIASES, FLAGS, GROUPS, MATRICES, OF_TOKENS, PER_ROW, TENSORS, VECTORS, WEIGHTS
from .changed import changed
from .experts import ExpertList, GateUp
from .launch import Bare, Made, Plan, Shape
from .plan import ENV_CHECK, checking, launch_nothing
from .plans import Plans, described, unplanned
from .problem import Problem
from .signature import (
    MAX_ROWS,
    any_requires_grad,
    check_activation,
    check_alignment,
    check_bias,
    check_flag,
    check_groups,
    check_indices,
    check_no_overlap,
    check_params,
    check_plain,
    check_scale,
    check_written,
    check_x,
    extent,
    leading,
    refuse_gradients,
    refuse_out,
    runs_kernels,
    tensors_of,
)


class Call:
    """The arguments of one call of an operator, by the names of its parameters.

    A subclass says what its arguments mean (`check`), how the CPU computes it (`reference`, `results`) and what its
    launch is made of (`makes`, `scratch`, `constants`). The rest follows from the operator's parameters (`declare`).

    Attributes:
        sources: by the kernel's names of arguments, the operator's, where they differ; `labels`: what errors call them.
        makes: what a launch makes. `scratch`: what it needs besides, by the kernel's names: a "matrix", or "bytes".
        outputs: arguments that are written; `gradients`: those of them that are packed or a list, as weights are.
        tabled: weights that kernels take as lists; None: all.
        differentiable: whether the operator has a gradient.
        data_path: of its gradient (`backward.data_path`), where another than the recipe's own.
    """

    op: ClassVar[str]
    sources: ClassVar[dict[str, str]] = {}
    labels: ClassVar[dict[str, str]] = {}
    makes: tuple[Made, ...] = ()
    scratch: ClassVar[dict[str, str]] = {}
    outputs: ClassVar[tuple[str, ...]] = ("out",)
    gradients: ClassVar[tuple[str, ...]] = ()
    tabled: tuple[str, ...] | None = None
    differentiable: ClassVar[bool] = False
    data_path: ClassVar[Any] = None
    result: ClassVar[Callable[..., Any] | None] = None  # makes one of several results

    # As an operator of torch's, see `library`:
    torch_op: ClassVar[str]
    torch_results: ClassVar[dict[str, tuple[str, dict[str, Any]]]] = {"": ("Tensor", {})}
    torch_types: ClassVar[dict[str, str]] = {}
    torch_returns_with_out: ClassVar[str] = ""
    settled_without_out: ClassVar[dict[str, Any]] = {}
    settled_with_out: ClassVar[dict[str, Any]] = {}
    has_torch_out: ClassVar[bool] = True  # whether there are forms that write a buffer
    through_torch: ClassVar[Callable[..., Any]]  # set by `library`, which lists them

    # Of the operator's parameters:
    names: ClassVar[tuple[str, ...]]
    given: ClassVar[tuple[str, ...]]  # tensors, in the order in which plans are found by them
    optional: ClassVar[tuple[str, ...]]  # tensors that may be absent: for short, all but the first
    options: ClassVar[tuple[str, ...]]
    matrices: ClassVar[tuple[str, ...]]
    weights: ClassVar[tuple[str, ...]]
    biases: ClassVar[tuple[str, ...]]
    scales: ClassVar[tuple[str, ...]]
    of_tokens: ClassVar[tuple[str, ...]]
    reads: ClassVar[tuple[str, ...]]  # whose addresses a plan looks at, in its order
    rowwise: ClassVar[tuple[str, ...]]  # those that have a row for each of the lead's
    of_any_rows: ClassVar[tuple[str, ...]]  # what indices are of, and what has tokens of it
    plans: ClassVar[Plans[Any]]
    operator: ClassVar[Callable[..., Any]]
    with_backward: ClassVar[Callable[..., Any]]  # set by `backward.entry`, which is made of operators, and so of calls

    if TYPE_CHECKING:  # arguments

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, **arguments: Any) -> None:
        self.__dict__.update(arguments)

    @classmethod
    def declare(cls, parameters: Iterable[str], plans: Plans[Any] | None = None) -> None:
        """Let the operator have these parameters."""
        names = tuple(parameters)

        def those(of: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(name for name in names if name in of)

        cls.names = names
        if "torch_op" not in vars(cls):
            cls.torch_op = cls.op
        tensors = [name for name in names if name in TENSORS and name not in cls.outputs]
        groups_ = ["groups"] if "splits" in names else [name for name in names if name == "offs"]
        cls.reads = (*tensors, *groups_)
        outputs = tuple(name for name in cls.outputs if name in names)
        cls.outputs = outputs
        cls.given = (*cls.reads, *outputs)
        cls.options = tuple(name for name in names if name not in TENSORS and name not in GROUPS)
        cls.weights, cls.biases, cls.scales = those(WEIGHTS), those(BIASES), those(VECTORS)
        written = () if cls.gradients else outputs
        cls.matrices = (*those(MATRICES), *written)
        cls.of_tokens = ("rows", *those(OF_TOKENS)) if those(OF_TOKENS) else ()
        cls.rowwise = (*those((*MATRICES, *PER_ROW, *OF_TOKENS)), *written)
        lead = those(("x", "x_scale")) if leading(cls.op) == "x" else (leading(cls.op),)
        cls.of_any_rows = (*lead, *(("out", *OF_TOKENS) if cls.of_tokens else ()))
        cls.optional = (*[name for name in cls.given[1:] if name not in ("groups", *GROUPS)], *those(GROUPS))
        cls.plans = Plans() if plans is None else plans

    def check(self) -> Problem:
        """The problem, from metadata alone. Raises ValueError or TypeError."""
        raise NotImplementedError

    def check_lead(self, dtypes: tuple[torch.dtype, ...] | None = None) -> tuple[int, Tensor]:
        """Of the leading argument: its columns, and a matrix of T rows, like which the others are."""
        name, lead = leading(self.op), self.lead
        _, columns = check_x(self.op, lead, dtypes)
        check_indices(self.op, self.indices, lead, of=name)
        return columns, lead if self.indices is None else lead.new_empty(self.num_rows, 0)

    def check_options(self) -> None:
        """The activation, its layout and numbers, and flags."""
        if "activation" in self.options:
            check_activation(self.op, self.activation, self.glu_layout)
            check_params(self.op, self.params)
        for name in FLAGS:
            if name in self.options:
                check_flag(self.op, name, getattr(self, name))

    def check_addends(self, experts: int, counted: str, like: Tensor, **widths: int) -> None:
        """Group sizes, biases, of which `widths` are given, and scales of rows. `counted`: what has so many experts."""
        check_groups(self.op, self.offs, self.splits, self.lead, experts, counted)
        for name, width in widths.items():
            check_bias(self.op, name, getattr(self, name), like, experts, width)
        for name in ("row_scale", "bias_scale"):
            if name in self.names:
                check_scale(self.op, name, getattr(self, name), like)

    def problem(self, experts: int, in_features: int, **fields: Any) -> Problem:
        """The problem of T rows, in the leading argument's dtype unless told otherwise."""
        told: dict[str, Any] = {"op": self.op, "dtype": dtype_name(self.lead.dtype)}
        told.update({name: getattr(self, name) for name in _OF_PROBLEMS if name in self.options})
        return Problem(**{**told, **fields}, rows=self.num_rows, experts=experts, in_features=in_features)

    def results(self, problem: Problem) -> Any:
        """What is returned: tensors that were given, or new ones, uninitialised."""
        known = {**problem.dims, **self.dims(), **self.constants(problem)}
        made = [self._result(one, known) for one in self.made() if one.returned]
        if "result" in known:
            return known["result"](*made)
        return made[0] if len(made) == 1 else tuple(made)

    def _result(self, made: Made, known: dict[str, Any]) -> Any:
        if made.name in self.outputs and (given := getattr(self, made.name)) is not None:
            return given
        shape = known[made.shape] if isinstance(made.shape, str) else [known[name] for name in made.shape]
        like = getattr(self, made.like) if made.like else self.lead
        make = like.new_zeros if made.zeros else like.new_empty
        return make(shape, dtype=known[made.dtype] if made.dtype else like.dtype)

    def reference(self, problem: Problem) -> Any:
        raise NotImplementedError

    def reference_rows(self, out: Tensor) -> Tensor:
        """Of an MLP: `out`, with its result of each row."""
        raise NotImplementedError

    def without_rows(self, problem: Problem) -> Any:
        """The result for T = 0, where that takes work that a kernel without rows would not do."""
        return NotImplemented

    def made(self) -> tuple[Made, ...]:
        """Which of `makes` this call makes."""
        return self.makes

    def constants(self, problem: Problem) -> dict[str, Any]:
        """What the launch needs by name besides dimensions, and no number of rows changes."""
        return {}

    def dims(self) -> dict[str, Any]:
        """Dimensions that the problem does not know."""
        return {}

    def memory(self, problem: Problem) -> list[Any]:
        """Parts for `scratch_of`: shapes and dtypes, or bytes."""
        return []

    def kernels(self, problem: Problem) -> dict[str, Any]:
        """Functions besides the problem's own, by name."""
        return {}

    def texts(self, problem: Problem) -> dict[str, str]:
        """Values of a function's arguments that are none of those, as text."""
        return {}

    def before(self, problem: Problem) -> tuple[str, ...]:
        """Lines in front of the function's call."""
        return ()

    @staticmethod
    def look(op: str, outs: list[Any], **read: Any) -> None:
        """Checks what no metadata tells of arguments that were not seen before."""

    @property
    def params(self) -> ActivationParams:
        return ActivationParams(self.limit, self.alpha, self.offset)

    @property
    def lead(self) -> Tensor:
        """The argument that gives T, dtype and device to the others."""
        lead: Tensor = getattr(self, leading(self.op))
        return lead

    @property
    def result_dtype(self) -> torch.dtype:
        return self.lead.dtype

    @property
    def indices(self) -> Tensor | None:
        """Which of the lead's rows each row is; None where they are its rows."""
        return getattr(self, "rows", None)

    @property
    def free(self) -> tuple[int, ...]:
        """Which of what is given have rows of any number: those that others are indices of."""
        if self.indices is None:
            return ()
        present = [name for name in self.given if getattr(self, name) is not None]
        return tuple(place for place, name in enumerate(present) if name in self.of_any_rows)

    @property
    def num_rows(self) -> int:
        """T, which a trace may have as a symbol."""
        shape = (self.lead if self.indices is None else self.indices).shape
        return shape[0] if shape else 0  # a scalar, which checks refuse

    @property
    def lead_sizes(self) -> tuple[int, ...]:
        """Those of the rows' dimensions."""
        return (self.num_rows,)

    @property
    def groups(self) -> Any:
        """Group sizes, in whichever form they were given."""
        return getattr(self, "offs", None) if getattr(self, "splits", None) is None else self.splits

    def arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.names}

    def again(self) -> Any:
        """Through the operator's front door."""
        return type(self).operator(**self.arguments())

    def key(self) -> Hashable:
        """As the front makes it."""
        given = [value for name in self.given if (value := getattr(self, name)) is not None]
        return (self._options(), *map(described, given))

    def _options(self) -> tuple[Any, ...]:
        return (
            torch.is_grad_enabled(),
            *[getattr(self, name) is None for name in self.optional],
            *[getattr(self, name) for name in self.options],
        )

    def judge(self) -> None:
        """Called where a launch failed: raises ValueError or TypeError where that is an argument's fault."""
        self.check_plain()
        self.check()
        self.check_addresses()

    def answer(self, key: Hashable, known: dict[str, Any]) -> Any:
        """The result of a call for which the front found no plan.

        Args:
            key: of its plan; None where it has none.
            known: lists that are known and weights that were prepared, by the arguments that they stand for.
        """
        is_planned = key is not None or not unplanned()
        if is_planned and torch.is_grad_enabled():
            if not self.differentiable:
                self.refuse_gradients()
            elif any_requires_grad(*(getattr(self, name) for name in self.given if name != "groups")):
                return self.differentiate(key)
        return self.settle(key, known)

    def differentiate(self, key: Hashable = None) -> Any:
        """As `settle`, for a call of which an argument requires a gradient."""
        if gpus.is_traced(self.lead):  # one operator in a graph, as without a gradient; its backward comes with it
            for name in self.outputs:
                refuse_out(self.op, getattr(self, name))
            return self.dispatch()
        return self.with_backward(self, key)

    def refuse_gradients(self) -> None:
        """For operators without a gradient: raises GradientNotSupported where an argument requires one."""
        names = (*self.matrices, *self.weights, *self.biases, *self.scales, *self.outputs)
        refuse_gradients(self.op, **{name: getattr(self, name) for name in names})

    def settle(self, key: Hashable, known: dict[str, Any]) -> Any:
        """As `answer`, without a gradient."""
        if key is not None:
            ready = changed(self, **known)
            plan = ready.plan_alike(key)
            if plan is not None:
                return ready.run(plan)
        if is_dynamo_compiling() or self.is_traced():
            return self.dispatch()
        return self.execute(key)

    def plan_alike(self, key: Hashable) -> Any:
        """A plan, which is kept, where a call that differs in its rows alone was checked; else None."""
        settled = self.settled(key, self.plans)
        if settled is None:
            return None
        problem, like = settled
        plan = self.resized_plan(like, problem)
        self.plans.keep(key, plan)
        return plan

    def settled(self, key: Hashable, plans: Plans[Any]) -> tuple[Problem, Any] | None:
        """The problem, and a plan to be resized, where a call was checked that differs in its rows alone.

        The layout of a single row is arbitrary, so that nothing is known of it.
        """
        rows = self.num_rows
        if not 1 < rows < MAX_ROWS or checking():
            return None
        known = plans.settled(key, self.lead_sizes)
        return None if known is None else (changed(known[0], rows=rows), known[1])

    def settle_rows(self, key: Hashable, plans: Plans[Any], problem: Problem, plan: Any) -> None:
        """Let `settled` know this call, which was checked, and its plan."""
        if problem.rows > 1:
            count = sum(getattr(self, name, None) is not None for name in self.rowwise)
            free = self.free
            plans.settle(key, self.lead_sizes, count - len(free), (problem, plan), free)

    @property
    def variant(self) -> str:
        """Which of `torch_results` this call has."""
        return ""

    @property
    def form(self) -> str:
        """The name of this call as an operator of torch's: `library.FORMS` lists them."""
        writes = self.has_torch_out and getattr(self, "out", None) is not None
        return f"{self.torch_op}{self.variant}" + "_out" * writes

    def assembled(self, returned: Any) -> Any:
        """What the call returns, given what its operator of torch's does: only what is not in a given buffer."""
        out = getattr(self, "out", None)
        return returned if out is None else out

    def dispatch(self) -> Any:
        """Through torch's dispatcher, as an operator that traces see as one."""
        return self.through_torch(self)

    def execute(self, key: Hashable = None) -> Any:
        """Check everything, then compute: on the CPU by the reference, else by a new plan. See `settle`."""
        self.check_plain()
        problem = self.check()
        self.check_addresses()
        if not runs_kernels(self.lead):
            with torch.autocast(self.lead.device.type, enabled=False):  # it would round the reference's operands
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
                ready.settle_rows(key, self.plans, problem, plan)
        return ready.run(plan)

    def run(self, plan: Any) -> Any:
        try:
            return plan.run(*[getattr(self, name) for name in self.given])
        except Exception:
            self.judge()
            raise

    def bare(self, problem: Problem, serving: Any = None, gpu: gpus.Gpu | None = None) -> Bare:
        """What a launch of this call passes its function; see `plan`."""
        return self.plan(problem, False, serving, gpu).bare(*[getattr(self, name) for name in self.given])

    def plan(self, problem: Problem, checked: bool = True, serving: Any = None, gpu: gpus.Gpu | None = None) -> Plan:
        """The plan of a problem, which is this call's.

        Args:
            checked: see `launch.Shape`.
            serving: `kernels.Fixed`, where not the kernel that the dispatcher chooses is to serve.
            gpu: the lead's, where that has none.
        """
        index = self.lead.get_device()
        gpu = gpu or gpus.gpu(index)
        serving = serving or self.serving(problem, gpu)
        constants = {
            "index": index,
            "device": self.lead.device,
            "group_form": 0 if self.groups is None else groups.form(self.groups, is_offs=self.offs is not None),
            "num_sms": gpu.sm_count,
            **self._constants_of_rows(problem, serving),
            **self.constants(problem),
        }
        shape = self._shape(problem, serving.at(problem.rows).signature, constants, checked)
        return self._plan(shape, constants, serving)

    def serving(self, problem: Problem, gpu: gpus.Gpu) -> Any:
        """What finds the function for a number of rows."""
        return kernels.serving(problem, gpu)

    def _plan(self, shape: Shape, constants: dict[str, Any], serving: Any, code: CodeType | None = None) -> Plan:
        extents = self._read_extents(), self._out_extents()
        return Plan(self.op, shape, constants, serving, *extents, self.look, code)

    def _constants_of_rows(self, problem: Problem, serving: Any) -> dict[str, Any]:
        served = serving.at(problem.rows)
        memory = self.memory(problem)
        return {
            **problem.dims, **self.dims(), **self.kernels(problem), "draws_tickets": served.draws_tickets,
            "function": served.function if problem.rows else launch_nothing,
            "memory": workspace.Layouts(*map(self._part, memory)) if memory else None,
        }  # fmt: skip

    def _part(self, part: Any) -> Any:
        if isinstance(part, int):
            return part
        shape, dtype = part
        return workspace.Layout(shape, dtype, self.lead.device, self.lead.get_device())

    def resized_plan(self, like: Plan, problem: Problem) -> Plan:
        constants = {**like.constants, **self._constants_of_rows(problem, like.serving), **self.constants(problem)}
        return self._plan(like.shape, constants, like.serving, like.run.__code__)

    def _present(self) -> list[str]:
        """What is there of what is given."""
        return [name for name in self.given if getattr(self, name) is not None]

    def _read_extents(self) -> tuple[int, ...]:
        loose = self._loose()
        return self.extents(tuple(n for n in self._present() if n not in self.outputs and n not in loose))

    def _loose(self) -> frozenset[str]:
        """Lists that a launch does not read itself: of weights that are to be prepared."""
        plain = (list, tuple)
        return frozenset(name for name in self.weights if getattr(self, name).__class__ in plain)

    def _shape(self, problem: Problem, signature: Signature, constants: dict[str, Any], checked: bool) -> Shape:
        values = {name: getattr(self, name) for name in self._present()}
        makes = tuple(made for made in self.made() if made.kernel in signature.names)
        unpacks = "out" if values.get("out").__class__ is list else ""
        kinds = {
            kind: frozenset(name for name, v in values.items() if v.__class__ is kind) for kind in (ExpertList, GateUp)
        }
        return Shape(
            takes=self.given,
            present=frozenset([*values, *[made.name for made in makes if unpacks]]),
            lists=kinds[ExpertList],
            halves=kinds[GateUp],
            loose=self._loose(),
            unpacks=unpacks,
            arguments=signature.arguments,
            sources=tuple(self.sources.items()),
            texts=tuple(self.texts(problem).items()),
            makes=makes,
            scratch=tuple(self.scratch_of(problem).items()),
            constants=frozenset(constants),
            before=self.before(problem),
            checked=checked,
            single_gpu=gpus.is_only_one(),
            aligned=checked and (problem.rows == 1 or self.indices is not None),
            result="result" if "result" in constants else "",
        )

    def scratch_of(self, problem: Problem) -> dict[str, str]:
        """What of `scratch` this call needs."""
        return self.scratch

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
        if runs_kernels(self.lead):
            for name in (*self.matrices, *self.weights, *self.outputs):
                for label, tensor in tensors_of(self.labels.get(name, name), getattr(self, name)):
                    check_alignment(self.op, label, tensor)
        written = self.written()
        for label, tensor in self.tensors() if written else ():
            if tensor.device == self.lead.device:
                for out_label, out in written:
                    check_no_overlap(self.op, out_label, out, label, tensor)

    def tensors(self) -> list[tuple[str, Tensor]]:
        """All inputs, those of lists one by one, under the names that errors give them."""
        names = (*self.matrices, *self.weights, *self.biases, *self.scales, *GROUPS)
        read = (name for name in names if name not in self.outputs)
        return [pair for name in read for pair in tensors_of(self.labels.get(name, name), getattr(self, name, None))]

    def written(self) -> list[tuple[str, Tensor]]:
        """The outputs that were given, likewise."""
        return [pair for name in self.outputs for pair in tensors_of(self.labels.get(name, name), getattr(self, name))]

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
        if getattr(self, "splits", None) is not None and _on_host(self.splits):
            changes["splits"] = groups.on_device(self.op, self.splits, self.num_rows, self.lead.device)
        return changed(self, **changes) if changes else self

    def extents(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """The bytes that arguments reach over, as of `plan.check_apart`; 0 of one that is absent."""
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


_OF_PROBLEMS = ("activation", "glu_layout", "transpose_w")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _on_host(splits: Any) -> bool:
    return not isinstance(splits, Tensor) or (splits.device.type == "cpu" and gpus.KERNEL_DEVICE != "cpu")


def _extent(value: Any) -> int:
    """Of what has one: no list, and not None."""
    return extent(value) if isinstance(value, Tensor) else 0
