"""Forms: the layouts in which kernels read weights, and the conversion of callers' weights to these layouts.

Each layout is a subclass of `Form`. A weight is passed as `scaled.Parts`: data, scales, and in some formats a third
tensor. If a weight already has the layout, kernels read it directly. Other weights (in 16 bits, or in another layout)
are first "prepared", that is, converted to the layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from ..host.experts import GateUp
from .scaled import SOURCE_DTYPES, Parts, Scaled


class Form:
    """The layout in which a recipe's kernels read weights [E, N, K] of one format.

    Attributes:
        name: the form's name. Tensors that kernels read without preparation have this name as their
            `Scaled.reads_as`.
        kind: the class of the quantised tensors in this format, such as MXFP8Tensor.
        classes: all classes of quantised tensors that operators accept for this form, besides weights in 16 bits.
        multiple: K must be a multiple of this.
        block: number of elements of a row that share a scale.
        elements: number of elements in one entry of `kind`'s data: 2 if a byte holds two.
        quantize: function that makes a `kind` from one or several matrices in 16 bits or float32.
        ready_as: (dtype of data, number of dimensions of scale) of parts that kernels can read without preparation.
    """

    name: ClassVar[str]
    kind: ClassVar[type[Scaled]]
    classes: ClassVar[tuple[type[Scaled], ...]]
    multiple: ClassVar[int]
    block: ClassVar[int]
    elements: ClassVar[int] = 1
    quantize: ClassVar[Callable[..., Any]]
    ready_as: ClassVar[tuple[torch.dtype, int]]

    def check(self, op: str, name: str, w: Any) -> None:
        """Raise ValueError if `w`, a quantised tensor of one of `classes`, has a layout that this form cannot take."""

    def is_ready(self, parts: Parts) -> bool:
        """Return True if kernels can read these parts without preparation."""
        return parts.scale is not None and (parts.data.dtype, parts.scale.dim()) == self.ready_as

    def has_values(self, parts: Parts) -> bool:
        """Return True if the method `values` can dequantise these parts for the CPU reference."""
        return self.is_ready(parts)

    def made(self, parts: Parts, report: bool) -> Parts:
        """Prepare a weight: convert parts that kernels cannot read to parts that they can read.

        Args:
            parts: the weight's parts, in 16 bits or in another layout.
            report: True: raise FoldError if folding (`mxfp8.fold`) would change values too much.
        """
        raise NotImplementedError

    def of_gate(self, num_rows: int) -> Form:
        """Return the form with which to quantise a gated 16-bit w1 of I gate rows followed by I up-projection rows.

        A format with blocks of several rows needs another form if a block would hold rows of both halves. By default
        this method returns the form itself.

        Args:
            num_rows: the number of w1's rows, 2I.
        """
        return self

    def check_fit(self, op: str, name: str, parts: Parts, shape: tuple[int, ...], is_concatenated: bool) -> None:
        """Raise ValueError or TypeError if the scales or the third tensor do not fit a weight of this shape.

        Args:
            op, name: the operator and the argument, for messages.
            parts: the weight's parts.
            shape: [E, N, K].
            is_concatenated: True: the first half of the rows is the gate, and the second half the up-projection.
        """

    def tensor_of(self, parts: Parts) -> Scaled:
        """Make the quantised tensor object that consists of these parts, without checks.

        Its class is `kind`, or the class in `classes` that is made for this layout. The parts must have this form's
        layout. 8-bit floats may be passed as uint8 bytes.
        """
        raise NotImplementedError

    def columns(self, data: Tensor) -> int:
        """Return K, the number of elements in a row of `data`; an entry of `data` may hold several elements."""
        return data.shape[-1]

    def scale_shape(self, shape: tuple[int, ...], scale: Tensor) -> tuple[int, ...]:
        """Return the shape that the scales of a weight [E, N, K] must have.

        Args:
            shape: the weight's shape.
            scale: the given scales; some formats allow several shapes.
        """
        return *shape[:-1], -(-shape[-1] // self.block)

    def values(self, parts: Parts, expert: int) -> Tensor:
        """Return an expert's weight [N, K], dequantised to float32."""
        raise NotImplementedError

    def quantized(self, w: Any) -> Parts:
        """Quantise a weight in 16 bits, [E, N, K] or a list of E [N, K], and return its parts.

        This takes one expert at a time, and copies an expert's matrix first if it is not contiguous.
        """
        if w[0].is_meta:  # there is nothing to quantise
            return self.on_meta(w[0], (len(w), *w[0].shape))
        whole: list[Tensor | None] = []
        for expert, matrix in enumerate(w):
            parts = self.quantize(matrix.detach().contiguous()).parts
            if not whole:
                whole = [None if part is None else part.new_empty(len(w), *part.shape) for part in parts]
            for to, part in zip(whole, parts, strict=True):
                if to is not None:
                    to[expert] = part
        return Parts(*whole)

    def on_meta(self, like: Tensor, shape: tuple[int, ...]) -> Parts:
        """Return the parts of a quantised weight of this shape on the meta device. `like`: any tensor on it."""
        *lead, k = shape
        data = like.new_empty((*lead, k // self.elements), dtype=self.kind.data_dtypes[0])
        scale = like.new_empty(self.scale_shape(shape, like.new_empty(0, 0, 0)), dtype=self.kind.scale_dtype)
        return Parts(data, scale)

    def quantized_tensor(self, w: Any) -> Any:
        """Quantise a weight in 16 bits, and return a tensor of the class `self.kind`."""
        made: Any = self.kind
        return made(*[part for part in self.quantized(w) if part is not None])

    def parts_of(self, op: str, name: str, w: Any, recipe: str) -> Parts:
        """Return an operator's argument `w` as Parts; a weight in 16 bits becomes Parts that have only data.

        Args:
            op, name, recipe: the operator, the argument and the recipe, for messages.

        Raises:
            TypeError: w is in another format. ValueError: w does not have the layout that this form reads.
        """
        if w.__class__ in self.classes:
            self.check(op, name, w)
            parts: Parts = w.parts
            return parts
        if isinstance(w, Scaled):
            self._refuse(op, name, w, recipe)
        if isinstance(w, GateUp):
            raise ValueError(
                f"{op}: {name} is a GateUp, and recipe {recipe!r} prepares one tensor; give torch.cat({name}, dim=1), "
                "or choose recipe 'bf16'"
            )
        return Parts(w)

    def _refuse(self, op: str, name: str, w: Scaled, recipe: str) -> NoReturn:
        wanted = " or ".join(map(_with_article, self.classes))
        raise TypeError(
            f"{op}: {name} is {_with_article(type(w))}, but recipe {recipe!r} takes {wanted} or the 16-bit weight; "
            f"give {w.in_16_bits(name)}, or choose recipe {w.recipe!r}"
        )

    def check_dtype(self, op: str, name: str, parts: Parts, dtype: torch.dtype, recipe: str) -> None:
        """Raise TypeError if `dtype`, the dtype of parts.data, is wrong.

        It must be one of the format's data dtypes, or, if the weight must still be quantised, one of SOURCE_DTYPES.
        """
        valid = SOURCE_DTYPES if parts.scale is None else self.kind.data_dtypes
        if dtype not in valid:
            kinds = ", ".join(kind.__name__ for kind in self.classes)
            raise TypeError(f"{op}: {name} is {dtype}; recipe {recipe!r} takes {kinds}, {', '.join(map(str, valid))}")


def _with_article(kind: type) -> str:
    """Return a class's name after "a" or "an", as it is read aloud: "an MXFP8Tensor", "a FoldedWeight"."""
    return f"{'an' if kind.__name__[1].isupper() else 'a'} {kind.__name__}"
