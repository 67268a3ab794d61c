"""Checks of arguments, the same for every device; errors name the argument, the value received and the value needed.

The checks read only metadata (shapes, dtypes, devices, strides), so they also work on the fake tensors of a trace;
`memory` checks memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from cute_kernels.formulas import NUMBERS
from cute_kernels.specs import ACTIVATIONS, GATED, GLU_LAYOUTS

from ..activations import INTERLEAVED32_BLOCK, Numbers
from ..errors import GradientNotSupported
from ..host import device as gpus
from ..host.experts import ExpertList, GateUp
from ..host.groups import leading
from .memory import ALIGNMENT_BYTES as ALIGNMENT_BYTES
from .memory import LOWEST_ADDRESS as LOWEST_ADDRESS
from .memory import check_alignment as check_alignment
from .memory import check_disjoint
from .memory import check_no_overlap as check_no_overlap
from .memory import check_plain as check_plain
from .memory import extent as extent
from .memory import is_transformed as is_transformed
from .memory import tensors_of as tensors_of

MAX_ROWS = 2**26
ALIGNMENT_ELEMENTS = 8  # 16-bit elements in 16 bytes: TMA needs row strides that are multiples
KERNEL_DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
REFERENCE_DTYPES = (*KERNEL_DTYPES, torch.float32, torch.float64)
SPLITS_DTYPES = (torch.int32, torch.int64)
PLAIN_RECIPE = "bf16"
"""The name of the recipe that quantises nothing."""

Experts = Tensor | Sequence[Tensor] | ExpertList
"""Experts' tensors: packed, or a sequence with one tensor an expert; an ExpertList is such a sequence after its checks.
A GateUp is a sequence of two."""


def runs_kernels(x: Tensor) -> bool:
    """Return True if calls with this tensor are computed by kernels, not by the CPU reference."""
    return x.device.type == gpus.KERNEL_DEVICE


def shape_text(shape: Sequence[Any]) -> str:
    """Return a shape as text, for example "[8, 2I, H]"."""
    return f"[{', '.join(map(str, shape))}]"


def mismatch(op: str, name: str, shape: Sequence[Any], wanted: Sequence[Any], why: str) -> NoReturn:
    """Raise ValueError for a wrong shape. `why`: the reason for the wanted shape."""
    raise ValueError(f"{op}: {name} has shape {shape_text(shape)}; it must be {shape_text(wanted)}, since {why}")


def any_requires_grad(*arguments: Any) -> bool:
    """Return True if an argument, or a tensor in a list, requires a gradient. Non-tensors are refused elsewhere."""
    for argument in arguments:
        for one in argument if isinstance(argument, (list, tuple)) else (argument,):
            if getattr(one, "requires_grad", False):
                return True
    return False


def refuse_gradients(op: str, **arguments: Any) -> None:
    """Raise GradientNotSupported if an argument requires a gradient: for operators without one, if grad mode is on."""
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
    """Raise GradientNotSupported if `out` is given: autograd, which will record a gradient, sees no writes to it."""
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
    """Return `value` if it is a tensor of any kind, else raise TypeError. `what`: the error asks for this."""
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
    _check_contiguous(op, name, tensor)
    return tensor


def _same_device(op: str, name: str, tensor: Tensor | ExpertList, x: Tensor) -> None:
    """Raise ValueError unless a tensor is on x's device."""
    if tensor.device != x.device:
        of = leading(op)
        raise ValueError(f"{op}: {name} is on {tensor.device} but {of} is on {x.device}; move it to {x.device}")


def check_like_x(op: str, name: str, tensor: Tensor | ExpertList, x: Tensor, wide: bool = False) -> None:
    """Check that a tensor has x's dtype and device; with `wide`, float32 is allowed if x is 16-bit."""
    valid = gradient_dtypes(x) if wide else (x.dtype,)
    if tensor.dtype not in valid:
        of, dtypes = leading(op), " or ".join(map(str, valid))
        raise TypeError(f"{op}: {name} is {tensor.dtype} but {of} is {x.dtype}; it must be {dtypes}, so cast it")
    _same_device(op, name, tensor, x)


def _remedy(name: str) -> str:
    """Return the error's advice on how to get a contiguous tensor; for an output, a copy would not be written."""
    return "give a buffer that is" if name.startswith("out") else "call .contiguous()"


def _check_contiguous(op: str, name: str, tensor: Tensor) -> None:
    """Raise ValueError unless a tensor is contiguous."""
    if not tensor.is_contiguous():
        strides = shape_text(tensor.stride())
        raise ValueError(f"{op}: {name} is not contiguous (strides {strides}); {_remedy(name)}")


def _refuse_transposed(op: str, name: str, weights: Tensor) -> None:
    """Raise ValueError if weights are a transposed view: a contiguous copy may not be the matrix the caller means."""
    if not weights.is_contiguous() and weights.mT.is_contiguous():
        raise ValueError(
            f"{op}: {name} is a transposed view (strides {shape_text(weights.stride())}); give the tensor without .mT: "
            "as it is where torch's grouped_mm takes its .mT, since rows are multiplied by an expert's transpose here, "
            "or with transpose_w=True where its experts are [inputs, outputs]"
        )


def gradient_dtypes(x: Tensor) -> tuple[torch.dtype, ...]:
    """Return the dtypes that gradients of weights may have: x's, and float32 if x is 16-bit."""
    return (x.dtype, torch.float32) if x.dtype.itemsize == 2 else (x.dtype,)


def check_out_dtype(op: str, dtype: Any, x: Tensor) -> None:
    """Check that `dtype` is None, x's dtype, or, if x is 16-bit, float32."""
    if dtype is not None and dtype not in gradient_dtypes(x):
        valid = " or ".join(map(str, gradient_dtypes(x)))
        raise TypeError(f"{op}: out_dtype is {dtype}; it must be {valid}")


def check_x(op: str, x: Any, dtypes: tuple[torch.dtype, ...] | None = None) -> tuple[int, int]:
    """Check the leading operand (x, or the argument that leads instead) and return its T and K.

    Args:
        op: the operator.
        x: [T, K].
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
    """Check a matrix dimension: positive, and on a GPU a multiple of 8."""
    if width == 0:
        raise ValueError(f"{op}: {name} has a dimension of 0 elements; give at least one")
    if on_gpu and width % ALIGNMENT_ELEMENTS:
        raise ValueError(
            f"{op}: {name} has a dimension of {width} elements; it must be a positive multiple of "
            f"{ALIGNMENT_ELEMENTS} (16 bytes), so pad it with zeros"
        )


def _check_rows(op: str, name: str, matrix: Tensor) -> None:
    """Check that a matrix's rows are dense and do not overlap; on a GPU also that they are 16-byte multiples apart."""
    rows, width = matrix.shape
    stride, inner = matrix.stride()
    if inner != 1 and width > 1:
        raise ValueError(f"{op}: {name} has stride {inner} along its rows; it must be 1, so {_remedy(name)}")
    if isinstance(rows, int) and rows <= 1:
        return
    if stride < width:
        raise ValueError(f"{op}: {name} has rows of {width} elements only {stride} apart; they must not overlap")
    if runs_kernels(matrix) and stride % ALIGNMENT_ELEMENTS:
        raise ValueError(
            f"{op}: {name} has rows {stride} elements apart; the distance must be a multiple of {ALIGNMENT_ELEMENTS} "
            f"(16 bytes), so pad the rows or {_remedy(name)}"
        )


def check_rows_like(op: str, name: str, matrix: Any, x: Tensor, columns: int | None, why: str) -> int:
    """Check a matrix [T, columns] with x's T, dtype and device, and return its columns. columns None: any number."""
    matrix = check_is_tensor(op, name, matrix, "a tensor [T, columns]")
    check_like_x(op, name, matrix, x)
    if matrix.dim() != 2 or matrix.shape[0] != x.shape[0] or columns not in (None, matrix.shape[1]):
        mismatch(op, name, matrix.shape, (x.shape[0], "columns" if columns is None else columns), why)
    width = int(matrix.shape[1])
    check_width(op, name, width, runs_kernels(x))
    _check_rows(op, name, matrix)
    return width


def check_experts(op: str, name: str, value: Any, x: Tensor, letters: str, wide: bool = False) -> tuple[int, ...]:
    """Check experts' tensors, packed [E, ...] or a list of E, and return the packed shape.

    Args:
        op, name: the operator and the argument, for errors.
        value: the argument.
        x: the leading operand; experts must have its dtype and device.
        letters: names of the packed dimensions, for example "E 2I H".
        wide: float32 is also allowed if x is 16-bit.
    """
    if isinstance(value, ExpertList):
        check_like_x(op, name, value, x, wide)
        return tuple(value.shape[1:])
    dims = letters.split()
    packed, one = shape_text(dims), shape_text(dims[1:])
    if not isinstance(value, (list, tuple)):
        tensor = check_is_tensor(op, name, value, f"a tensor {packed} or a list of E tensors {one}")
        _check_expert(op, name, tensor, x, dims, is_weight=len(dims) == 3, wide=wide)
        if tensor.shape[0] == 0:
            raise ValueError(f"{op}: {name} has 0 experts (E = 0); give at least one")
        return tuple(tensor.shape)
    if not value:
        raise ValueError(f"{op}: {name} is an empty list (E = 0); give at least one expert")
    for index, tensor in enumerate(value):
        label = f"{name}[{index}]"
        _check_expert(
            op, label, check_is_tensor(op, label, tensor, f"a tensor {one}"), x, dims[1:], len(dims) == 3, wide
        )
        if tensor.shape != value[0].shape:
            raise ValueError(
                f"{op}: {label} has shape {shape_text(tensor.shape)} but {name}[0] has {shape_text(value[0].shape)}; "
                "all experts have one shape"
            )
    return (len(value), *value[0].shape)


def _check_expert(
    op: str, name: str, tensor: Tensor, x: Tensor, dims: Sequence[str], is_weight: bool, wide: bool
) -> None:
    """Check a packed tensor, or a tensor of a list. `dims`: the names of its dimensions."""
    if tensor.dim() != len(dims):
        raise ValueError(f"{op}: {name} has shape {shape_text(tensor.shape)}; give {shape_text(dims)}")
    check_like_x(op, name, tensor, x, wide)
    if empty := next((dim for dim, size in zip(dims, tensor.shape, strict=True) if not size and dim != "E"), None):
        raise ValueError(f"{op}: {name} has shape {shape_text(tensor.shape)}, so {empty} = 0; give at least one")
    if is_weight and not name.startswith("out"):
        _refuse_transposed(op, name, tensor)
    _check_contiguous(op, name, tensor)
    # torch calls a tensor contiguous whatever the stride of a dimension with one element; kernels divide it by `unit`.
    unit = min(ALIGNMENT_ELEMENTS, ALIGNMENT_BYTES // tensor.itemsize)
    if is_weight and runs_kernels(tensor) and any(stride % unit for stride in tensor.stride()[:-1]):
        raise ValueError(
            f"{op}: {name} has strides {shape_text(tensor.stride())}; all but the last must be multiples of "
            f"{unit}, so rebuild the view, as {name}.flatten().view({name}.shape) does"
        )


def check_halves(op: str, name: str, value: GateUp, x: Tensor, letters: str) -> tuple[int, ...]:
    """Check a GateUp and return the shape of either tensor. `letters`: names of the dimensions, as "E I H"."""
    for part, tensor in value._asdict().items():
        check_is_tensor(op, f"{name}.{part}", tensor, f"a tensor {shape_text(letters.split())}")
    gate, up = (check_experts(op, f"{name}.{part}", one, x, letters) for part, one in value._asdict().items())
    if gate != up:
        mismatch(op, f"{name}.up", up, gate, f"that is the shape of {name}.gate")
    return gate


def check_contraction(
    op: str, name: str, shape: tuple[int, ...], columns: int, transpose_w: bool, over_rows: bool
) -> int:
    """Check that [T, columns] can be multiplied with an expert's weight, and return the columns of the product.

    Args:
        op, name: the operator and the weight, for errors.
        shape: [E, N, K].
        columns: columns of the leading operand.
        transpose_w: the call's argument, for the error's advice.
        over_rows: True: rows are multiplied with w_e; False: with its transpose.
    """
    experts, n, k = shape
    contracted, width = (n, k) if over_rows else (k, n)
    if contracted != columns:
        wanted = (experts, columns, k) if over_rows else (experts, n, columns)
        other = f", or give transpose_w={not transpose_w}" if width == columns else ""
        mismatch(op, name, shape, wanted, f"{leading(op)} has {columns} columns{other}")
    return width


def check_bias(op: str, name: str, bias: Any, x: Tensor, experts: int, width: int) -> None:
    """Check biases [E, width], packed or a list. None: no bias, allowed."""
    if bias is None:
        return
    shape = check_experts(op, name, bias, x, "E N")
    if shape != (experts, width):
        mismatch(op, name, shape, (experts, width), "there is one bias for each expert and weight row")


def check_gradient_buffers(op: str, out: Any, x: Tensor, shape: tuple[int, int, int]) -> None:
    """Check buffers of weight gradients [E, N, K], packed or a list of E: x's dtype, or float32 if x is 16-bit."""
    got = check_experts(op, "out", out, x, "E N K", wide=True)
    if got != shape:
        mismatch(op, "out", got, shape, "that is the result's shape")
    if isinstance(out, (list, tuple)):
        if other := next((tensor.dtype for tensor in out if tensor.dtype != out[0].dtype), None):
            raise TypeError(f"{op}: out holds {out[0].dtype} and {other}; give all experts one dtype")
        check_disjoint(op, out)


def _check_numbers(
    op: str, name: str, value: Any, what: str, x: Tensor, dtypes: Sequence[torch.dtype], count: int | None, why: str,
    cast: str = "cast it",
) -> Tensor:  # fmt: skip
    """Check a contiguous tensor of numbers on x's device and return it.

    Args:
        op, name: the operator and the argument, for errors.
        value: the argument.
        what: the error asks for this if `value` is not a tensor.
        x: a tensor on the required device.
        dtypes: the allowed dtypes.
        count: the required number of elements of a vector. None: any shape.
        why: the error's reason for the count.
        cast: the error's advice for a wrong dtype.
    """
    shape = None if count is None else (count,)
    tensor = check_tensor(op, name, value, what, dtypes=dtypes, cast=cast, shape=shape, why=why)
    _same_device(op, name, tensor, x)
    return tensor


def check_scale(op: str, name: str, scale: Any, x: Tensor) -> None:
    """Check a scale [T] in float32, or also float64 if x is float64. None: no scale, allowed."""
    if scale is not None:
        dtypes = (torch.float32, torch.float64) if x.dtype == torch.float64 else (torch.float32,)
        why = f"it holds a number for each row of {leading(op)}"
        _check_numbers(op, name, scale, "a float32 tensor [T]", x, dtypes, x.shape[0], why, "call .float()")


def check_indices(op: str, rows: Any, x: Tensor, name: str = "rows", of: str = "x", count: int | None = None) -> None:
    """Check indices, int32 [T]: row t of an operand is x[rows[t]]. The values are not checked.

    Args:
        op: the operator.
        rows: the indices. None: no indices, allowed.
        x: the matrix whose rows are selected.
        name: the indices' name in errors.
        of: x's name in errors.
        count: T. None: any number.
    """
    if rows is None:
        return
    why = "the other operand has so many rows"
    rows = _check_numbers(op, name, rows, "an int32 tensor [T]", x, (torch.int32,), count, why)
    if rows.dim() != 1:
        raise ValueError(f"{op}: {name} has shape {shape_text(rows.shape)}; give [T]")
    if rows.shape[0] and not x.shape[0]:
        raise ValueError(f"{op}: {name} has {rows.shape[0]} indices, but {of} has no row")


def check_mask(op: str, mask: Any, x: Tensor, experts: int) -> None:
    """Check a mask, bool [E], on x's device. None: no mask, allowed."""
    if mask is not None:
        why, cast = "there is one flag for each expert", "cast it: whether to add to each group's out"
        _check_numbers(op, "mask", mask, "a bool tensor [E]", x, (torch.bool,), experts, why, cast)


def count_groups(op: str, offs: Any, splits: Any, x: Tensor) -> int:
    """Check group sizes and return E, for operators in which no other argument has E."""
    groups = offs if splits is None else splits
    count = len(groups) if isinstance(groups, (list, tuple)) else 0
    if isinstance(groups, Tensor) and groups.dim():
        count = int(groups.shape[0])
    check_groups(op, offs, splits, x, count)
    if not count:
        raise ValueError(f"{op}: {'offs' if splits is None else 'splits'} has 0 groups (E = 0); give at least one")
    return count


def check_groups(
    op: str, offs: Any, splits: Any, x: Tensor, experts: int, counted: str = "", name: str = "offs"
) -> None:
    """Check that exactly one of offs and splits is given, for `experts` groups. The values are not checked.

    Args:
        op: the operator.
        offs, splits: the group sizes.
        x: the leading operand.
        experts: E.
        counted: the argument that has E experts, for errors. Empty: E comes from the groups themselves.
        name: the name of offs in errors.
    """
    if (offs is None) == (splits is None):
        got = "neither offs nor splits" if offs is None else "both offs and splits"
        raise ValueError(f"{op}: got {got}; give offs (cumulative ends, int32 [E]) or splits (row counts), not both")
    why = "there is one number for each expert" + (f" of {counted}" if counted else "")
    if splits is None:
        _check_numbers(op, name, offs, "a tensor [E]", x, (torch.int32,), experts, why)
    elif isinstance(splits, (list, tuple)):
        if len(splits) != experts:
            mismatch(op, "splits", (len(splits),), (experts,), why)
    else:
        on_host = isinstance(splits, Tensor) and splits.device.type == "cpu"
        like = splits if on_host else x
        _check_numbers(op, "splits", splits, "a tensor [E] or a list", like, SPLITS_DTYPES, experts, why)


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
    """Check that the recipe is PLAIN_RECIPE, for code in 16 bits: calls with other recipes were diverted before."""
    check_choice(op, "recipe", recipe, (PLAIN_RECIPE,))


def check_activation(op: str, activation: Any, glu_layout: Any) -> None:
    """Raise ValueError unless the activation exists and the layout of gates fits it."""
    check_choice(op, "activation", activation, ACTIVATIONS)
    check_choice(op, "glu_layout", glu_layout, GLU_LAYOUTS)
    if activation not in GATED and glu_layout != "concat":
        raise ValueError(
            f"{op}: glu_layout is {glu_layout!r}, but activation {activation!r} has no gate to lay out; leave it out"
        )


def check_numbers(op: str, numbers: Numbers) -> None:
    """Check the numbers of all formulas: Python numbers, not NaN, and within each number's limits."""
    for (name, number), value in zip(NUMBERS.items(), numbers, strict=True):
        check_number(op, name, value)
        if math.isnan(value):
            raise ValueError(f"{op}: {name} is NaN; give a number")
        if not number.is_valid(value):
            raise ValueError(f"{op}: {name} is {value}; {number.remedy}")


def check_w1(
    op: str, w1: Any, x: Tensor, activation: str, glu_layout: str, transpose_w: bool
) -> tuple[int, int, int]:  # fmt: skip
    """Check w1 against x, which has H columns.

    Args:
        op: the operator.
        w1: [E, 2I, H], or [E, I, H] without a gate; with `transpose_w` [E, H, 2I] or [E, H, I]; or a GateUp of two
            tensors [E, I, H].
        x: the leading operand.
        activation, glu_layout, transpose_w: the call's options.

    Returns:
        E; 2I, or I without a gate; I.
    """
    columns, in_halves = x.shape[1], isinstance(w1, GateUp)
    name = "w1.gate" if in_halves else "w1"
    if in_halves:
        _check_goes_in_halves(op, activation, glu_layout, transpose_w)
        shape = check_halves(op, "w1", w1, x, "E I H")
    else:
        shape = check_experts(op, "w1", w1, x, "E H 2I" if transpose_w else "E 2I H")
    experts, rows, hidden = (shape[0], shape[2], shape[1]) if transpose_w else shape
    if hidden != columns:
        wanted = (experts, columns, rows) if transpose_w else (experts, rows, columns)
        other = f", or give transpose_w={not transpose_w}" if rows == columns and not in_halves else ""
        mismatch(op, name, shape, wanted, f"x has {columns} columns{other}")
    rows = 2 * rows if in_halves else rows
    width = intermediate_width(op, "w1", rows, activation, glu_layout, "columns" if transpose_w else "rows")
    check_width(op, "w1 (I)", width, runs_kernels(x))
    return experts, rows, width


def _check_goes_in_halves(op: str, activation: str, glu_layout: str, transpose_w: bool) -> None:
    """Raise ValueError unless the options allow w1 to be a GateUp."""
    if activation not in GATED:
        raise ValueError(
            f"{op}: w1 is a GateUp, but activation {activation!r} has no gate; give w1 as one tensor [E, I, H]"
        )
    if glu_layout != "concat":
        raise ValueError(f"{op}: w1 is a GateUp, in two halves, and glu_layout is {glu_layout!r}; leave it out")
    if transpose_w:
        raise ValueError(f"{op}: w1 is a GateUp, which is not transposed; leave out transpose_w, or give one tensor")


def intermediate_width(op: str, name: str, rows: int, activation: str, glu_layout: str, of: str = "rows") -> int:
    """Return I: w1's rows, or half of them if the activation has a gate. `of`: the rows' name in errors."""
    if activation not in GATED:
        return rows
    if rows % 2:
        raise ValueError(
            f"{op}: {name} has {rows} {of} an expert; {activation} has a gate, so it needs 2I, an even number"
        )
    width = rows // 2
    if glu_layout == "interleaved32" and width % INTERLEAVED32_BLOCK:
        raise ValueError(
            f"{op}: {name} has 2I = {rows} {of} an expert, so I = {width}; glu_layout 'interleaved32' needs I to be a "
            f"multiple of {INTERLEAVED32_BLOCK}; use another layout or pad I with zeros"
        )
    return width
