"""Checks of arguments' metadata. Errors name the argument, the value received and the value needed.

The checks are the same for every device. They read only shapes, dtypes, devices and strides, so they also work on the
fake tensors of a trace. `memory` checks memory.

In signatures, `op` is the operator's name and `name` the argument's name, both for errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from cute_kernels.formulas import NUMBERS
from cute_kernels.specs import ACTIVATIONS, GATED, GLU_LAYOUTS

from ..activations import Numbers
from ..errors import GradientNotSupported
from ..host import device as gpus
from ..host.experts import ExpertList
from ..host.groups import leading
from .memory import ALIGNMENT_BYTES as ALIGNMENT_BYTES
from .memory import LOWEST_ADDRESS as LOWEST_ADDRESS
from .memory import check_alignment as check_alignment
from .memory import check_no_overlap as check_no_overlap
from .memory import check_plain as check_plain
from .memory import extent as extent
from .memory import is_transformed as is_transformed
from .memory import tensors_of as tensors_of

MAX_ROWS = 2**26
MAX_SPAN = 2**36
"""Most bytes of a matrix with rows (`extent`): kernels count units of 16 bytes in 32 bits."""
ALIGNMENT_ELEMENTS = 8  # 16-bit elements in 16 bytes: TMA needs row strides that are multiples
KERNEL_DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
REFERENCE_DTYPES = (*KERNEL_DTYPES, torch.float32, torch.float64)
PLAIN_RECIPE = "bf16"
"""The name of the recipe that quantises nothing."""

Experts = Tensor | Sequence[Tensor] | ExpertList
"""Experts' tensors: packed [E, ...], or a sequence of E tensors.

An ExpertList is a sequence that passed its checks. A GateUp is a sequence of two packed tensors, gate and up.
"""


def runs_kernels(x: Tensor) -> bool:
    """Return True if kernels compute calls with this tensor (it is on a GPU); False: the CPU reference does."""
    return x.device.type == gpus.KERNEL_DEVICE


def shape_text(shape: Sequence[Any]) -> str:
    """Return a shape as text, for example "[8, 2I, H]"."""
    return f"[{', '.join(map(str, shape))}]"


def mismatch(op: str, name: str, shape: Sequence[Any], wanted: Sequence[Any], why: str) -> NoReturn:
    """Raise ValueError for a wrong shape. `why`: the reason for the wanted shape."""
    raise ValueError(f"{op}: {name} has shape {shape_text(shape)}; it must be {shape_text(wanted)}, since {why}")


def any_requires_grad(*arguments: Any) -> bool:
    """Return True if an argument, or a tensor in a list, requires a gradient. Values that are no tensors never do."""
    for argument in arguments:
        for one in argument if isinstance(argument, (list, tuple)) else (argument,):
            if getattr(one, "requires_grad", False):
                return True
    return False


def refuse_gradients(op: str, **arguments: Any) -> None:
    """Raise GradientNotSupported if an argument of an operator without a backward requires a gradient."""
    for name, value in arguments.items():
        if any_requires_grad(value):
            raise GradientNotSupported(
                f"{op} has no gradient, and {name} requires one; call it under torch.no_grad() or "
                f"torch.inference_mode(), or give {name}.detach() (grouped_mm, grouped_glu and grouped_mlp are "
                "differentiable)"
            )


def refuse_rows(op: str) -> NoReturn:
    """Raise GradientNotSupported: `rows=` is given, and an argument requires a gradient."""
    raise GradientNotSupported(
        f"{op}: an argument requires a gradient, and rows= has none; give x[rows], or use glulam.moe"
    )


def refuse_out(op: str, out: Any) -> None:
    """Raise GradientNotSupported if `out` is given in a call whose gradient is recorded.

    Autograd would not see the writes to `out`.
    """
    if out is not None:
        raise GradientNotSupported(
            f"{op}: out is given, and an argument requires a gradient; leave out out, or call it under torch.no_grad()"
        )


def check_written(op: str, name: str, out: Tensor) -> None:
    """Raise GradientNotSupported if grad mode is on and `out`, a buffer that the caller gave, requires a gradient."""
    if torch.is_grad_enabled() and out.requires_grad:
        raise GradientNotSupported(
            f"{op}: {name} requires a gradient, and autograd would not know that it was written; give {name}.detach(), "
            "or call it under torch.no_grad()"
        )


def check_is_tensor(op: str, name: str, value: Any, what: str) -> Tensor:
    """Return `value` if it is a tensor, else raise a TypeError that asks for `what`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} is a {type(value).__name__}; give {what}")
    return value


def check_tensor(
    op: str, name: str, value: Any, what: str, like: Tensor | None = None, *, dtypes: Sequence[torch.dtype] = (),
    cast: str = "cast it", shape: Sequence[int] | None = None, why: str = "",
) -> Tensor:  # fmt: skip
    """Return `value` if it is a contiguous tensor that meets the requirements.

    Args:
        op, name: the operator and the argument, for errors.
        value: the argument.
        what: the error asks for this if `value` is not a tensor.
        like: a tensor on the required device. None: any device.
        dtypes: the allowed dtypes. Empty: any.
        cast: the error's advice for a wrong dtype.
        shape: the required shape. None: any.
        why: the error's reason for the shape.

    Raises:
        TypeError: not a tensor, or a wrong dtype.
        ValueError: a wrong shape or device, or not contiguous.
    """
    tensor = check_is_tensor(op, name, value, what)
    if dtypes and tensor.dtype not in dtypes:
        raise TypeError(f"{op}: {name} is {tensor.dtype}; it must be {' or '.join(map(str, dtypes))}, so {cast}")
    if shape is not None and tuple(tensor.shape) != tuple(shape):
        mismatch(op, name, tensor.shape, shape, why)
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{op}: {name} is on {tensor.device}, others on {like.device}; move it to {like.device}")
    check_contiguous(op, name, tensor)
    return tensor


def check_same_device(op: str, name: str, tensor: Tensor | ExpertList, x: Tensor) -> None:
    """Raise ValueError unless a tensor is on x's device."""
    if tensor.device != x.device:
        of = leading(op)
        raise ValueError(f"{op}: {name} is on {tensor.device} but {of} is on {x.device}; move it to {x.device}")


def check_like_x(op: str, name: str, tensor: Tensor | ExpertList, x: Tensor, wide: bool = False) -> None:
    """Check that a tensor has x's dtype and device; with `wide`, float32 is also allowed if x is 16-bit."""
    valid = gradient_dtypes(x) if wide else (x.dtype,)
    if tensor.dtype not in valid:
        of, dtypes = leading(op), " or ".join(map(str, valid))
        raise TypeError(f"{op}: {name} is {tensor.dtype} but {of} is {x.dtype}; it must be {dtypes}, so cast it")
    check_same_device(op, name, tensor, x)


def _remedy(name: str) -> str:
    """Return the error's advice on how to get a contiguous tensor.

    For an input this is a copy. For an output it is another buffer, since the caller would not see results in a copy.
    """
    return "give a buffer that is" if name.startswith("out") else "call .contiguous()"


def check_contiguous(op: str, name: str, tensor: Tensor) -> None:
    """Raise ValueError unless a tensor is contiguous."""
    if not tensor.is_contiguous():
        strides = shape_text(tensor.stride())
        raise ValueError(f"{op}: {name} is not contiguous (strides {strides}); {_remedy(name)}")


def gradient_dtypes(x: Tensor) -> tuple[torch.dtype, ...]:
    """Return the dtypes that gradients of weights may have: x's, and float32 if x is 16-bit."""
    return (x.dtype, torch.float32) if x.dtype.itemsize == 2 else (x.dtype,)


def check_out_dtype(op: str, dtype: Any, x: Tensor) -> None:
    """Check that `dtype` is None, x's dtype, or, if x is 16-bit, float32."""
    if dtype is not None and dtype not in gradient_dtypes(x):
        valid = " or ".join(map(str, gradient_dtypes(x)))
        raise TypeError(f"{op}: out_dtype is {dtype}; it must be {valid}")


def check_x(op: str, x: Any, dtypes: tuple[torch.dtype, ...] | None = None) -> tuple[int, int]:
    """Check the leading operand [T, K], and return (T, K).

    Args:
        op: the operator.
        x: the leading operand: x, or the argument that `Arguments.leads` names.
        dtypes: the allowed dtypes. None: KERNEL_DTYPES on a GPU, REFERENCE_DTYPES elsewhere.
    """
    name = leading(op)
    x = check_is_tensor(op, name, x, "a tensor [T, K]")
    on_gpu = runs_kernels(x)
    valid = dtypes or (KERNEL_DTYPES if on_gpu else REFERENCE_DTYPES)
    if x.dtype not in valid:
        who = "kernels take" if on_gpu else "the CPU reference takes"
        raise TypeError(f"{op}: {name} is {x.dtype}; {who} {', '.join(map(str, valid))}, so cast it")
    if x.dim() != 2:
        raise ValueError(f"{op}: {name} has shape {shape_text(x.shape)}; give [T, K], as {name}.flatten(0, -2) does")
    rows, columns = x.shape
    if isinstance(rows, int) and rows >= MAX_ROWS:  # a symbolic T of a trace has no limit: calls check it
        raise ValueError(f"{op}: {name} has {rows} rows; at most 2**26 - 1 are possible, so call once for each part")
    check_width(op, name, columns, on_gpu)
    _check_rows(op, name, x)
    return rows, columns


def check_width(op: str, name: str, width: int, on_gpu: bool) -> None:
    """Check a matrix dimension: positive, and on a GPU a multiple of 8.

    Args:
        width: the dimension's size.
        on_gpu: True: the call runs on a GPU.
    """
    if width == 0:
        raise ValueError(f"{op}: {name} has a dimension of 0 elements; give at least one")
    if on_gpu and width % ALIGNMENT_ELEMENTS:
        raise ValueError(
            f"{op}: {name} has a dimension of {width} elements; it must be a positive multiple of "
            f"{ALIGNMENT_ELEMENTS} (16 bytes), so pad it with zeros"
        )


def _check_rows(op: str, name: str, matrix: Tensor) -> None:
    """Check that a matrix's rows are dense and do not overlap; on a GPU also that the row stride is k * 16 bytes."""
    rows, width = matrix.shape
    stride, inner = matrix.stride()
    if inner != 1 and width > 1:
        raise ValueError(f"{op}: {name} has stride {inner} along its rows; it must be 1, so {_remedy(name)}")
    if isinstance(rows, int) and rows <= 1:
        return
    if stride < width:
        raise ValueError(
            f"{op}: {name} has rows of {width} elements only {stride} apart; they must not overlap, so {_remedy(name)}"
        )
    if runs_kernels(matrix) and isinstance(rows, int) and extent(matrix) > MAX_SPAN:
        raise ValueError(
            f"{op}: {name} lies in {extent(matrix) / 2**30:.3g} GiB of memory; at most {MAX_SPAN / 2**30:.3g} are "
            "possible, so call once for each part"
        )
    if runs_kernels(matrix) and stride % ALIGNMENT_ELEMENTS:
        raise ValueError(
            f"{op}: {name} has rows {stride} elements apart; the distance must be a multiple of {ALIGNMENT_ELEMENTS} "
            f"(16 bytes), so pad the rows or {_remedy(name)}"
        )


def check_rows_like(op: str, name: str, matrix: Any, x: Tensor, columns: int | None, why: str) -> int:
    """Check that a matrix is [T, columns] with x's T, dtype and device; return its number of columns.

    Args:
        op, name: the operator and the argument, for errors.
        matrix: the argument.
        x: a matrix of T rows.
        columns: the required number of columns. None: any number.
        why: the error's reason for the shape.
    """
    matrix = check_is_tensor(op, name, matrix, "a tensor [T, columns]")
    check_like_x(op, name, matrix, x)
    if matrix.dim() != 2 or matrix.shape[0] != x.shape[0] or columns not in (None, matrix.shape[1]):
        mismatch(op, name, matrix.shape, (x.shape[0], "columns" if columns is None else columns), why)
    width = int(matrix.shape[1])
    check_width(op, name, width, runs_kernels(x))
    _check_rows(op, name, matrix)
    return width


def check_choice(op: str, name: str, got: Any, valid: Sequence[str]) -> None:
    """Raise ValueError unless an option is one of the valid strings."""
    if not isinstance(got, str) or got not in valid:
        raise ValueError(f"{op}: {name} is {got!r}; choose one of {', '.join(valid)}")


def check_flag(op: str, name: str, value: Any) -> None:
    """Raise TypeError unless an option is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} is {value!r}; give True or False")


def check_number(op: str, name: str, value: Any) -> None:
    """Check that an argument is a Python int or float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{op}: {name} is a {type(value).__name__}; give a Python float")


def check_recipe(op: str, recipe: Any) -> None:
    """Raise ValueError unless the recipe is PLAIN_RECIPE ("bf16"), the only recipe of 16-bit calls.

    A public function passes calls with other valid recipes to the operator's class for quantised arguments. So any
    other recipe that arrives here is invalid.
    """
    check_choice(op, "recipe", recipe, (PLAIN_RECIPE,))


def check_activation(op: str, activation: Any, glu_layout: Any) -> None:
    """Raise ValueError if activation or glu_layout does not exist, or if the activation has no gate to lay out.

    Without a gate, glu_layout must be "concat".
    """
    check_choice(op, "activation", activation, ACTIVATIONS)
    check_choice(op, "glu_layout", glu_layout, GLU_LAYOUTS)
    if activation not in GATED and glu_layout != "concat":
        raise ValueError(
            f"{op}: glu_layout is {glu_layout!r}, but activation {activation!r} has no gate to lay out; leave it out"
        )


def check_numbers(op: str, numbers: Numbers) -> None:
    """Check the numbers (limit, alpha, ...) of activations: each is a Python number, not NaN, and within its limits."""
    for (name, number), value in zip(NUMBERS.items(), numbers, strict=True):
        check_number(op, name, value)
        if math.isnan(value):
            raise ValueError(f"{op}: {name} is NaN; give a number")
        if not number.is_valid(value):
            raise ValueError(f"{op}: {name} is {value}; {number.remedy}")
