"""Operators whose kernels take nothing but addresses and numbers: those of hyper-connections and of the layer.

Their fronts, plans and launches are those of every operator (`front`, `launch`, `call`); what the arguments are is told
by their annotations: "Tensor", "Tensor | None" or a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from cute_kernels.chains import signature_of
from cute_kernels.specs import PARAM_FORMS, LayerSpec, MhcSpec, Spec

from . import device as gpus
from . import kernels
from .backward.parts import once_differentiable, usable, without_graph
from .call import Call
from .launch import Made, Plan, Shape
from .problem import Problem
from .signature import any_requires_grad, check_alignment, is_transformed, refuse_out, tensors_of

MAX_TOKENS = 2**27
TORCH_TYPES = {"Tensor | None": "Tensor?"}
"""Of annotations, where torch calls them otherwise."""

Gradients = Sequence[Tensor | None]
Like = tuple[Sequence[int], torch.dtype]
"""Shape and dtype of a result."""


class AddressedCall(Call):
    """A call of an operator that is one kernel, or one chain, and its reference.

    A subclass says what its tensors and options mean (`check_inputs`), what it makes (`likes`, `wanted`), how the CPU
    computes it (`compute`), and which `numbers` the kernel takes besides addresses.

    Attributes:
        family, kernel: of the spec, and of the name of torch's operator.
        leads: the argument that gives dtype and device; its dimensions before the last `trailing` are those of tokens,
            which all tensors have but `shared`.
        returns: what the kernel writes, by its names; parameters of these names are buffers.
        anywhere: inputs that need no alignment.
        saves: inputs and results that backward needs; `integers`: results without a gradient.
        when_recorded: options where a gradient is recorded.
    """

    family: ClassVar[str]
    kernel: ClassVar[str]
    leads: ClassVar[str] = "x"
    trailing: ClassVar[int]
    shared: ClassVar[frozenset[str]] = frozenset()
    returns: ClassVar[tuple[str, ...]] = ("out",)
    anywhere: ClassVar[frozenset[str]] = frozenset()
    saves: ClassVar[tuple[str, ...]] = ()
    integers: ClassVar[tuple[str, ...]] = ()
    when_recorded: ClassVar[dict[str, Any]] = {}
    labels: ClassVar[dict[str, str]]  # what errors call tensors
    may_be_absent: ClassVar[tuple[str, ...]]
    numeric: ClassVar[dict[str, Callable[[Any], Any]]]  # options that kernels may take as they are

    torch_results = {"": ("Tensor[]", {})}
    has_torch_out = False

    def check_inputs(self) -> None:
        """Raises ValueError or TypeError. Of most backward operators nothing: their callers are `backward` methods."""

    def likes(self) -> Sequence[Like | None]:
        """What each result is like."""
        raise NotImplementedError

    def wanted(self) -> tuple[bool, ...]:
        """Which results there are."""
        return (True,) * len(self.returns)

    def compute(self) -> Any:
        """The results by the reference, all or those that are wanted."""
        raise NotImplementedError

    def numbers(self, sm_count: int) -> dict[str, Any]:
        """What the kernel takes besides addresses, tokens and numeric options; "workspace": float32 elements of it."""
        return {}

    def spec(self, arch: str) -> Spec:
        raise NotImplementedError

    @classmethod
    def recorded(cls, held: dict[str, Any]) -> tuple[Any, ...]:
        """What is returned where a gradient is recorded, of inputs and results."""
        return tuple([held[name] for name in cls.returns])

    @staticmethod
    def backward(saved: Any, options: Any, needed: Any, *gradients: Any) -> Gradients:
        """Gradients of inputs, in their order; what comes behind them has none.

        Args:
            saved: what `saves` lists. options: of the call, in their order. needed: which inputs' gradients are.
            gradients: of what `recorded` returns, as kernels take them; None of what has none.
        """
        raise NotImplementedError

    @classmethod
    def declare(cls, parameters: Any, plans: Any = None) -> None:
        annotations = {name: parameter.annotation for name, parameter in parameters.items()}
        tensors = [name for name, of in annotations.items() if of.startswith("Tensor")]
        cls.torch_op = f"{cls.family}_{cls.kernel}"
        cls.torch_types = {name: TORCH_TYPES.get(of, of) for name, of in annotations.items()}
        super().declare(tuple(parameters), plans)
        cls.outputs = tuple(name for name in tensors if name in cls.returns)
        cls.reads = tuple(name for name in tensors if name not in cls.returns)
        cls.given = (*cls.reads, *cls.outputs)
        cls.labels = {name: name for name in cls.reads} | {source: name for name, source in cls.sources.items()}
        cls.labels |= {name: f"out[{i}]" if len(cls.outputs) > 1 else name for i, name in enumerate(cls.outputs)}
        cls.options = tuple(name for name in parameters if name not in tensors)
        cls.matrices = tuple(name for name in cls.reads if name not in cls.anywhere)
        cls.scales = tuple(name for name in cls.reads if name in cls.anywhere)
        cls.weights = cls.biases = cls.of_tokens = cls.of_any_rows = ()
        cls.rowwise = tuple(name for name in cls.given if name not in cls.shared)
        cls.may_be_absent = tuple(name for name in cls.given if annotations[name] != "Tensor")
        kinds: dict[str, Callable[[Any], Any]] = {"int": int, "bool": int, "float": float}
        cls.numeric = {name: kinds[annotations[name]] for name in cls.options if annotations[name] in kinds}

    @classmethod
    def optional(cls) -> tuple[str, ...]:
        return cls.may_be_absent

    @property
    def lead(self) -> Tensor:
        lead: Tensor = getattr(self, self.leads)
        return lead

    @property
    def lead_sizes(self) -> tuple[int, ...]:
        return tuple(self.lead.shape[: -self.trailing])

    @property
    def num_rows(self) -> int:
        return math.prod(self.lead_sizes)

    @property
    def groups(self) -> Any:
        return None

    @property
    def form(self) -> str:
        return self.torch_op

    def check(self) -> Problem:
        self.check_inputs()
        self.check_buffers()
        return Problem(self.op, str(self.lead.dtype).removeprefix("torch."), self.num_rows, 0, self.lead.shape[-1])

    def check_buffers(self) -> None:
        """Given buffers have the results' shapes and dtypes."""
        names = self.written_names()
        for name, like in zip(self.returns, self.likes() if names else (), strict=False):
            if name not in names or like is None:
                continue
            (shape, dtype), given, label = like, getattr(self, name), self.labels[name]
            if not isinstance(given, Tensor):
                raise TypeError(f"{self.op}: {label} is a {type(given).__name__}; give a tensor {list(shape)}")
            if tuple(given.shape) != tuple(shape) or given.dtype != dtype:
                raise ValueError(
                    f"{self.op}: {label} is {given.dtype} {list(given.shape)}; it must be {dtype} {list(shape)}, as "
                    "the result is"
                )
            if given.device != (device := self.lead.device) or not given.is_contiguous():
                raise ValueError(f"{self.op}: {label} must be contiguous and on {device}; give a fresh buffer")

    def written_names(self) -> list[str]:
        return [name for name in self.outputs if getattr(self, name) is not None]

    def tensors(self) -> list[tuple[str, Tensor]]:
        return [pair for name in self.reads for pair in tensors_of(self.labels[name], getattr(self, name))]

    def written(self) -> list[tuple[str, Tensor]]:
        return [pair for name in self.written_names() for pair in tensors_of(self.labels[name], getattr(self, name))]

    @classmethod
    def look(cls, op: str, outs: list[Any], **read: Any) -> None:
        for name in cls.matrices:
            if name in read:
                check_alignment(op, name, read[name])
        for name, out in zip(cls.outputs, outs, strict=False):
            check_alignment(op, cls.labels[name], out)

    def results(self, problem: Problem) -> Any:
        return self._returned([None if like is None else self._new(like) for like in self._made_likes()])

    def _made_likes(self) -> list[Like | None]:
        return [like if is_wanted else None for like, is_wanted in zip(self.likes(), self.wanted(), strict=True)]

    def _new(self, like: Like) -> Tensor:
        return self.lead.new_empty(like[0], dtype=like[1])

    def _returned(self, results: Sequence[Tensor | None]) -> Any:
        return tuple(results) if len(self.returns) > 1 else results[0]

    def without_rows(self, problem: Problem) -> Any:
        """Sums over no tokens are zero."""
        given = [getattr(self, name, None) if name in self.outputs else None for name in self.returns]
        made = [None if like is None else self._new(like) for like in self._made_likes()]
        results = [new if buffer is None else buffer for new, buffer in zip(made, given, strict=True)]
        return self._returned([None if result is None else result.zero_() for result in results])

    def reference(self, problem: Problem) -> Any:
        computed = self.compute()
        results = computed if isinstance(computed, tuple) else (computed,)
        wanted = zip(results, self.wanted(), strict=True)
        return self._into_buffers([result if is_wanted else None for result, is_wanted in wanted])

    def _into_buffers(self, results: list[Tensor | None]) -> Any:
        for place, name in enumerate(self.returns):
            if name in self.outputs and (buffer := getattr(self, name)) is not None:
                results[place] = buffer.copy_(results[place])
        return self._returned(results)

    def dispatch(self) -> Any:
        if not is_dynamo_compiling():
            self.check_buffers()
        return super().dispatch()

    def assembled(self, returned: Any) -> Any:
        made = iter(returned)
        return self._into_buffers([next(made) if is_wanted else None for is_wanted in self.wanted()])

    def prepared(self) -> Any:
        return self

    def _check_group_sizes(self) -> None:
        """There are none."""

    # Launches:

    def serving(self, problem: Problem, gpu: gpus.Gpu) -> kernels.Served:
        spec = self.spec(gpu.arch)
        return kernels.Served(kernels.find(spec).function, False, signature_of(spec))

    def made(self) -> tuple[Made, ...]:
        """With a constant for each size, since torch takes 0.4 us less for numbers than for a tuple."""
        makes = []
        for name, like in zip(self.returns, self._made_likes(), strict=True):
            shape, dtype = like or ((), self.lead.dtype)
            sizes = tuple(f"{name}_{place}" for place in range(len(shape)))
            other = "" if dtype is self.lead.dtype else f"{name}_dtype"
            makes.append(Made(name, name, sizes, self.leads, other, wanted=like is not None))
        return tuple(makes)

    def sizes(self, problem: Problem) -> dict[str, Any]:
        numbers = self.numbers(gpus.gpu(self.lead.get_device()).sm_count)
        size = numbers.pop("workspace", 0)
        options = {name: of(getattr(self, name)) for name, of in self.numeric.items()}
        sizes = {**options, "tokens": problem.rows, **numbers, "raw_stream": gpus.raw_stream}
        for name, like in zip(self.returns, self._made_likes(), strict=True):
            if like is not None:
                sizes |= {f"{name}_dtype": like[1], **{f"{name}_{place}": n for place, n in enumerate(like[0])}}
        return {**sizes, "memory": [((1, size), torch.float32)] if size else []}

    def _plan(self, shape: Shape, constants: dict[str, Any], serving: Any) -> Plan:
        """Rows tell whether the kernel needs a workspace, and may have more dimensions than those of a plan alike."""
        texts = {"stream": "raw_stream(index)", **{name: "0" for name in self.reads if getattr(self, name) is None}}
        scratch = (("workspace", "matrix"),) if constants["memory"] else ()
        if not scratch:
            texts["workspace"] = "0"
        shape = shape._replace(texts=tuple(texts.items()), scratch=scratch, makes=self.made())
        return super()._plan(shape, constants, serving)

    # Gradients:

    @staticmethod
    def with_backward(call: Any, key: Hashable = None) -> Any:
        tensors = [getattr(call, name) for name in call.given]
        read = tensors[: len(call.reads)]
        if not any_requires_grad(*read) or is_transformed(*read):
            return call.settle(None, {})  # whose checks refuse it
        if not call.differentiable:
            call.refuse_gradients()
        for name in call.outputs:
            refuse_out(call.op, getattr(call, name))
        recording = Recording(type(call), [call.when_recorded.get(name, getattr(call, name)) for name in call.options])
        if key is not None:
            call.plans.keep(key, recording)
        return recording.run(*tensors)


class Recording:
    """What serves calls of which a gradient is recorded, in place of a `Plan`: that of the call without."""

    def __init__(self, kind: type[AddressedCall], options: list[Any]) -> None:
        self.kind, self.options = kind, options
        self.count = len(kind.reads)
        self.launch: Callable[..., Any] | None = None

    def run(self, *tensors: Any) -> Any:
        return Recorded.apply(self, *tensors[: self.count])  # type: ignore[no-untyped-call]

    def compute(self, tensors: tuple[Any, ...]) -> Any:
        """The results, by the plan that the operator has found before."""
        if self.launch is not None:
            return self.launch(*tensors)
        kind = self.kind
        given = zip((*kind.reads, *kind.options), (*tensors, *self.options), strict=True)
        call = kind(**dict.fromkeys(kind.outputs), **dict(given))
        result = call.again()
        if not call.is_traced() and (plan := call.plans.find(call.key())) is not None:
            self.launch = plan.run
        return result


class Recorded(torch.autograd.Function):
    """Any differentiable one."""

    @staticmethod
    def forward(ctx: Any, recording: Recording, *tensors: Any) -> Any:
        kind = ctx.kind = recording.kind
        ctx.options = recording.options
        made = recording.compute(tensors)
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
        with without_graph():
            given = [None if gradient is None else usable(gradient) for gradient in gradients]
            made = kind.backward(ctx.saved_tensors, ctx.options, ctx.needs_input_grad[1:], *given)
        return None, *once_differentiable(kind.op, made), *[None] * (len(kind.reads) - len(made))


class MhcCall(AddressedCall):
    """Of hyper-connections. `formed`: parameters whose dtypes the kernel is told."""

    family = "mhc"
    trailing = 2
    shared = frozenset(("weight", "alpha_pre", "alpha_post", "alpha_res", "bias"))
    formed: ClassVar[tuple[str, ...]] = ()

    def numbers(self, sm_count: int) -> dict[str, Any]:
        return {"forms": forms(*[getattr(self, name) for name in self.formed]), "width": self.lead.shape[-1]}

    def spec(self, arch: str) -> Spec:
        return MhcSpec(self.kernel, str(self.lead.dtype).removeprefix("torch."), self.lead.shape[-2], arch)


class LayerCall(AddressedCall):
    """Of what is around a layer's experts. Tokens are the first dimension of what has any."""

    family = "layer"
    trailing = 1

    def spec(self, arch: str) -> Spec:
        return LayerSpec(self.kernel, arch=arch)


def like(tensor: Tensor | None) -> Like | None:
    return None if tensor is None else (tensor.shape, tensor.dtype)


def forms(*params: Tensor | None) -> int:
    """The dtypes of parameters as kernels take them: two bits each, the first lowest."""
    codes = (0 if p is None else PARAM_FORMS[str(p.dtype).removeprefix("torch.")] for p in params)
    return sum(code << 2 * place for place, code in enumerate(codes))
