"""quantize_mxfp8: quantise a matrix to MXFP8 along its rows, its columns, or both in one read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from cute_kernels.specs import QUANTIZE_AXES

from ...calls.call import Call
from ...calls.checks import check_x, mismatch
from ...calls.definition import Definition
from ...calls.front import operator
from ...calls.group_checks import count_groups
from ...calls.launch import ResultTensor
from ...choose.problem import Problem
from ...names import Axes, Axis, Block, ScaleLayout
from ..scaled import BLOCK, SCALE_DTYPE, SOURCE_DTYPES
from . import reference
from .layout import BLOCK_SIZES, DATA_DTYPE, GROUP_ALIGNMENT, round_up, scale_shape
from .tensor import MXFP8Copies, MXFP8Tensor, check_form

OP = "quantize_mxfp8"

Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""(shape, dtype) of the data and of the scales of each copy of x, the row copy before the column copy."""


@overload
def quantize_mxfp8(
    x: Tensor, *, axis: Axis = "row", offs: Tensor | None = None, block: Block = "1x32",
    scale_layout: ScaleLayout = "plain", out: MXFP8Tensor | None = None,
) -> MXFP8Tensor: ...  # fmt: skip
@overload
def quantize_mxfp8(
    x: Tensor, *, axis: Literal["both"], offs: Tensor | None = None, block: Block = "1x32",
    scale_layout: ScaleLayout = "plain", out: None = None,
) -> MXFP8Copies: ...  # fmt: skip
def quantize_mxfp8(
    x: Tensor,
    *,
    axis: Axes = "row",
    offs: Tensor | None = None,
    block: Block = "1x32",
    scale_layout: ScaleLayout = "plain",
    out: MXFP8Tensor | Sequence[MXFP8Tensor] | None = None,
) -> MXFP8Tensor | Sequence[MXFP8Tensor]:
    """Quantise x to MXFP8: E4M3 elements, and a power of two for each 32 elements along an axis.

    One kernel does this, and reads x once, for both axes too. A block's scale is the least power of two that is not
    below amax / 448; elements are rounded to nearest even. A NaN makes its block's scale and elements NaN; an Inf makes
    the scale 2^127, so that the dequantised value is infinite, too.

    Groups, with `offs`:
      * If only a row copy is made, groups may begin at any row; offs[-1] is the end of the rows to quantise.
      * If a column copy is made, each group must begin at a multiple of 128 rows of x: group e is the rows from
        offs[e-1], rounded up to a multiple of 128, to offs[e]. The rows from offs[e] to the next multiple of 128 may
        hold anything in x: they count as zeros, and are written as zeros, in both copies. Rows of experts without such
        gaps, as the grouped GEMMs take them, must be moved to such a buffer first.

    Args:
        x: [T, K], bfloat16, float16 or float32; K a multiple of 32. The row stride may exceed K.
        axis: the axis along which a block lies: "row" (along K), "col" (along T) or "both" (a copy of each).
        offs: int32 [E] on x's device, each group's end. Rows after the last group do not affect any result, and their
            rows of the result are not written. None: all rows of x are one group.
        block: "1x32", or "1x128": one scale for 128 elements, written four times.
        scale_layout: "plain", or "swizzled" in atoms of 128 x 4; see MXFP8Tensor. Scales of an atom that lie outside of
            the matrix are 0.
        out: buffers for the result, contiguous: an MXFP8Tensor with this axis, block and layout; for "both" a pair
            (row, col) of MXFP8Tensors. None: new tensors.

    Returns:
        MXFP8Tensor, or MXFP8Copies (row, col) for "both"; `out` if given. Data is [T, K] for either axis. The last
        block along an axis may be shorter than the others.

    Raises:
        ValueError, TypeError: an argument does not fit; nothing was launched.
        GradientNotSupported: grad mode is on and x requires a gradient.
        UnsupportedDevice, BundleError (RuntimeErrors): there is no kernel for this GPU, or no usable bundle.
    """
    buffers = None if out is None else _buffers(axis, block, scale_layout, out)
    tensors = quantize_to(x, axis, offs=offs, block=block, scale_layout=scale_layout, out=buffers)
    if out is not None:
        return out
    make = MXFP8Tensor if is_dynamo_compiling() else MXFP8Tensor.unchecked
    if axis != "both":
        return make(tensors[0], tensors[1], axis, block, scale_layout)
    return MXFP8Copies(
        make(tensors[0], tensors[1], "row", block, scale_layout),
        make(tensors[2], tensors[3], "col", block, scale_layout),
    )


def _buffers(axis: str, block: str, scale_layout: str, out: Any) -> list[Tensor]:
    """Check `out`, and return its tensors: the data and scales of each copy (by rows, by columns).

    `quantize_mxfp8` describes the arguments.
    """
    if out.__class__ is MXFP8Tensor and (out.axis, out.block, out.scale_layout) == (axis, block, scale_layout):
        return [out.data, out.scale]
    check_form(OP, QUANTIZE_AXES, axis, block, scale_layout)
    copies = tuple(out) if axis == "both" and isinstance(out, (tuple, list)) else (out,)
    axes = ("row", "col") if axis == "both" else (axis,)
    if len(copies) != len(axes) or not all(isinstance(copy, MXFP8Tensor) for copy in copies):
        wanted = "a pair (row, col) of MXFP8Tensors" if axis == "both" else "an MXFP8Tensor"
        got = [type(copy).__name__ for copy in copies]
        raise TypeError(f"{OP}: out is {', '.join(got)}; with axis {axis!r} give {wanted}")
    for copy, its_axis in zip(copies, axes, strict=True):
        if (copy.axis, copy.block, copy.scale_layout) != (its_axis, block, scale_layout):
            raise ValueError(
                f"{OP}: out is {copy!r}; it must have axis {its_axis!r}, block {block!r}, {scale_layout!r}"
            )
    return [tensor for copy in copies for tensor in (copy.data, copy.scale)]


def _constants(call: Any) -> dict[str, Any]:
    form = {"wide": int(call.block == "1x128"), "swizzled": int(call.scale_layout == "swizzled")}
    return {**form, "data_dtype": DATA_DTYPE, "scale_dtype": SCALE_DTYPE}


def _sizes(call: Any) -> dict[str, Any]:
    return {str(made.shape): shape for made, (shape, _) in zip(call.result_tensors(), call.shapes(), strict=True)}


def _reference(call: Any, problem: Problem, *results: Tensor) -> None:
    if not problem.rows:
        return
    x, ends = call.x, None if call.offs is None else call.host_ends()
    if ends is not None and call.axis != "row":
        x, ends = reference.padded_groups(x, ends), None
    size, is_swizzled = BLOCK_SIZES[call.block], call.scale_layout == "swizzled"
    for axis, data, scale in zip(call.axes, results[::2], results[1::2], strict=True):
        reference.quantize(x, axis, size, is_swizzled, ends, data, scale)


class QuantizeMxfp8Call(Call):
    """A call of quantize_mxfp8 with plain tensors. `out`: buffers for the data and scales of each copy, or None."""

    explains = True
    op = OP
    definition = Definition(constants=(_constants,), of_rows=(_sizes,), reference=_reference)
    torch_types = {"out": "Tensor(a!)[]"}
    splits = None

    def call_public_operator(self) -> tuple[Tensor, ...]:
        return quantize_to(**self.arguments())

    @property
    def axes(self) -> tuple[str, ...]:
        return ("row", "col") if self.axis == "both" else (self.axis,)

    def check(self) -> Problem:
        rows, columns = check_x(self.op, self.x, SOURCE_DTYPES)
        check_form(self.op, QUANTIZE_AXES, self.axis, self.block, self.scale_layout)
        if columns % BLOCK:
            raise ValueError(
                f"{self.op}: x has {columns} columns; they must be a multiple of {BLOCK}, so pad them with zeros"
            )
        groups = 1
        if self.offs is not None:
            groups = count_groups(self.op, self.offs, None, self.x)
        if self.out is not None:
            self._check_out()
        return self.problem(groups, columns, axis=self.axis)

    def shapes(self) -> Shapes:
        rows, columns = self.x.shape
        return tuple(
            pair
            for axis in self.axes
            for pair in (
                ((rows, columns), DATA_DTYPE),
                (scale_shape(rows, columns, axis, self.scale_layout), SCALE_DTYPE),
            )
        )

    def _check_out(self) -> None:
        """Raise ValueError if the buffers `out` (data and scales of each copy) do not fit x."""
        assert self.out is not None
        for tensor, (shape, _) in zip(self.out, self.shapes(), strict=True):
            if tuple(tensor.shape) != shape:
                mismatch(self.op, "out", tensor.shape, shape, "that is the result's shape")
            if tensor.device != self.x.device:
                raise ValueError(f"{self.op}: out is on {tensor.device} but x is on {self.x.device}; move it there")
            if not tensor.is_contiguous():
                raise ValueError(f"{self.op}: out has strides {tensor.stride()}; data and scales must be contiguous")

    def host_ends(self) -> list[int]:
        """Read back each group's end. For a column copy, raise ValueError if a group ends before its begin.

        A group begins at the next multiple of 128 rows after the previous group.
        """
        ends = super().host_ends()
        for expert, (before, end) in enumerate(zip([0, *ends], ends, strict=False)):
            begin = round_up(before, GROUP_ALIGNMENT)
            if self.axis != "row" and before < end < begin:
                raise ValueError(
                    f"{self.op}: offs[{expert}] is {end}, but by columns that group begins at row {begin}, the next "
                    f"multiple of {GROUP_ALIGNMENT} after the end of the one before, {before}; move the rows of each "
                    "group to such a place first"
                )
        return ends

    def without_rows(self, problem: Problem) -> tuple[Tensor, ...]:
        """Return the results for T = 0. There are no blocks, so nothing is launched and nothing is written."""
        return tuple(self.new_results(problem))

    def result_tensors(self) -> tuple[ResultTensor, ...]:
        names = [f"{axis}_{part}" for axis in self.axes for part in ("data", "scale")]
        return tuple(ResultTensor(name, name, f"{name}_shape", dtype=f"{name[4:]}_dtype") for name in names)

    def new_results(self, problem: Problem) -> list[Any]:
        return super().new_results(problem) if self.out is None else list(self.out)


@operator(QuantizeMxfp8Call)
def quantize_to(
    x: Tensor, axis: str, *, offs: Tensor | None, block: str, scale_layout: str, out: list[Tensor] | None
) -> Any:
    """Quantise as `quantize_mxfp8` does, but take and return plain tensors: data and scales of each copy, row first."""
    raise NotImplementedError  # `front` writes the body


QuantizeMxfp8Call.public = staticmethod(quantize_mxfp8)
