"""Activations in Python: their constants, their values on tensors, and the order of gate and up halves in 2I columns.

`cute_kernels.formulas` declares activations and their constants (limit, alpha, ...), which the code calls numbers.
Public functions take constants by keyword; internal functions take one tuple, `numbers`. `split_halves` defines the
column order of a gated layer. Values are computed by plain torch operators in the dtype of the arguments: they are the
CPU reference.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, TypedDict, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_kernels.formulas import FORMULAS, NUMBERS, Number
from cute_kernels.signatures import PARAMS
from cute_kernels.specs import GATED, KINDS, LAYOUTS

INTERLEAVED32_BLOCK = 32

Numbers = tuple[float, ...]
"""Constants (limit, alpha, ...) of all activations' formulas, in the order of `cute_kernels.formulas.NUMBERS`."""
DEFAULTS: Numbers = tuple(number.default for number in NUMBERS.values())
Function = TypeVar("Function", bound=Callable[..., Any])


class NamedNumbers(TypedDict, total=False):
    """The constants of all activations' formulas as keyword arguments, for type checkers."""

    limit: float
    alpha: float
    offset: float
    gate_cap: float
    up_cap: float | None


class Activation(NamedTuple):
    """An activation function with its column layout and its constants.

    Attributes:
        name: the activation's name, a key of `cute_kernels.formulas.FORMULAS`.
        glu_layout: order of the gate and up halves in 2I columns; used only if the activation is gated.
        numbers: the constants of this activation's formula alone, in the order in which the formula takes them.
    """

    name: str
    glu_layout: str
    numbers: Numbers

    @classmethod
    def named(cls, name: str, glu_layout: str = "concat", **numbers: float | None) -> Activation:
        """Return the activation with the constants `numbers` (limit, alpha, ...); others have their defaults."""
        return cls.of(name, glu_layout, _pack(**numbers))

    @classmethod
    def of(cls, name: str, glu_layout: str, numbers: Numbers) -> Activation:
        """Return the activation, with its own constants picked from `numbers`, the constants of all formulas."""
        named: Mapping[str, Any] = named_numbers(numbers)
        return cls(name, glu_layout, tuple(named[own] for own in FORMULAS[name].numbers))

    @property
    def keywords(self) -> dict[str, Any]:
        """This activation as keyword arguments of operators and modules, without constants that have their default."""
        own = zip(FORMULAS[self.name].numbers, self.numbers, strict=True)
        others = {name: value for name, value in own if value != NUMBERS[name].default}
        return {"activation": self.name, "glu_layout": self.glu_layout, **others}

    @property
    def params(self) -> dict[str, float]:
        """The activation's constants as kernel arguments, by the names in `signatures.PARAMS`; unused ones are 0."""
        values = (*map(float, self.numbers), *[0.0] * len(PARAMS))
        return {argument.name: value for argument, value in zip(PARAMS, values, strict=False)}

    @property
    def kernel_params(self) -> dict[str, Any]:
        """Arguments by which a kernel compiled for several activations selects this one.

        `kind` and `glu_layout` are the codes of the activation and of the column layout; the rest, `params`, are the
        activation's constants (limit, alpha, ...).
        """
        return {"kind": KINDS[self.name], "glu_layout": LAYOUTS[self.glu_layout], **self.params}


def named_numbers(numbers: Numbers) -> NamedNumbers:
    """Return the tuple of all formulas' constants as keyword arguments."""
    return cast(NamedNumbers, dict(zip(NUMBERS, numbers, strict=True)))


def _as_a_number(name: str, number: Number) -> str:
    return name if number.none is None else f"{number.none!r} if {name} is None else {name}"


TEXT = f"({', '.join(_as_a_number(*one) for one in NUMBERS.items())})"
"""Python source of an expression for the tuple of all constants.

It reads a variable of each constant's name, replaces None by the value that None stands for, and uses the name `inf`.
"""


def packer(name: str) -> Callable[..., Numbers]:
    """Return a function that takes constants (limit, alpha, ...) by keyword and returns the tuple `Numbers`.

    The tuple holds the constants of all formulas; a constant that is not given has its default. The function is called
    `name`, so that the TypeError of an unknown keyword shows this name.
    """
    parameters = ", ".join(f"{keyword}={number.default!r}" for keyword, number in NUMBERS.items())
    made: Any = eval(f"lambda *, {parameters}: {TEXT}", {"inf": math.inf})
    made.__name__ = made.__qualname__ = name
    packed: Callable[..., Numbers] = made
    return packed


_pack = packer("numbers")


def packed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments with the constants (limit, alpha, ...) replaced by one tuple, `numbers`."""
    own = {name: value for name, value in arguments.items() if name in NUMBERS}
    others = {name: value for name, value in arguments.items() if name not in NUMBERS}
    return {**others, "numbers": _pack(**own)}


def _annotation(number: Number) -> str:
    return "float" if number.none is None else "float | None"


def with_numbers(function: Function) -> Function:
    """Decorate a function that takes `**numbers`, so that inspect.signature shows each constant by name.

    The constants come after `glu_layout`.
    """
    signature = inspect.signature(function)
    *parameters, last = signature.parameters.values()
    assert last.kind is inspect.Parameter.VAR_KEYWORD
    place = 1 + [parameter.name for parameter in parameters].index("glu_layout")
    parameters[place:place] = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=number.default, annotation=_annotation(number))
        for name, number in NUMBERS.items()
    ]
    shown: Any = function
    shown.__signature__ = signature.replace(parameters=parameters)
    annotations = dict(function.__annotations__)
    del annotations[last.name]
    function.__annotations__ = {**annotations, **{name: _annotation(number) for name, number in NUMBERS.items()}}
    return function


def _at_most(x: Tensor, bound: float) -> Tensor:
    return x.clamp(max=bound)


def _select(condition: Tensor | bool, if_true: Any, if_false: Any) -> Any:
    if isinstance(condition, bool):
        return if_true if condition else if_false
    return torch.where(condition, if_true, if_false)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _with_d_gelu_tanh(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = math.sqrt(2 / math.pi)
    tanh = torch.tanh(scale * (x + 0.044715 * x * x * x))
    slope = 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * scale * (1 + 3 * 0.044715 * x * x)
    return _gelu_tanh(x), slope


def _normal(x: Tensor) -> tuple[Tensor, Tensor]:
    return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))), torch.exp(-0.5 * x * x)


TORCH = SimpleNamespace(
    number=float, sigmoid=torch.sigmoid, tanh=torch.tanh, relu=F.relu, reciprocal=lambda x: 1.0 / x, at_most=_at_most,
    select=_select, gelu_tanh=_gelu_tanh, with_d_gelu_tanh=_with_d_gelu_tanh, normal=_normal,
)  # fmt: skip
"""The operations with which formulas compute on tensors; see `cute_kernels.formulas`."""


def is_in_halves(activation: str, glu_layout: str) -> bool:
    """Return True if the columns of h, and so w1's rows, are the gate's half followed by the up-projection's half."""
    return glu_layout == "concat" and activation in GATED


def split_halves(h: Tensor, glu_layout: str, dim: int = 1) -> tuple[Tensor, Tensor]:
    """Return (the gate's half, the up-projection's half) of h [T, 2I], each [T, I].

    Works on any tensor with 2I elements along `dim`, such as a weight with dim 0.
    """
    if glu_layout == "concat":
        a, u = h.chunk(2, dim=dim)
        return a, u
    block = 1 if glu_layout == "interleaved" else INTERLEAVED32_BLOCK
    a, u = h.unflatten(dim, (-1, 2, block)).unbind(dim + 1)
    return a.flatten(dim, dim + 1), u.flatten(dim, dim + 1)


def join_halves(a: Tensor, u: Tensor, glu_layout: str, dim: int = 1) -> Tensor:
    """Join the gate's half a and the up-projection's half u along `dim`: the inverse of `split_halves`."""
    if glu_layout == "concat":
        return torch.cat((a, u), dim=dim)
    block = 1 if glu_layout == "interleaved" else INTERLEAVED32_BLOCK
    halves = [half.unflatten(dim, (-1, block)) for half in (a, u)]
    return torch.stack(halves, dim=dim + 1).flatten(dim, dim + 2)


def _parts(h: Tensor, activation: str, glu_layout: str) -> tuple[Tensor, ...]:
    return split_halves(h, glu_layout) if activation in GATED else (h,)


def activate(h: Tensor, activation: str, glu_layout: str, numbers: Numbers) -> Tensor:
    """Return the activation [T, I] of a preactivation h, [T, 2I] if gated, else [T, I].

    activation, glu_layout, numbers: the fields of an `Activation`.
    """
    value: Tensor = FORMULAS[activation].value(TORCH, *_parts(h, activation, glu_layout), *numbers)
    return value


def activate_backward(
    dm: Tensor, h: Tensor, activation: str, glu_layout: str, numbers: Numbers
) -> tuple[Tensor, Tensor]:
    """Return (gradient of h, activation of h) from dm [T, I], the gradient of the activation's result.

    h [T, 2I or I] is the preactivation; the other arguments are the activation, its column layout and its constants.
    """
    value, *slopes = FORMULAS[activation].with_slopes(TORCH, *_parts(h, activation, glu_layout), *numbers)
    first, *others = (dm * slope for slope in slopes)
    return join_halves(first, others[0], glu_layout) if others else first, value
