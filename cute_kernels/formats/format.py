"""Formats: the elements of a matrix, their scales, and the tensors that hold them."""

from __future__ import annotations

import dataclasses
from typing import Any

E4M3, E2M1, E8M0, FLOAT32 = "float8_e4m3fn", "float4_e2m1fn", "float8_e8m0fnu", "float32"
BITS = {"": 16, E4M3: 8, E2M1: 4, E8M0: 8, FLOAT32: 32}
"""Bits of an element or of a scale, by type; "": a spec's own 16-bit dtype."""
BYTE, WORD = "uint8", "int32"
"""Dtypes of tensors of 4-bit elements: two elements a byte, the first in the lower half, or eight a word, in the order
of the GEMMs."""
WORD_ELEMENTS = 8
WORD_BITS = 32
LOAD_BITS = 128
"""Bits of the smallest load of elements: rows are whole loads."""
ROW = -1
"""A block that is a whole row: weights are folded (docs/mxfp8.md)."""


@dataclasses.dataclass(frozen=True)
class Format:
    """A matrix's format.

    Attributes:
        name: the format's name in names of functions; "": 16-bit elements.
        element: the type of its elements, a key of BITS.
        scale: the type of its scales, a key of BITS; "": no scales.
        block: elements along the contraction that share a scale, or ROW.
        copies: equal scales that memory holds for each block.
        has_global: float32 global scales multiply all scales: one for all experts, one for each expert, or one for each
            half of an expert.
        row_binades: a row also has a power of two, and its blocks' scales may be this many binades apart; 0: a row has
            no power of two.
        rows: neighbouring rows that share a scale; the last group of rows may be smaller.
        whole: rows consist of whole blocks; if False, a row's last block may be shorter.
        holds: for 16-bit elements, the format whose values they are; None: any values.
    """

    name: str = ""
    element: str = ""
    scale: str = ""
    block: int = 0
    copies: int = 1
    has_global: bool = False
    row_binades: int = 0
    rows: int = 1
    whole: bool = True
    holds: Format | None = None

    @property
    def bits(self) -> int:
        return BITS[self.element]

    @property
    def stored(self) -> Format:
        """The format as kernels read it, without `holds`."""
        return dataclasses.replace(self, holds=None)

    def dtype(self, own: str) -> str:
        """Return the dtype of the tensor of elements that GEMMs read. own: the spec's dtype."""
        return WORD if self.bits < 8 else self.element or own

    def columns(self, letter: str) -> str:
        """Return the name of the last dimension of the tensor of elements; `letter` names a row's number of
        elements."""
        return f"{letter}/{WORD_ELEMENTS}" if self.bits < 8 else letter

    def num_bytes(self, elements: Any) -> Any:
        """Return the bytes of a number of elements of a row; a Python or a run-time number."""
        return elements * (self.bits // 8) if self.bits > 8 else elements // (8 // self.bits)

    @property
    def scale_step(self) -> int:
        """Elements of a row from one scale in memory to the next, or ROW."""
        return self.block // self.copies

    def num_scales(self, elements: Any) -> Any:
        """Return how many scales memory holds for a number of elements of a row; a Python or a run-time number."""
        step = self.scale_step
        return elements // step if self.whole else (elements + (step - 1)) // step

    def scale_words(self, elements: int) -> int:
        """Return how many whole 32-bit words the scales of a number of elements fill."""
        return int(self.num_scales(elements)) * BITS[self.scale] // WORD_BITS

    @property
    def multiple(self) -> int:
        """A row's number of elements is a multiple of this number: whole loads of 16 bytes, and whole blocks if the
        format requires them."""
        return max(self.scale_step if self.whole else 1, LOAD_BITS // self.bits)


DENSE = Format()
