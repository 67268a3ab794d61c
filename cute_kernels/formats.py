"""What GEMMs multiply: how matrices are stored, and which of them a kernel takes. Plain data.

A format is a row here and, where its weights are decoded, a class of `decoding/elements.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

E4M3, E2M1, E8M0 = "float8_e4m3fn", "float4_e2m1fn", "float8_e8m0fnu"
ELEMENT_BITS = {"": 16, E4M3: 8, E2M1: 4}
"""Of an element; "": of a spec's own 16-bit dtype."""
BYTE, WORD = "uint8", "int32"
"""What tensors of 4-bit elements are of: two a byte, the first in its lower half; or eight, as GEMMs read weights."""
WORD_ELEMENTS = 8
SCALE_BLOCK = 32
"""Elements along the contraction that have a byte for a scale in memory, however many have the same."""
ROW = -1
"""A block that is a whole row: weights are folded (docs/mxfp8.md)."""


@dataclasses.dataclass(frozen=True)
class Format:
    """How a matrix is stored.

    Attributes:
        element: a key of ELEMENT_BITS.
        scale: the type of its scales, "" without any. block: elements along the contraction that share one.
        holds: of 16-bit elements, the format whose values they are.
    """

    element: str = ""
    scale: str = ""
    block: int = 0
    holds: Format | None = None

    @property
    def bits(self) -> int:
        return ELEMENT_BITS[self.element]

    @property
    def stored(self) -> Format:
        """What a kernel that reads it need know."""
        return dataclasses.replace(self, holds=None)

    def dtype(self, own: str) -> str:
        """Of a tensor of its elements; `own`: a spec's."""
        return WORD if self.bits < 8 else self.element or own

    def num_bytes(self, elements: Any) -> Any:
        """Of so many elements of a row, a number of any kind."""
        return elements * (self.bits // 8) if self.bits > 8 else elements // (8 // self.bits)


DENSE = Format()
MXFP8 = Format(E4M3, E8M0, SCALE_BLOCK)
MXFP8_WIDE = Format(E4M3, E8M0, 4 * SCALE_BLOCK)
MXFP8_FOLDED = Format(E4M3, E8M0, ROW)
MXFP8_VALUES = Format(holds=MXFP8)
MXFP4 = Format(E2M1, E8M0, SCALE_BLOCK)


@dataclasses.dataclass(frozen=True)
class Operands:
    """A GEMM's rows and weights, and what an activation becomes. prefix: what names of functions say of them."""

    x: Format
    w: Format
    act: Format
    prefix: str

    @property
    def decodes(self) -> bool:
        """Whether weights become what x is: from registers, so that they are the rows of the MMA, in a swapped tile."""
        return self.w.element != self.x.element

    @property
    def has_scaled_rows(self) -> bool:
        """Whether x is multiplied as it is stored, by scales as well: in FP8."""
        return bool(self.x.scale)


OPERANDS = {
    "16bit": Operands(DENSE, DENSE, DENSE, ""),
    "mxfp8": Operands(MXFP8_WIDE, MXFP8_FOLDED, MXFP8_WIDE, "mxfp8_"),
    "mxfp8_weight_only": Operands(DENSE, MXFP8, DENSE, "mxfp8w_"),
    "mxfp8_exact": Operands(MXFP8_VALUES, MXFP8, MXFP8_VALUES, "mxfp8exact_"),
    "mxfp4_weight_only": Operands(DENSE, MXFP4, DENSE, "mxfp4w_"),
}
"""By a spec's `operands`. Results, biases and preactivations are of the spec's dtype, whatever is multiplied."""
DECODED = tuple(name for name, operands in OPERANDS.items() if operands.decodes)


def next_operands(name: str) -> str:
    """Those of a GEMM with the same weights that reads the activation which one with these makes."""
    made = OPERANDS[name]
    reads = (other for other, row in OPERANDS.items() if (row.x, row.w) == (made.act.stored, made.w))
    return next(reads)
