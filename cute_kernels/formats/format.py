"""`Format`: the elements of a matrix, their scales, and the tensors that hold both."""

from __future__ import annotations

import dataclasses
from typing import Any

E4M3, E2M1, E8M0, FLOAT32 = "float8_e4m3fn", "float4_e2m1fn", "float8_e8m0fnu", "float32"
BITS = {"": 16, E4M3: 8, E2M1: 4, E8M0: 8, FLOAT32: 32}
"""Bits of one element or one scale, by its type. "": elements have the 16-bit dtype of the spec."""
BYTE, WORD = "uint8", "int32"
"""Dtypes of tensors that hold 4-bit elements. BYTE: a byte holds two elements, the first in its lower half. WORD: an
int32 word holds eight elements, in the order in which GEMMs decode them."""
WORD_ELEMENTS = 8
WORD_BITS = 32
LOAD_BITS = 128
"""Bits of the smallest load of elements. A row must be a whole number of such loads."""
ROW = -1
"""The value of `Format.block` if a whole row has one scale. Such weights are called folded (docs/mxfp8.md)."""


@dataclasses.dataclass(frozen=True)
class Format:
    """The format of a matrix: its elements, and the scales that multiply them.

    Attributes:
        name: the format's name in names of functions; "": 16-bit elements.
        element: the type of an element, a key of BITS.
        scale: the type of a scale, a key of BITS; "": no scales.
        block: number of elements along the contraction that share a scale, or ROW.
        copies: how many equal copies of each block's scale memory holds, one after the other.
        has_global: float32 global scales multiply all scales. There is one for all experts, one for each expert, or one
            for each half of an expert.
        row_binades: for formats in which each row has a power-of-two scale besides the scales of its blocks: how many
            powers of two the scales of a row's blocks may be apart. 0: rows have no such scale.
        rows: number of neighbouring rows that share a scale; the last group of rows may be smaller.
        whole: True if a row consists of whole blocks, False if its last block may be shorter.
        holds: for 16-bit elements, the format to whose values they are rounded; None: any values.
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
        """Bits of an element."""
        return BITS[self.element]

    @property
    def stored(self) -> Format:
        """The format as kernels read it, without `holds`."""
        return dataclasses.replace(self, holds=None)

    def dtype(self, own: str) -> str:
        """Return the dtype of the tensor of elements, as GEMMs read it. own: the spec's 16-bit dtype."""
        return WORD if self.bits < 8 else self.element or own

    def columns(self, letter: str) -> str:
        """Return the name of a tensor's last dimension in signatures, for the tensor of weights or of x in this format.

        It is `letter`, the name for the number of a row's elements; or "<letter>/8" if a word holds eight elements.
        """
        return f"{letter}/{WORD_ELEMENTS}" if self.bits < 8 else letter

    def num_bytes(self, elements: Any) -> Any:
        """Return how many bytes `elements` elements of a row fill. elements: a Python int or a run-time number."""
        return elements * (self.bits // 8) if self.bits > 8 else elements // (8 // self.bits)

    @property
    def scale_step(self) -> int:
        """Number of elements of a row for each scale in memory; ROW if a row has one scale."""
        return self.block // self.copies

    def num_scales(self, elements: Any) -> Any:
        """Return how many scales memory holds for `elements` elements of a row. elements: a Python int or a run-time
        number."""
        step = self.scale_step
        return elements // step if self.whole else (elements + (step - 1)) // step

    def scale_words(self, elements: int) -> int:
        """Return how many whole 32-bit words the scales of `elements` elements fill; 0 if they do not fill one."""
        return int(self.num_scales(elements)) * BITS[self.scale] // WORD_BITS

    @property
    def multiple(self) -> int:
        """Number that must divide the number of elements of a row. A row must be whole loads of 16 bytes and, if the
        format requires it, whole blocks."""
        return max(self.scale_step if self.whole else 1, LOAD_BITS // self.bits)


DENSE = Format()
"""16-bit elements without scales."""
