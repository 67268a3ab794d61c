"""Forms: the parts in which kernels read a weight, and how callers' weights become these parts. A class per format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from ..host.experts import GateUp
from .scaled import SOURCE_DTYPES, Parts, Scaled


class Form:
    """A format's weights [E, N, K] as a recipe's kernels read them.

    Attributes:
        name: of it, and of tensors that are read as they are (`Scaled.reads_as`).
        kind: what callers hold. classes: all that is taken besides weights in 16 bits.
        multiple: what widths that scales run along are multiples of. block: elements of a row that share a scale.
        elements: of a number of `kind`'s data.
        quantize: makes a `kind` of a matrix in 16 bits or float32, or of several.
        ready_as: the dtype of data and the dimensions of scales that kernels read.
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
        """Raises ValueError where a tensor of `classes` does not lie as this reads it."""

    def is_ready(self, parts: Parts) -> bool:
        """Return whether kernels read these parts as they are."""
        return parts.scale is not None and (parts.data.dtype, parts.scale.dim()) == self.ready_as

    def has_values(self, parts: Parts) -> bool:
        """Return whether `values` reads these parts."""
        return self.is_ready(parts)

    def made(self, parts: Parts, report: bool) -> Parts:
        """Prepare parts that are not ready for kernels. `report`: raise FoldError where too much would change."""
        raise NotImplementedError

    def of_gate(self, num_rows: int) -> Form:
        """The form of a gated w1 in layout "concat" that is given in 16 bits, with so many rows."""
        return self

    def check_fit(self, op: str, name: str, parts: Parts, shape: tuple[int, ...], is_concatenated: bool) -> None:
        """Raises ValueError, TypeError: scales or the third part do not fit a weight of this shape. is_concatenated:
        the rows' halves are a gate's.
        """

    def tensor_of(self, parts: Parts) -> Scaled:
        """Make a tensor of `kind` of parts that were made before, unchecked; 8-bit floats may be bytes."""
        raise NotImplementedError

    def columns(self, data: Tensor) -> int:
        """Elements of a row of data."""
        return data.shape[-1]

    def scale_shape(self, shape: tuple[int, ...], scale: Tensor) -> tuple[int, ...]:
        """Return the shape of the scales of a weight of this shape."""
        return *shape[:-1], -(-shape[-1] // self.block)

    def values(self, parts: Parts, expert: int) -> Tensor:
        """An expert's weight [N, K], float32."""
        raise NotImplementedError

    def quantized(self, w: Any) -> Parts:
        """Quantise a weight in 16 bits, packed or a list, expert by expert; a transposed weight is copied first."""
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
        """Parts without memory."""
        *lead, k = shape
        data = like.new_empty((*lead, k // self.elements), dtype=self.kind.data_dtypes[0])
        scale = like.new_empty(self.scale_shape(shape, like.new_empty(0, 0, 0)), dtype=self.kind.scale_dtype)
        return Parts(data, scale)

    def quantized_tensor(self, w: Any) -> Any:
        """A weight in 16 bits as a `kind`."""
        made: Any = self.kind
        return made(*[part for part in self.quantized(w) if part is not None])

    def parts_of(self, op: str, name: str, w: Any, recipe: str) -> Parts:
        """An argument's parts.

        Raises:
            TypeError: it is in another format. ValueError: it lies otherwise than this reads it.
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
        """Raises TypeError where data, or a weight that is to be prepared, is of another dtype."""
        valid = SOURCE_DTYPES if parts.scale is None else self.kind.data_dtypes
        if dtype not in valid:
            kinds = ", ".join(kind.__name__ for kind in self.classes)
            raise TypeError(f"{op}: {name} is {dtype}; recipe {recipe!r} takes {kinds}, {', '.join(map(str, valid))}")


def _with_article(kind: type) -> str:
    """The name of a class; one that begins with an abbreviation is spelled: an MXFP8Tensor."""
    return f"{'an' if kind.__name__[1].isupper() else 'a'} {kind.__name__}"
