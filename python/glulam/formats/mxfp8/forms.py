"""Layouts in which kernels read MXFP8 weights, and formats to which GEMMs quantise rows.

Weights: one scale for 32 elements (`Blocks`, `ColumnBlocks`), or one scale a row (`Folded`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...names import Axis, Block
from ..form import Form
from ..scaled import BLOCK, SCALE_DTYPE, Parts, scales_of
from .fold import FOLDED, FoldedWeight, prepare_mxfp8_weight
from .layout import AXES, BLOCK_SIZES, DATA_DTYPE
from .quantize import quantize_mxfp8
from .reference import dequantized, quantize_rows
from .tensor import MXFP8Tensor


@dataclasses.dataclass(frozen=True)
class Blocks(Form):
    """The layout of an MXFP8Tensor that is quantised along rows, with plain scales: one scale for 32 elements."""

    name = "mxfp8"
    kind = MXFP8Tensor
    classes: ClassVar[tuple[Any, ...]] = (MXFP8Tensor,)
    block = multiple = BLOCK
    quantize = staticmethod(quantize_mxfp8)
    ready_as = DATA_DTYPE, 3

    def check(self, op: str, name: str, w: Any) -> None:
        if w.axis != "row" or w.scale_layout != "plain":
            raise ValueError(
                f"{op}: {name} is {w!r}; it must be quantised along its rows, with plain scales, as {name}.plain() has"
            )

    def made(self, parts: Parts, report: bool) -> Parts:
        return self.quantized(parts.data)

    def tensor_of(self, parts: Parts) -> Any:
        data, scale = parts.data.view(DATA_DTYPE), parts.scale.view(SCALE_DTYPE)  # type: ignore[union-attr]
        return MXFP8Tensor.unchecked(data, scale, "row", "1x32", "plain")

    def values(self, parts: Parts, expert: int) -> Tensor:
        assert parts.scale is not None
        return dequantized(parts.data[expert], parts.scale[expert].view(torch.uint8))


@dataclasses.dataclass(frozen=True)
class Folded(Blocks):
    """The layout of a FoldedWeight (`fold.py`): one scale for each row.

    Attributes:
        axis: "row": GEMMs contract over K, in forward. "col": GEMMs contract over N, for data gradients.
    """

    classes = (FoldedWeight, MXFP8Tensor)
    ready_as = DATA_DTYPE, 2

    axis: Axis

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", FOLDED + self.axis)

    def check(self, op: str, name: str, w: Any) -> None:
        if w.__class__ is not FoldedWeight:
            super().check(op, name, w)
        elif w.axis != self.axis:
            raise ValueError(
                f"{op}: {name} is folded along its columns, for the data gradient; give what "
                "prepare_mxfp8_weight(w, axis='row') returns"
            )

    def made(self, parts: Parts, report: bool) -> Parts:
        w, scale, _ = parts
        folded = prepare_mxfp8_weight(w if scale is None else MXFP8Tensor(w, scale), axis=self.axis, report=report)
        return folded.parts

    def tensor_of(self, parts: Parts) -> Any:
        data, scale = parts.data.view(DATA_DTYPE), parts.scale.view(SCALE_DTYPE)  # type: ignore[union-attr]
        return FoldedWeight.unchecked(data, scale, self.axis, None)

    def scale_shape(self, shape: tuple[int, ...], scale: Tensor) -> tuple[int, ...]:
        return shape[:2] if scale.dim() == 2 else super().scale_shape(shape, scale)

    def values(self, parts: Parts, expert: int) -> Tensor:
        assert parts.scale is not None
        data: Tensor = parts.data[expert]
        return data.float() * scales_of(parts.scale[expert].view(torch.uint8))[:, None]


@dataclasses.dataclass(frozen=True)
class ColumnBlocks(Blocks):
    """The layout of a weight for data gradients: transposed, [E, K, N], with one scale for 32 elements along N.

    A data gradient dx = dy w contracts over N.
    """

    name = "mxfp8-col"
    classes = ()

    def made(self, parts: Parts, report: bool) -> Parts:
        return self.quantized([matrix.mT for matrix in parts.data])


BLOCKS, COLUMN_BLOCKS = Blocks(), ColumnBlocks()
FOLDED_ROWS, FOLDED_COLUMNS = map(Folded, AXES)


@dataclasses.dataclass(frozen=True)
class Rows:
    """The format to which GEMMs quantise rows of x or of the activation: E4M3 elements with E8M0 scales.

    Attributes:
        block: "1x32" or "1x128": 32 or 128 elements of a row share a scale.
    """

    block: Block

    def rounded(self, values: Tensor) -> Tensor:
        """Quantise `values` [R, C] to this format and dequantise them again; the result is float32 or float64."""
        data, exponents = quantize_rows(values, BLOCK_SIZES[self.block])
        return dequantized(data, exponents).to(torch.promote_types(values.dtype, torch.float32))


class Columns(Rows):
    """The format of a group's rows in weight gradients, which contract over rows: blocks of 32 lie along columns.

    32 consecutive rows of one column share a scale. Blocks are counted from the group's first row.
    """

    def rounded(self, values: Tensor) -> Tensor:
        return super().rounded(values.mT).mT


BY_32, BY_128 = map(Rows, BLOCK_SIZES)
COLUMNS_BY_32 = Columns("1x32")
