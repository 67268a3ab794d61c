"""MXFP8Tensor: E4M3 elements and E8M0 scales, with the fields that describe their layout."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...calls.checks import check_choice, shape_text
from ...names import Axis, Block, ScaleLayout
from ..scaled import BLOCK, SCALE_DTYPE, Stored
from . import layout
from .layout import BLOCK_SIZES, outer_and_blocks
from .reference import dequantized

LAYOUT_FIELDS = ("axis", "block", "scale_layout")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MXFP8Tensor(Stored):
    """A matrix [T, K], or a batch of them, in MXFP8: E4M3 elements, one E8M0 scale for each 32 elements along an axis.

    The value of an element is its E4M3 number times 2^(scale byte - 127). Leading dimensions, such as E of expert
    weights [E, N, K], count independent matrices.

    Attributes:
        data: [..., T, K] float8_e4m3fn; not transposed for axis "col".
        scale: float8_e8m0fnu. Plain: [..., T, ceil(K/32)] by rows, [..., ceil(T/32), K] by columns. Swizzled:
            [..., atoms * 512], atoms of 128 x 4 scales; see `layout.swizzled`.
        axis: the axis along which elements share a scale: "row" (along K) or "col" (along T).
        block: "1x32", or "1x128" if the four scales of each 128 elements are equal.
        scale_layout: "plain" or "swizzled".

    Raises:
        ValueError, TypeError: data and scale do not fit together.
    """

    data: Tensor
    scale: Tensor
    axis: Axis = "row"
    block: Block = "1x32"
    scale_layout: ScaleLayout = "plain"

    def __post_init__(self) -> None:
        check_form("MXFP8Tensor", layout.AXES, self.axis, self.block, self.scale_layout)
        self.check_parts()
        if self.data.dim() < 2:
            raise ValueError(f"MXFP8Tensor: data has shape {shape_text(self.data.shape)}; give [..., T, K]")
        *batch, rows, columns = self.data.shape
        wanted = (*batch, *layout.scale_shape(rows, columns, self.axis, self.scale_layout))
        if tuple(self.scale.shape) != wanted:
            raise ValueError(
                f"MXFP8Tensor: scale has shape {shape_text(self.scale.shape)}; {self.scale_layout} scales by "
                f"{self.axis} of data {shape_text(self.data.shape)} are {shape_text(wanted)}"
            )

    def form_name(self) -> str:
        return "mxfp8" if self.axis == "row" and self.scale_layout == "plain" else ""

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values in `dtype`.

        They are exact in float32, with one exception: quantising can round the very largest numbers up to 2^128, which
        is above float32's range.
        """
        return self._turned(dequantized(self._turned(self.data), self._scale_bytes())).contiguous().to(dtype)

    def plain(self) -> MXFP8Tensor:
        """Return this tensor with plain scales: itself if its scales are plain, else a new one with the same data."""
        if self.scale_layout == "plain":
            return self
        scale = self._turned(self._scale_bytes()).contiguous().view(SCALE_DTYPE)
        return self._with(scale=scale, scale_layout="plain")

    def swizzled(self) -> MXFP8Tensor:
        """Return this tensor with swizzled scales: itself if its scales are, else a new one with the same data."""
        if self.scale_layout == "swizzled":
            return self
        return self._with(scale=layout.swizzled(self._scale_bytes()).view(SCALE_DTYPE), scale_layout="swizzled")

    def _turned(self, matrix: Tensor) -> Tensor:
        """Transpose the matrix if this is quantised along columns, so that blocks lie along rows. Its own inverse."""
        return matrix if self.axis == "row" else matrix.mT

    def _scale_bytes(self) -> Tensor:
        """Return the scales as plain uint8 [..., outer, blocks]; `layout.py` defines these dimensions."""
        scales = self.scale.view(torch.uint8)
        if self.scale_layout == "plain":
            return self._turned(scales)
        rows, columns = self.shape[-2:]
        return layout.unswizzled(scales, *outer_and_blocks(rows, columns, self.axis))

    def group(self, index: int, offs: Tensor | Sequence[int]) -> MXFP8Tensor:
        """Return the rows of one group as an MXFP8Tensor. Its data and, if the scales allow it, its scales are views.

        Axis "row": groups follow each other without gaps. With swizzled scales, a group can be cut out only if it
        begins at a multiple of 128 rows, or is empty. Axis "col": groups begin at multiples of 128 rows
        (`quantize_mxfp8`).

        Args:
            index: number of the group.
            offs: each group's end. A tensor on a GPU is read back, so it cannot be used under CUDA graph capture.

        Raises:
            IndexError: there is no such group.
            TypeError: index is not an integer, or offs are not integers.
            ValueError: this is a batch of matrices; or the group cannot be cut out, or ends outside of data.
        """
        if self.data.dim() != 2:
            raise ValueError(f"group: data has shape {shape_text(self.shape)}; take one matrix of it, as tensor[0]")
        try:
            index = operator.index(index)
        except TypeError:
            raise TypeError(f"group: index is {index!r:.60}; give an integer") from None
        try:
            ends = [operator.index(end) for end in (offs.tolist() if isinstance(offs, Tensor) else offs)]
        except TypeError:
            raise TypeError(f"group: offs is {offs!r:.60}; give a tensor int32 [E] or a list of integers") from None
        if not 0 <= index < len(ends):
            raise IndexError(f"group: index is {index}, but there are {len(ends)} groups")
        before = ends[index - 1] if index else 0
        begin = before if self.axis == "row" else layout.round_up(before, layout.GROUP_ALIGNMENT)
        end = max(begin, ends[index])
        if not 0 <= begin <= end <= self.shape[0] and end > begin:
            raise ValueError(f"group: group {index} is rows {begin} to {end}, but data has {self.shape[0]}")
        if end == begin:
            begin = end = 0
        return self._with(data=self.data[begin:end], scale=self._scales_of_rows(begin, end))

    def _scales_of_rows(self, begin: int, end: int) -> Tensor:
        if self.scale_layout == "plain":
            size = 1 if self.axis == "row" else BLOCK
            return self.scale[begin // size : -(-end // size)]
        if self.axis == "row" and begin % layout.ATOM_OUTER:
            raise ValueError(
                f"group: the group begins at row {begin}, inside a 128-row atom of swizzled scales; call .plain() first"
            )
        rows, columns = self.shape
        blocks = outer_and_blocks(rows, columns, self.axis)[1]
        atoms = self.scale.view(torch.uint8).view(-1, -(-blocks // layout.ATOM_BLOCKS), layout.ATOM)
        size = layout.ATOM_OUTER  # and by columns four blocks of 32 rows
        part = slice(begin // size, -(-end // size))
        return (atoms[part] if self.axis == "row" else atoms[:, part]).reshape(-1).view(SCALE_DTYPE)

    def __getitem__(self, index: int) -> MXFP8Tensor:
        """Return a view of one entry of the first dimension, such as an expert's matrix of [E, N, K]."""
        if self.data.dim() < 3:
            raise IndexError("MXFP8Tensor: a single matrix has no leading dimension to index; see group()")
        return self._with(data=self.data[index], scale=self.scale[index])


class MXFP8Copies(NamedTuple):
    """One matrix in two copies, quantised along rows and along columns. Both are made from the original values."""

    row: MXFP8Tensor
    col: MXFP8Tensor


torch.serialization.add_safe_globals([MXFP8Copies])


def check_form(op: str, axes: Sequence[str], axis: Any, block: Any, scale_layout: Any) -> None:
    """Raise ValueError if `axis` is not in `axes`, or if there is no such block or scale layout."""
    check_choice(op, "axis", axis, axes)
    check_choice(op, "block", block, tuple(BLOCK_SIZES))
    check_choice(op, "scale_layout", scale_layout, layout.SCALE_LAYOUTS)
