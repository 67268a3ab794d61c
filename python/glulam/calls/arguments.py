"""Base class `Arguments`: the arguments of one call of an operator, and the checks that all operators make of them.

An argument's name determines its role (`roles`): matrix, weight, bias, group sizes, option and so on.
"""

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
    check_flag,
    check_no_overlap,
    check_numbers,
    check_plain,
    check_rows_like,
    check_written,
    check_x,
    extent,
    refuse_gradients,
    runs_kernels,
    tensors_of,
)
from .group_checks import check_groups, check_indices, check_scale
from .roles import GROUPS, SUFFIXES, WEIGHTS, Kind, roles_of
from .weight_checks import check_bias

_OF_PROBLEMS = ("activation", "glu_layout", "transpose_w", "world_experts")


class Arguments:
    """The arguments of one call of an operator, as attributes with the names of the operator's parameters.

    T is the number of rows that the call computes; groups are ranges of these rows. If indices (`rows`) are given,
    there are T indices, and the matrix whose rows they select may have any number of rows.

    Attributes:
        op: the operator's name.
        leads: the "leading" argument, usually x. It determines dtype and device of the others, and T unless `rows` is
            given.
        after_groups: text for the warning that groups do not fill T: what happens to rows after the last group. Empty:
            no warning.
        takes_keywords: True: the operator's function has a keyword for each of the activation's numbers (limit, alpha,
            ...), which the call holds as one tuple, `numbers`.
        outputs: names of arguments that are written.
        gradients: names in `outputs` that are gradients of weights: packed [E, ...] or a list of E tensors.
        labels: names in errors, by argument, where they differ from the argument's name.
        torch_op: the name of torch's operator.
        names: the operator's parameters.
        options: the parameters that are not tensors.
        flags: the options that are True or False.
        given: the tensor parameters, in the order in which they appear in a plan's key.
        optional: the tensor parameters that may be None.
        reads: the tensor parameters that are read, in order; offs and splits count as one, "groups".
        matrices, weights, biases: the tensors in `reads` with these roles (`roles.Kind`); `matrices` also has the
            outputs, unless they are gradients of weights.
        scales: the other tensors in `reads`, except group sizes: a number for each row, parts of quantised weights,
            masks, maps, and the MoE layer's tensors of tokens.
        of_tokens: for the MoE layer, `rows` and the tensors that have a row for each token. Empty for other operators.
        per_row: the tensors that have a dimension of T rows.
        gathered: the tensors that may have any number of rows if `rows` is given: the leading argument and its scale,
            and for the MoE layer also `out` and the tensors of tokens.
        plans: the operator's kept plans (launches for calls of equal metadata, see `launch`).
        invariant: True: the call must be batch-invariant (`host.invariance`).
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
    per_row: ClassVar[tuple[str, ...]]
    gathered: ClassVar[tuple[str, ...]]
    plans: ClassVar[Plans[Any]]

    if TYPE_CHECKING:  # arguments

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, **arguments: Any) -> None:
        for name, value in arguments.items():  # torch 2.11 cannot compile self.__dict__.update
            setattr(self, name, value)
        self.invariant = is_on()

    @classmethod
    def declare(cls, parameters: Iterable[str]) -> None:
        """Set the class's lists of argument names from the operator's parameters, by the roles of `roles.ROLES`."""
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
        cls.per_row = (*those(Kind.MATRIX, Kind.BY_ROW, Kind.OF_TOKENS), *written)
        cls.gathered = (cls.leads, f"{cls.leads}_scale", *(("out", *of_tokens) if of_tokens else ()))
        cls.optional = (*[name for name in cls.given[1:] if name not in ("groups", *GROUPS)], *sizes)

    @classmethod
    def _declare_names(cls, parameters: Iterable[str]) -> None:
        cls.names = tuple(parameters)
        if "torch_op" not in vars(cls):
            cls.torch_op = cls.op
        cls.plans = Plans()

    @classmethod
    def parts_of(cls, name: str) -> tuple[str, ...]:
        """Return the names of the arguments that together hold the weight `name`, such as ("w1", "w1_scale").

        The first argument holds the elements. Only calls with quantised weights have more: scales and global scale.
        """
        return tuple(name + suffix for suffix in SUFFIXES if name + suffix in cls.given)

    def check(self) -> Problem:
        """Check the arguments' metadata and return the call's problem. Raises ValueError or TypeError."""
        raise NotImplementedError

    def check_lead(self, dtypes: tuple[torch.dtype, ...] | None = None) -> tuple[int, Tensor]:
        """Check the leading argument, and the indices `rows` that select its rows.

        Args:
            dtypes: the allowed dtypes. None: the dtypes of the kernels on a GPU, the dtypes of the reference elsewhere.

        Returns:
            (number of columns of the leading argument, a matrix of T rows with which `check_rows_like` compares other
            arguments).
        """
        name, lead = self.leads, self.lead
        _, columns = check_x(self.op, lead, dtypes)
        check_indices(self.op, self.indices, lead, self.labels.get("rows", "rows"), name)
        return columns, lead if self.indices is None else lead.new_empty(self.num_rows, 0)

    def check_options(self) -> None:
        """Raise ValueError or TypeError if an option is invalid.

        Checked are activation, glu_layout, `numbers` (the tuple of the activation's constants), and that each of
        `flags` is True or False.
        """
        if "activation" in self.options:
            check_activation(self.op, self.activation, self.glu_layout)
            check_numbers(self.op, self.numbers)
        for name in self.flags:
            check_flag(self.op, name, getattr(self, name))

    def check_addends(self, experts: int, counted: str, like: Tensor, **widths: int) -> None:
        """Check group sizes, biases, and the vectors row_scale and bias_scale, [T].

        Args:
            experts: E.
            counted: name of the argument from which E was read, for errors.
            like: a matrix of T rows with the required dtype and device, the second result of `check_lead`.
            widths: the number of columns of each bias, by its name.
        """
        self.check_sizes(experts, counted)
        for name, width in widths.items():
            check_bias(self.op, name, getattr(self, name), like, experts, width)
        for name in ("row_scale", "bias_scale"):
            if name in self.names:
                check_scale(self.op, self.labels.get(name, name), getattr(self, name), like)

    def check_result(self, width: int, like: Tensor) -> None:
        """Check the buffer `out` [T, width] if the caller gave one.

        like: a matrix of T rows with the required dtype and device, the second result of `check_lead`.
        """
        if self.out is not None:
            check_rows_like(self.op, "out", self.out, like, width, "that is the result's shape")

    def check_sizes(self, experts: int, counted: str) -> None:
        """Check that offs or splits has `experts` groups. `counted`: the argument from which E was read, for errors."""
        check_groups(self.op, self.offs, self.splits, self.lead, experts, counted, self.labels.get("offs", "offs"))

    def problem(self, experts: int, in_features: int, **fields: Any) -> Problem:
        """Return the `Problem` of this call: the sizes, dtypes and options from which a kernel is chosen.

        Args:
            experts: E.
            in_features: the columns of x; for a grouped_dglu, of dy.
            fields: more fields of the Problem. They replace the operator, the dtype and the options that this method
                takes from the call.
        """
        values: dict[str, Any] = {"op": self.op, "dtype": dtype_name(self.lead.dtype), "invariant": self.invariant}
        values.update({name: getattr(self, name) for name in _OF_PROBLEMS if name in self.options})
        return Problem(**{**values, **fields}, rows=self.num_rows, experts=experts, in_features=in_features)

    @property
    def function(self) -> Activation:
        """The activation that the options activation, glu_layout and numbers describe."""
        return Activation.of(self.activation, self.glu_layout, self.numbers)

    @property
    def lead(self) -> Tensor:
        """The tensor of the leading argument (`leads`)."""
        lead: Tensor = getattr(self, self.leads)
        return lead

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype of results: the leading argument's."""
        return self.lead.dtype

    @property
    def indices(self) -> Tensor | None:
        """For each of T rows, the row of the leading argument. None: the rows lie in order."""
        return getattr(self, "rows", None)

    @property
    def may_read_fewer(self) -> bool:
        """True if the leading argument may have fewer rows than T, even a single row, because `rows` is given."""
        return self.indices is not None

    @property
    def gathered_places(self) -> tuple[int, ...]:
        """Positions of the gathered tensors (`gathered`) in the list of tensor arguments that are not None.

        () if the call has no `rows`.
        """
        if self.indices is None:
            return ()
        return tuple(place for place, name in enumerate(self._present()) if name in self.gathered)

    @property
    def num_rows(self) -> int:
        """T; in a trace it may be symbolic."""
        shape = (self.lead if self.indices is None else self.indices).shape
        return shape[0] if shape else 0  # a scalar, which checks refuse

    @property
    def lead_sizes(self) -> tuple[int, ...]:
        """The sizes of the dimensions that count rows: here (T,). Subclasses may have several dimensions of tokens."""
        return (self.num_rows,)

    @property
    def groups(self) -> Any:
        """Group sizes: offs or splits, whichever was given."""
        return getattr(self, "offs", None) if getattr(self, "splits", None) is None else self.splits

    def arguments(self) -> dict[str, Any]:
        """Return all arguments as a dict by name."""
        return {name: getattr(self, name) for name in self.names}

    def keywords(self) -> dict[str, Any]:
        """Return the arguments as keyword arguments for the operator's function, `numbers` as separate keywords."""
        arguments = self.arguments()
        if self.takes_keywords:
            arguments.update(named_numbers(arguments.pop("numbers")))
        return arguments

    def key(self) -> Hashable:
        """Return the key of the call's plan: metadata of all tensors, and options.

        It equals the key that the operator's generated function (`front`) makes in `Plans.look_up`.
        """
        return (marked(self._options(), self.invariant), *[described(getattr(self, name)) for name in self._present()])

    def _options(self) -> tuple[Any, ...]:
        """Return the part of a plan's key that is not tensor metadata: grad mode, absent arguments and options."""
        return (
            torch.is_grad_enabled(),
            *[getattr(self, name) is None for name in self.optional],
            *[getattr(self, name) for name in self.options],
        )

    def check_after_failure(self) -> None:
        """After a failed launch: make all checks again, to raise an error that names the argument at fault.

        Raises:
            ValueError, TypeError: an argument is the cause.
            GradientNotSupported: the call is within a transform of torch.func, whose new tensors have no memory.
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
        """Raise GradientNotSupported if an argument requires a gradient. For operators that have no backward."""
        names = (*self.matrices, *self.weights, *self.biases, *self.scales, *self.outputs)
        refuse_gradients(self.op, **{name: getattr(self, name) for name in names})

    def is_traced(self) -> bool:
        """Return True if the call must go through torch's dispatcher as a torch operator.

        That is so if the leading tensor is a meta or fake tensor, if any tensor is of a subclass of Tensor, or under a
        dispatch mode or torch.jit.trace (`device.is_watched`).
        """
        given = (*self.tensors(), *self.written())
        others = any(type(tensor) not in gpus.PLAIN_TENSORS for _, tensor in given)
        return others or gpus.is_traced(self.lead) or gpus.is_watched()

    def check_plain(self) -> None:
        """Check that kernels may read and write all tensors.

        Each tensor's memory must hold its values (`memory.check_plain`), and no output may require a gradient.
        """
        written = self.written()
        for label, tensor in (*self.tensors(), *written):
            check_plain(self.op, label, tensor)
        for label, tensor in written:
            check_written(self.op, label, tensor)

    def check_addresses(self) -> None:
        """Check alignment (on a GPU), and that no output shares memory with an input. Raises ValueError."""
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
        """Return (name in errors, tensor) for each input tensor. A list of experts gives one entry for each tensor."""
        names = (*self.matrices, *self.weights, *self.biases, *self.scales, *GROUPS)
        read = (name for name in names if name not in self.outputs)
        return [pair for name in read for pair in tensors_of(self.labels.get(name, name), getattr(self, name, None))]

    def written(self) -> list[tuple[str, Tensor]]:
        """Return (name in errors, tensor) for each given output. A list of experts gives one entry for each tensor."""
        return [pair for name in self.outputs for pair in tensors_of(self.labels.get(name, name), getattr(self, name))]

    def host_ends(self) -> list[int]:
        """Return the end row of each group as Python integers, waiting for sizes that are on the device.

        Raises:
            ValueError: the sizes are wrong.
        """
        return groups.ends(self.op, self.offs, self.splits, self.num_rows)

    def _present(self) -> list[str]:
        """Return the names of the tensor arguments (`given`) that are not None in this call."""
        return [name for name in self.given if getattr(self, name) is not None]

    def extents(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """Return the bytes that each of these arguments spans, for `memory.check_unseen`; 0 for lists and None."""
        return tuple(extent_of(getattr(self, name, None)) for name in names)

    def _out_extents(self) -> tuple[int, ...]:
        """Return the bytes that each given output spans. A list gives one number for each of its tensors."""
        values = [getattr(self, name) for name in self.outputs]
        parts = [value if isinstance(value, (list, tuple)) else [value] for value in values]
        return tuple([extent_of(one) for part in parts for one in part if one is not None])


def extent_of(value: Any) -> int:
    """Return the bytes that a tensor spans (`memory.extent`); 0 for None and for lists."""
    return extent(value) if isinstance(value, Tensor) else 0
