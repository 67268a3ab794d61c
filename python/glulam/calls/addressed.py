"""Base class of operators whose kernels take only addresses of tensors and numbers: operators of hyper-connections
(`mhc`), of the MoE layer (`layer`), and the gate of `ops.gate`.

Public functions, plans and launches are generated as for every operator (`front`, `launch`, `call`). The difference:
here the annotation of a parameter ("Tensor", "Tensor | None" or a number), not its name, tells what the argument is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from types import CodeType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from cute_kernels.specs import PARAM_FORMS, Spec

from ..choose import kernels
from ..choose.problem import Problem, dtype_name
from ..choose.shipped import Choice
from ..host import device as gpus
from ..host.invariance import held
from .autograd import once_differentiable, usable, without_graph
from .call import Call
from .checks import (
    any_requires_grad,
    check_tensor,
    is_transformed,
    refuse_out,
    runs_kernels,
    shape_text,
)
from .definition import Definition, PrologueStep, ScratchPart
from .launch import OWN_NAMES, LaunchShape, Plan, ResultTensor, code_of

MAX_TOKENS = 2**27
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTH_MULTIPLE = 8
"""Widths must be multiples of this. Kernels move 16 bytes at a time, so another width would misalign rows. Reading
element by element would take several times as long; users pad the width instead."""

IS_OPTIONAL = {"Tensor": False, "Tensor | None": True}
"""The annotations of tensor parameters. True: the tensor may be None."""

_SCHEMA_TYPES = {"Numbers": "float[]"}
"""Annotations that torch's schemas spell differently, each with the type in schemas."""
Gradients = Sequence[Tensor | None]
Like = tuple[Sequence[int], torch.dtype]
"""A result's shape and dtype."""


def _scratch(call: Any, problem: Problem) -> dict[str, ScratchPart]:
    """Return the kernel's scratch memory: {"workspace": float32 [1, size]}; {} if it needs none.

    The size is the value "workspace" of the call's definition (`AddressedCall`).
    """
    size = call.own_sizes.get("workspace", 0)
    return {"workspace": ((1, size), torch.float32)} if size else {}


def _prologue(call: Any, problem: Problem) -> PrologueStep:
    """Return a launch step that passes torch's current stream to the kernel, and address 0 for each absent tensor."""
    absent = [name for name in call.reads if getattr(call, name) is None]
    if not call.own_sizes.get("workspace"):
        absent.append("workspace")
    return PrologueStep(values={"stream": "raw_stream(index)", **dict.fromkeys(absent, "0")})


class SingleFunction(kernels.Fixed):
    """One kernel function that serves any number of rows, and the launches that were generated for it.

    Attributes:
        launches: generated launches, (LaunchShape, its compiled code). The key is (number of token dimensions of the
            leading argument, True if the launch takes scratch memory).
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.launches: dict[tuple[int, bool], tuple[LaunchShape, CodeType]] = {}


class AddressedCall(Call):
    """A call of an operator with one kernel, or one chain of kernels, that takes only addresses and numbers.

    On the CPU a reference computes it. A subclass defines checks of its tensors and options (`check_inputs`), shapes
    and dtypes of its results (`likes`), the CPU's reference (`on_cpu`), the kernel's `spec`, and in its `definition`
    the kernel arguments other than addresses and numeric options. The definition's value "workspace" is the number of
    float32 elements of scratch memory.

    Attributes:
        family, kernel: the spec's family and kernel; together they also are the name of torch's operator.
        leads: the "leading" argument, which determines dtype, device and number of tokens.
        trailing: how many of the leading argument's last dimensions are not dimensions of tokens: 2 if x is
            [..., n, C].
        shared: names of tensors without the dimensions of tokens; all other tensors have them.
        returns: the kernel's names of its results. A parameter with such a name is a buffer for the result.
        unaligned: names of inputs whose addresses need not be multiples of 16 bytes.
        saves: names of inputs and results that backward needs.
        integers: names of integer results, which have no gradient.
        when_recorded: values of options that replace the call's values if a gradient is recorded, by option name.
        on_cpu: the reference, a function of the inputs and options. It does not take options named "of_...", which are
            flags that request results.
        numeric: options that kernels may take as a number, each with the number's type: int (also for a bool) or float.
    """

    family: ClassVar[str]
    kernel: ClassVar[str]
    leads: ClassVar[str] = "x"
    trailing: ClassVar[int]
    shared: ClassVar[frozenset[str]] = frozenset()
    returns: ClassVar[tuple[str, ...]] = ("out",)
    unaligned: ClassVar[frozenset[str]] = frozenset()
    saves: ClassVar[tuple[str, ...]] = ()
    integers: ClassVar[tuple[str, ...]] = ()
    when_recorded: ClassVar[dict[str, Any]] = {}
    on_cpu: ClassVar[Callable[..., Any]]
    numeric: ClassVar[dict[str, Callable[[Any], Any]]]

    definition = Definition(scratch=(_scratch,), prologue=(_prologue,))
    has_torch_out = False

    def check_inputs(self) -> None:
        """Check the arguments; raise ValueError or TypeError. By default nothing is checked.

        Most backward operators need no checks, since only `backward` methods call them.
        """

    def likes(self) -> Sequence[Like | None]:
        """Return (shape, dtype) of each result. By default a result d_x, a gradient, is like the input x."""
        return [like(getattr(self, name.removeprefix("d_"))) for name in self.returns]

    def wanted(self) -> tuple[bool, ...]:
        """Return, for each result, True if the caller wants it.

        A result `d_x` or `x` is not wanted if the call has an option `of_x`, and this option is False.
        """
        return tuple([getattr(self, f"of_{name.removeprefix('d_')}", True) for name in self.returns])

    def compute(self) -> Any:
        """Compute the call with the CPU reference; return all results. Results that are not wanted may be None."""
        names = (*self.reads, *[name for name in self.options if not name.startswith("of_")])
        return type(self).on_cpu(*[getattr(self, name) for name in names])

    def spec(self, arch: str) -> Spec:
        """Return the spec of the kernel for an architecture."""
        raise NotImplementedError

    @classmethod
    def recorded(cls, held: dict[str, Any]) -> tuple[Any, ...]:
        """Return the tensors that a call returns if its gradient is recorded: by default all results.

        Args:
            held: the call's inputs and results by name.
        """
        return tuple([held[name] for name in cls.returns])

    @staticmethod
    def backward(saved: Any, options: Any, needed: Any, *gradients: Any) -> Gradients:
        """Compute the gradients of the inputs, in their order. Inputs after the last returned gradient get None.

        Args:
            saved: the tensors that `saves` lists.
            options: the call's options, in their order.
            needed: for each input, True if it needs a gradient.
            gradients: the gradients of the tensors that `recorded` returns, in a layout that kernels take; None for a
                result whose gradient is zero.
        """
        raise NotImplementedError

    @classmethod
    def declare(cls, parameters: Any) -> None:
        """Set the class's lists of argument names (see `Arguments`) from the annotations of the parameters.

        Args:
            parameters: inspect.Parameter objects by name.
        """
        annotations = {name: parameter.annotation for name, parameter in parameters.items()}
        tensors = [name for name, of in annotations.items() if of in IS_OPTIONAL]
        cls.torch_op = f"{cls.family}_{cls.kernel}"
        cls.torch_types = {name: _SCHEMA_TYPES.get(of, of).replace(" | None", "?") for name, of in annotations.items()}
        cls._declare_names(parameters)
        cls.outputs = tuple(name for name in tensors if name in cls.returns)
        cls.reads = tuple(name for name in tensors if name not in cls.returns)
        cls.given = (*cls.reads, *cls.outputs)
        cls.labels = {**cls.labels, **{source: name for name, source in cls.sources.items()}}
        if len(cls.outputs) > 1:
            cls.labels |= {name: f"out[{place}]" for place, name in enumerate(cls.outputs)}
        cls.options = tuple(name for name in parameters if name not in tensors)
        cls.matrices = tuple(name for name in cls.reads if name not in cls.unaligned)
        cls.scales = tuple(name for name in cls.reads if name in cls.unaligned)
        cls.weights = cls.biases = cls.of_tokens = cls.gathered = ()
        cls.per_row = tuple(name for name in cls.given if name not in cls.shared)
        cls.optional = tuple(name for name in cls.given if IS_OPTIONAL[annotations[name]])
        kinds: dict[str, Callable[[Any], Any]] = {"int": int, "bool": int, "float": float}
        cls.numeric = {name: kinds[annotations[name]] for name in cls.options if annotations[name] in kinds}

    def choice(self, problem: Problem, arch: str, gpu: str) -> Choice:
        why = f"every {self.op} of this form has one kernel, whatever the number of rows"
        return Choice(self.spec(arch), why, ())

    @property
    def lead_sizes(self) -> tuple[int, ...]:
        return tuple(self.lead.shape[: -self.trailing])

    @property
    def num_rows(self) -> int:
        return math.prod(self.lead_sizes)

    def check(self) -> Problem:
        self.check_inputs()
        self.check_buffers()
        return Problem(self.op, dtype_name(self.lead.dtype), self.num_rows, 0, self.lead.shape[-1])

    def check_buffers(self) -> None:
        """Raise ValueError or TypeError if a given buffer does not have the shape and dtype of its result."""
        given = self._buffers()
        likes: Any = self.likes() if given else ()
        for place, buffer in given:
            (shape, dtype), name = likes[place], self.returns[place]
            label = self.labels.get(name, name)
            check_tensor(self.op, label, buffer, f"a tensor {list(shape)}", self.lead)
            if buffer.shape != tuple(shape) or buffer.dtype != dtype:
                raise ValueError(
                    f"{self.op}: {label} is {buffer.dtype} {list(buffer.shape)}; it must be {dtype} {list(shape)}, as "
                    "the result is"
                )

    def _made_likes(self) -> list[Like | None]:
        """Return (shape, dtype) of each result; None for results that are not wanted."""
        return [like if is_wanted else None for like, is_wanted in zip(self.likes(), self.wanted(), strict=True)]

    def returned_results(self) -> list[tuple[str, bool]]:
        return list(zip(self.returns, self.wanted(), strict=True))

    def new_results(self, problem: Problem) -> list[Any]:
        results: list[Any] = [one and self.lead.new_empty(one[0], dtype=one[1]) for one in self._made_likes()]
        for place, buffer in self._buffers():
            results[place] = buffer
        return results

    def _buffers(self) -> list[tuple[int, Tensor]]:
        """Return (index of the result, buffer) for each buffer that the caller gave."""
        given = [getattr(self, name) if name in self.outputs else None for name in self.returns]
        return [(place, buffer) for place, buffer in enumerate(given) if buffer is not None]

    def without_rows(self, problem: Problem) -> Any:
        """Return the results for zero tokens. They are filled with zeros, because a sum over no tokens is zero."""
        return self.returned([None if one is None else one.zero_() for one in self.new_results(problem)])

    def reference(self, problem: Problem) -> Any:
        computed = self.compute()
        wanted = zip(computed if isinstance(computed, tuple) else (computed,), self.wanted(), strict=True)
        results = [result if is_wanted else None for result, is_wanted in wanted]
        for place, buffer in self._buffers():
            results[place] = buffer.copy_(results[place])  # type: ignore[arg-type]
        return self.returned(results)

    def dispatch(self) -> Any:
        if not is_dynamo_compiling():
            self.check_buffers()
        return super().dispatch()

    # Launches:

    def serving(self, problem: Problem, gpu: gpus.Gpu) -> SingleFunction:
        """Return the kernel's function as a `SingleFunction`, which serves any number of rows.

        Args:
            problem: not used.
            gpu: the GPU whose architecture the function is for.
        """
        return SingleFunction(self.spec(gpu.arch))

    def result_tensors(self) -> tuple[ResultTensor, ...]:
        """Return a `ResultTensor` (how a launch allocates a result) for each result.

        Each size of a result is a separate constant of the launch (`<name>_0`, ...): torch's new_empty takes 0.4 us
        less for separate numbers than for a tuple.
        """
        makes = []
        for name, like in zip(self.returns, self._made_likes(), strict=True):
            shape, dtype = like or ((), self.lead.dtype)
            sizes = tuple(f"{name}_{place}" for place in range(len(shape)))
            other = "" if dtype is self.lead.dtype else f"{name}_dtype"
            makes.append(ResultTensor(name, name, sizes, self.leads, other, wanted=like is not None))
        return tuple(makes)

    def constants(self) -> dict[str, Any]:
        dtypes = {f"{name}_dtype": like[1] for name, like in zip(self.returns, self._made_likes(), strict=True) if like}
        options = {name: of(getattr(self, name)) for name, of in self.numeric.items()}
        return self._merged([options, dtypes, {"raw_stream": gpus.raw_stream}, super().constants()])

    def of_rows(self) -> dict[str, Any]:
        own = {name: size for name, size in self.own_sizes.items() if name != "workspace"}
        lengths = {
            f"{name}_{place}": length
            for name, like in zip(self.returns, self.likes(), strict=True)
            for place, length in enumerate(like[0] if like else ())
        }
        return self._merged([{"tokens": self.num_rows, "rank": len(self.lead_sizes)}, own, lengths])

    @functools.cached_property
    def own_sizes(self) -> dict[str, Any]:
        """The values that the definition's `of_rows` functions return for this call, by name; computed once."""
        return super().of_rows()

    def resized_launch_shape(
        self, like: Plan, problem: Problem, constants: dict[str, Any]
    ) -> tuple[LaunchShape, CodeType]:
        """Return (LaunchShape, its compiled code) for this call, given the plan `like` of a call with other row counts.

        The LaunchShape may differ from that of `like`: the number of rows decides whether the kernel takes scratch
        memory, and the leading argument may have another number of token dimensions.

        Args:
            like: the plan of the other call.
            problem: this call's problem (sizes, dtypes, options).
            constants: the constants of the new plan.
        """
        key, launches = (constants["rank"], bool(constants["memory"])), like.serving.launches
        if key not in launches:
            signature, names = like.serving.at(problem.rows).signature, constants.keys() - OWN_NAMES
            shape = self._shape(problem, signature, names, like.shape.checked)
            launches[key] = shape, code_of(self.op, shape)
        return launches[key]

    # Gradients:

    @staticmethod
    def with_backward(call: Any, key: Hashable = None) -> Any:
        """Compute a call in which an argument requires a gradient, record its backward, and return the result.

        Args:
            call: the call.
            key: the key under which a `GradientPlan` is kept for later calls. None: nothing is kept.
        """
        tensors = [getattr(call, name) for name in call.given]
        read = tensors[: len(call.reads)]
        if not any_requires_grad(*read) or is_transformed(*read):
            return call.run_without_gradient(None, {})  # its checks refuse the call
        if not call.differentiable:
            call.refuse_gradients()
        for name in call.outputs:
            refuse_out(call.op, getattr(call, name))
        options = [call.when_recorded.get(name, getattr(call, name)) for name in call.options]
        plan = GradientPlan(type(call), options, call.invariant)
        if key is not None:
            call.plans.keep(key, plan)
        return plan.run(*tensors)


class GradientPlan:
    """The kept plan of calls whose gradient is recorded: an autograd function around the `Plan` without gradient.

    Attributes:
        kind: class of the calls.
        options: the calls' options.
        count: number of inputs.
        launch: the method `run` of the `Plan` of the same call without gradient. None: that plan is not found yet.
        invariant: True: the calls must be batch-invariant.
    """

    def __init__(self, kind: type[AddressedCall], options: list[Any], invariant: bool) -> None:
        self.kind, self.options = kind, options
        self.count = len(kind.reads)
        self.launch: Callable[..., Any] | None = None
        self.invariant = invariant

    def run(self, *tensors: Any) -> Any:
        """Compute the call, and return its differentiable result.

        Args:
            tensors: the inputs, then None for each output buffer.
        """
        return AddressedFunction.apply(self, *tensors[: self.count])  # type: ignore[no-untyped-call]

    def compute(self, tensors: tuple[Any, ...]) -> Any:
        """Compute the results without recording a gradient.

        The first call goes through the operator's public function, which makes the `Plan` without gradient; later calls
        run this plan directly.

        Args:
            tensors: the inputs.
        """
        if self.launch is not None:
            return self.launch(*tensors)
        kind = self.kind
        given = zip((*kind.reads, *kind.options), (*tensors, *self.options), strict=True)
        call = kind(**dict.fromkeys(kind.outputs), **dict(given))
        call.invariant = self.invariant
        with held(self.invariant):
            result = call.call_public_operator()
        if not call.is_traced() and (plan := call.plans.find(call.key())) is not None:
            self.launch = plan.run
        return result


class AddressedFunction(torch.autograd.Function):
    """The autograd function of all differentiable operators of this module: `AddressedCall` subclasses."""

    @staticmethod
    def forward(ctx: Any, plan: GradientPlan, *tensors: Any) -> Any:
        kind = ctx.kind = plan.kind
        ctx.options, ctx.invariant = plan.options, plan.invariant
        made = plan.compute(tensors)
        held = dict(zip(kind.reads, tensors, strict=True))
        held.update(zip(kind.returns, made if made.__class__ is tuple else (made,), strict=True))
        ctx.save_for_backward(*[held[name] for name in kind.saves])
        results = kind.recorded(held)
        if len(results) == 1:
            return results[0]
        ctx.mark_non_differentiable(*[held[name] for name in kind.integers])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        kind = ctx.kind
        with without_graph(), held(ctx.invariant):
            given = [None if gradient is None else usable(gradient) for gradient in gradients]
            made = kind.backward(ctx.saved_tensors, ctx.options, ctx.needs_input_grad[1:], *given)
        return None, *once_differentiable(kind.op, made), *[None] * (len(kind.reads) - len(made))


def like(tensor: Tensor | None) -> Like | None:
    """Return (shape, dtype) of a tensor; None for None."""
    return None if tensor is None else (tensor.shape, tensor.dtype)


def forms(*params: Tensor | None) -> int:
    """Encode the dtypes of parameters in one integer, a kernel argument.

    Parameter i has the two bits 2i and 2i + 1. They hold the dtype's number in PARAM_FORMS; 0 for None.
    """
    codes = (0 if p is None else PARAM_FORMS[dtype_name(p.dtype)] for p in params)
    return sum(code << 2 * place for place, code in enumerate(codes))


def check_dtype(op: str, name: str, tensor: Tensor) -> None:
    """Raise TypeError unless a tensor has a dtype that kernels support; on the CPU float64 is also allowed."""
    valid = DTYPES if runs_kernels(tensor) else (*DTYPES, torch.float64)
    if tensor.dtype not in valid:
        raise TypeError(f"{op}: {name} is {tensor.dtype}; it must be {', '.join(map(str, valid))}, so cast it")


def check_like(op: str, name: str, value: Any, shape: tuple[int, ...], like: Tensor, why: str) -> Tensor:
    """Return `value` if it is a contiguous tensor of `shape` with the dtype and device of `like`.

    Args:
        op, name: the operator and the argument, for errors.
        value: the argument.
        shape: the required shape.
        like: a tensor with the required dtype and device.
        why: the error's reason for the shape.

    Raises:
        TypeError, ValueError: the value is no such tensor.
    """
    what = f"a tensor {shape_text(shape)}"
    return check_tensor(op, name, value, what, like, dtypes=(like.dtype,), shape=shape, why=why)


def check_vectors(op: str, name: str, letter: str, tensor: Tensor) -> None:
    """Raise ValueError unless a tensor's last dimension is at least 1 and, on a GPU, a multiple of 8.

    Kernels read vectors of 16 bytes.

    Args:
        op, name: the operator and the argument, for errors.
        letter: the letter of the width, for errors.
        tensor: the tensor.
    """
    width = tensor.shape[-1]
    if width == 0 or (runs_kernels(tensor) and width % WIDTH_MULTIPLE):
        raise ValueError(
            f"{op}: {name} has {letter} = {width}; it must be a positive multiple of {WIDTH_MULTIPLE} (16 bytes), so "
            "pad it with zeros"
        )
