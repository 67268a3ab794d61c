"""Checks of weights, biases and buffers for weight gradients: packed tensors [E, ...], lists of E tensors, GateUps.

In signatures, `op` is the operator's name and `name` the argument's name, both for errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cute_kernels.specs import GATED

from ..activations import INTERLEAVED32_BLOCK
from ..host.experts import ExpertList, GateUp
from ..host.groups import leading
from .checks import (
    ALIGNMENT_ELEMENTS,
    check_contiguous,
    check_is_tensor,
    check_like_x,
    check_width,
    mismatch,
    runs_kernels,
    shape_text,
)
from .memory import ALIGNMENT_BYTES, check_disjoint


def check_experts(op: str, name: str, value: Any, x: Tensor, letters: str, wide: bool = False) -> tuple[int, ...]:
    """Check experts' tensors, packed [E, ...] or a list of E tensors; return the packed shape.

    Args:
        op, name: the operator and the argument, for errors.
        value: the argument.
        x: the leading operand; experts must have its dtype and device.
        letters: names of the packed dimensions, for example "E 2I H".
        wide: True: float32 is also allowed if x is 16-bit.
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
    """Check the shape, dtype, device and strides of a packed tensor of experts, or of one expert's tensor of a list.

    Args:
        op, name: the operator and the argument, for errors.
        tensor: the tensor.
        x: the leading operand.
        dims: the names of the tensor's dimensions.
        is_weight: True: a weight or weight gradient. False: a bias.
        wide: True: float32 is also allowed if x is 16-bit.
    """
    if tensor.dim() != len(dims):
        raise ValueError(f"{op}: {name} has shape {shape_text(tensor.shape)}; give {shape_text(dims)}")
    check_like_x(op, name, tensor, x, wide)
    if empty := next((dim for dim, size in zip(dims, tensor.shape, strict=True) if not size and dim != "E"), None):
        raise ValueError(f"{op}: {name} has shape {shape_text(tensor.shape)}, so {empty} = 0; give at least one")
    if is_weight and not name.startswith("out"):
        _refuse_transposed(op, name, tensor)
    check_contiguous(op, name, tensor)
    # torch calls a tensor contiguous whatever the stride of a dimension with one element; kernels divide it by `unit`.
    unit = min(ALIGNMENT_ELEMENTS, ALIGNMENT_BYTES // tensor.itemsize)
    if is_weight and runs_kernels(tensor) and any(stride % unit for stride in tensor.stride()[:-1]):
        raise ValueError(
            f"{op}: {name} has strides {shape_text(tensor.stride())}; all but the last must be multiples of "
            f"{unit}, so rebuild the view, as {name}.flatten().view({name}.shape) does"
        )


def _refuse_transposed(op: str, name: str, weights: Tensor) -> None:
    """Raise ValueError if weights are a transposed view.

    The error does not advise .contiguous(), which keeps the view's values: a caller who passes w.mT, as to torch's
    grouped_mm, means the product that takes w itself here, and could get a wrong result without an error.
    """
    if not weights.is_contiguous() and weights.mT.is_contiguous():
        raise ValueError(
            f"{op}: {name} is a transposed view (strides {shape_text(weights.stride())}); give the tensor without .mT: "
            "as it is where torch's grouped_mm takes its .mT, since rows are multiplied by an expert's transpose here, "
            "or with transpose_w=True where its experts are [inputs, outputs]"
        )


def check_halves(op: str, name: str, value: GateUp, x: Tensor, letters: str) -> tuple[int, ...]:
    """Check a GateUp; return the shape that its gate and up have in common. `letters`: their dimensions, as "E I H"."""
    for part, tensor in value._asdict().items():
        check_is_tensor(op, f"{name}.{part}", tensor, f"a tensor {shape_text(letters.split())}")
    gate, up = (check_experts(op, f"{name}.{part}", one, x, letters) for part, one in value._asdict().items())
    if gate != up:
        mismatch(op, f"{name}.up", up, gate, f"that is the shape of {name}.gate")
    return gate


def check_contraction(
    op: str, name: str, shape: tuple[int, ...], columns: int, transpose_w: bool, over_rows: bool
) -> int:
    """Check that the leading operand [T, columns] fits the experts' weights; return the product's width, N or K.

    Args:
        op, name: the operator and the weight, for errors.
        shape: the weight's shape [E, N, K].
        columns: columns of the leading operand.
        transpose_w: the call's argument, only for the error's advice.
        over_rows: True: the product is x w_e; `columns` must be N, and K is returned. False: the product is x w_e^T;
            `columns` must be K, and N is returned.
    """
    experts, n, k = shape
    contracted, width = (n, k) if over_rows else (k, n)
    if contracted != columns:
        wanted = (experts, columns, k) if over_rows else (experts, n, columns)
        other = f", or give transpose_w={not transpose_w}" if width == columns else ""
        mismatch(op, name, shape, wanted, f"{leading(op)} has {columns} columns{other}")
    return width


def check_bias(op: str, name: str, bias: Any, x: Tensor, experts: int, width: int) -> None:
    """Check biases: packed [E, width], or a list of E [width]. None is allowed: no bias."""
    if bias is None:
        return
    shape = check_experts(op, name, bias, x, "E N")
    if shape != (experts, width):
        mismatch(op, name, shape, (experts, width), "there is one bias for each expert and weight row")


def check_gradient_buffers(op: str, out: Any, x: Tensor, shape: tuple[int, int, int]) -> None:
    """Check buffers for weight gradients: packed [E, N, K], or a list of E [N, K] that do not overlap.

    The dtype must be x's, or float32 if x is 16-bit.
    """
    got = check_experts(op, "out", out, x, "E N K", wide=True)
    if got != shape:
        mismatch(op, "out", got, shape, "that is the result's shape")
    if isinstance(out, (list, tuple)):
        if other := next((tensor.dtype for tensor in out if tensor.dtype != out[0].dtype), None):
            raise TypeError(f"{op}: out holds {out[0].dtype} and {other}; give all experts one dtype")
        check_disjoint(op, out)


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
        (E, rows of an expert, I). An expert has 2I rows, or I without a gate.
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
    """Raise ValueError unless the options allow w1 as a GateUp: a gated activation, "concat", no transpose_w."""
    if activation not in GATED:
        raise ValueError(
            f"{op}: w1 is a GateUp, but activation {activation!r} has no gate; give w1 as one tensor [E, I, H]"
        )
    if glu_layout != "concat":
        raise ValueError(f"{op}: w1 is a GateUp, in two halves, and glu_layout is {glu_layout!r}; leave it out")
    if transpose_w:
        raise ValueError(f"{op}: w1 is a GateUp, which is not transposed; leave out transpose_w, or give one tensor")


def intermediate_width(op: str, name: str, rows: int, activation: str, glu_layout: str, of: str = "rows") -> int:
    """Return I: the number of w1's rows, or half of it if the activation has a gate.

    Args:
        op, name: the operator and the weight, for errors.
        rows: the number of rows of an expert's w1.
        activation, glu_layout: the call's options.
        of: how errors call the rows.

    Raises:
        ValueError: rows do not fit activation and glu_layout.
    """
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
