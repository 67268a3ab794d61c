"""Arguments of a call, by their roles, and common checks."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..activations import Activation, named_numbers
from ..choose.problem import Problem, dtype_name
from ..errors import GradientNotSupported
from ..host import device as gpus
from ..host import groups
from ..host.invariance import is_on, marked
from ..host.plans import Plans, described
from .checks import (
    check_activation,
    check_alignment,
    check_bias,
    check_flag,
    check_groups,
    check_indices,
    check_no_overlap,
    check_numbers,
    check_plain,
    check_rows_like,
    check_scale,
    check_written,
    check_x,
    extent,
    refuse_gradients,
    runs_kernels,
    tensors_of,
)
from .roles import GROUPS, SUFFIXES, WEIGHTS, Kind, roles_of

_OF_PROBLEMS = ("activation", "glu_layout", "transpose_w", "world_experts")


class Arguments:
    """The arguments of one call of an operator, by the names of its parameters.

    Attributes:
        op: the operator.
        leads: the argument that gives T, dtype and device to the others.
        after_groups: what becomes of rows after the last group, for a warning where groups do not fill T; empty: there
            is no reason for one.
        outputs: arguments that are written; `gradients`: those of them that are packed or a list, as weights are.
        labels: what errors call arguments, where they have other names.
        names: of the operator's parameters; `options`: those that are no tensors, `flags`: of these.
        given: tensors, in the order in which plans are found by them; `optional`: those that may be absent.
        reads: those whose addresses a plan looks at, in order; matrices, weights, biases, scales, of_tokens: of these.
        rowwise: those that have a row for each of the lead's; `of_any_rows`: what indices are of, or has tokens of it.
        plans: of the operator's calls.
        takes_keywords: whether the operator's function takes each of `numbers` by a keyword of its own.
        invariant: whether the call is to be batch-invariant (`host.invariance`).
    """

    op: ClassVar[str]
    leads: ClassVar[str] = "x"
    after_groups: ClassVar[str] = ""
    takes_keywords: ClassVar[bool] = False
    outputs: ClassVar[tuple[str, ...]] = ("out",)
    gradients: ClassVar[tuple[str, ...]] = ()
    labels: ClassVar[dict[str, str]] = {
        **{f"{name}_scale": f"{name}'s scale" for name in ("x", *WEIGHTS)},
        **{f"{name}_global_scale": f"{name}'s global_scale" for name in WEIGHTS},
    }
    torch_op: ClassVar[str]

    names: ClassVar[tuple[str, ...]]
    options: ClassVar[tuple[str, ...]]
    flags: ClassVar[tuple[str, ...]] = ()
    given: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]]
    reads: ClassVar[tuple[str, ...]]
    matrices: ClassVar[tuple[str, ...]]
    weights: ClassVar[tuple[str, ...]]
    biases: ClassVar[tuple[str, ...]]
    scales: ClassVar[tuple[str, ...]]
    of_tokens: ClassVar[tuple[str, ...]]
    rowwise: ClassVar[tuple[str, ...]]
    of_any_rows: ClassVar[tuple[str, ...]]
    plans: ClassVar[Plans[Any]]

    if TYPE_CHECKING:  # arguments

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, **arguments: Any) -> None:
        for name, value in arguments.items():  # torch 2.11 cannot compile self.__dict__.update
            setattr(self, name, value)
        self.invariant = is_on()

    @classmethod
    def declare(cls, parameters: Iterable[str]) -> None:
        """Let the operator have these parameters."""
        cls._declare_names(parameters)
        roles = roles_of(cls.op, cls.names)

        def those(*kinds: Kind) -> tuple[str, ...]:
            return tuple(name for name, role in roles.items() if role.kind in kinds)

        groups.declare(cls.op, cls.leads, cls.after_groups)
        cls.outputs = tuple(name for name in cls.outputs if name in roles)
        tensors = [name for name, role in roles.items() if role.is_tensor and name not in cls.outputs]
        sizes = those(Kind.GROUPS)
        cls.reads = (*tensors, *(("groups",) if "splits" in sizes else sizes))
        cls.given = (*cls.reads, *cls.outputs)
        cls.options = those(Kind.OPTION)
        cls.flags = tuple(name for name in cls.options if roles[name].schema == "bool")
        cls.weights, cls.biases = those(Kind.WEIGHT), those(Kind.BIAS)
        cls.scales = those(Kind.BY_ROW, Kind.OF_TOKENS, Kind.PART, Kind.MASK, Kind.MAP)
        written = () if cls.gradients else cls.outputs
        cls.matrices = (*those(Kind.MATRIX), *written)
        of_tokens = those(Kind.OF_TOKENS)
        cls.of_tokens = ("rows", *of_tokens) if of_tokens else ()
        cls.rowwise = (*those(Kind.MATRIX, Kind.BY_ROW, Kind.OF_TOKENS), *written)
        cls.of_any_rows = (cls.leads, f"{cls.leads}_scale", *(("out", *of_tokens) if of_tokens else ()))
        cls.optional = (*[name for name in cls.given[1:] if name not in ("groups", *GROUPS)], *sizes)

    @classmethod
    def _declare_names(cls, parameters: Iterable[str]) -> None:
        cls.names = tuple(parameters)
        if "torch_op" not in vars(cls):
            cls.torch_op = cls.op
        cls.plans = Plans()

    @classmethod
    def parts_of(cls, name: str) -> tuple[str, ...]:
        """A weight's argument, and those of its other parts."""
        return tuple(name + suffix for suffix in SUFFIXES if name + suffix in cls.given)

    def check(self) -> Problem:
        """The problem, from metadata alone. Raises ValueError or TypeError."""
        raise NotImplementedError

    def check_lead(self, dtypes: tuple[torch.dtype, ...] | None = None) -> tuple[int, Tensor]:
        """Of the leading argument: its columns, and a matrix of T rows, like which the others are."""
        name, lead = self.leads, self.lead
        _, columns = check_x(self.op, lead, dtypes)
        check_indices(self.op, self.indices, lead, self.labels.get("rows", "rows"), name)
        return columns, lead if self.indices is None else lead.new_empty(self.num_rows, 0)

    def check_options(self) -> None:
        """The activation, its layout and numbers, and flags."""
        if "activation" in self.options:
            check_activation(self.op, self.activation, self.glu_layout)
            check_numbers(self.op, self.numbers)
        for name in self.flags:
            check_flag(self.op, name, getattr(self, name))

    def check_addends(self, experts: int, counted: str, like: Tensor, **widths: int) -> None:
        """Group sizes, biases, of which `widths` are given, and scales of rows. `counted`: what has so many experts."""
        self.check_sizes(experts, counted)
        for name, width in widths.items():
            check_bias(self.op, name, getattr(self, name), like, experts, width)
        for name in ("row_scale", "bias_scale"):
            if name in self.names:
                check_scale(self.op, self.labels.get(name, name), getattr(self, name), like)

    def check_result(self, width: int, like: Tensor) -> None:
        """Check a given `out` [T, width]. `like`: a matrix of T rows."""
        if self.out is not None:
            check_rows_like(self.op, "out", self.out, like, width, "that is the result's shape")

    def check_sizes(self, experts: int, counted: str) -> None:
        """Group sizes. `counted`: what has so many experts."""
        check_groups(self.op, self.offs, self.splits, self.lead, experts, counted, self.labels.get("offs", "offs"))

    def problem(self, experts: int, in_features: int, **fields: Any) -> Problem:
        """The problem of T rows, in the leading argument's dtype unless told otherwise."""
        told: dict[str, Any] = {"op": self.op, "dtype": dtype_name(self.lead.dtype), "invariant": self.invariant}
        told.update({name: getattr(self, name) for name in _OF_PROBLEMS if name in self.options})
        return Problem(**{**told, **fields}, rows=self.num_rows, experts=experts, in_features=in_features)

    @property
    def function(self) -> Activation:
        """The activation with its own numbers."""
        return Activation.of(self.activation, self.glu_layout, self.numbers)

    @property
    def lead(self) -> Tensor:
        """The argument that gives T, dtype and device to the others."""
        lead: Tensor = getattr(self, self.leads)
        return lead

    @property
    def result_dtype(self) -> torch.dtype:
        return self.lead.dtype

    @property
    def indices(self) -> Tensor | None:
        """Which of the lead's rows each row is; None where they are its rows."""
        return getattr(self, "rows", None)

    @property
    def may_read_fewer(self) -> bool:
        """Whether the lead may have fewer rows than T, even one."""
        return self.indices is not None

    @property
    def free(self) -> tuple[int, ...]:
        """Which of what is given have rows of any number: those that others are indices of."""
        if self.indices is None:
            return ()
        return tuple(place for place, name in enumerate(self._present()) if name in self.of_any_rows)

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

    def keywords(self) -> dict[str, Any]:
        """Arguments as the operator's function takes them."""
        arguments = self.arguments()
        if self.takes_keywords:
            arguments.update(named_numbers(arguments.pop("numbers")))
        return arguments

    def key(self) -> Hashable:
        """As the front makes it."""
        return (marked(self._options(), self.invariant), *[described(getattr(self, name)) for name in self._present()])

    def _options(self) -> tuple[Any, ...]:
        return (
            torch.is_grad_enabled(),
            *[getattr(self, name) is None for name in self.optional],
            *[getattr(self, name) for name in self.options],
        )

    def judge(self) -> None:
        """Check everything after a launch failed. Raise ValueError or TypeError if an argument is the cause, and
        GradientNotSupported within a transform of torch.func, whose new tensors have no memory.
        """
        self.check_plain()
        self.check()
        self.check_addresses()
        if torch._C._are_functorch_transforms_active():
            raise GradientNotSupported(
                f"{self.op}: called within a transform of torch.func (grad, vjp, jvp, vmap), which it does not serve; "
                "use torch.autograd (backward, grad) and a loop outside of the transform"
            )

    def refuse_gradients(self) -> None:
        """For operators without a gradient: raises GradientNotSupported where an argument requires one."""
        names = (*self.matrices, *self.weights, *self.biases, *self.scales, *self.outputs)
        refuse_gradients(self.op, **{name: getattr(self, name) for name in names})

    def is_traced(self) -> bool:
        """Return True if the call is torch's dispatcher's: it leads on meta, an argument is of a subclass, or somebody
        watches (`device.is_watched`)."""
        given = (*self.tensors(), *self.written())
        others = any(type(tensor) not in gpus.PLAIN_TENSORS for _, tensor in given)
        return others or gpus.is_traced(self.lead) or gpus.is_watched()

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

    def _present(self) -> list[str]:
        """What is there of what is given."""
        return [name for name in self.given if getattr(self, name) is not None]

    def extents(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """The bytes that arguments reach over, as of `memory.check_apart`; 0 of one that is absent."""
        return tuple(extent_of(getattr(self, name, None)) for name in names)

    def _out_extents(self) -> tuple[int, ...]:
        values = [getattr(self, name) for name in self.outputs]
        parts = [value if isinstance(value, (list, tuple)) else [value] for value in values]
        return tuple([extent_of(one) for part in parts for one in part if one is not None])


def extent_of(value: Any) -> int:
    """Of what has one: no list, and not None."""
    return extent(value) if isinstance(value, Tensor) else 0
