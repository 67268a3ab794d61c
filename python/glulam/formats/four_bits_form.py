"""Base class of the layouts (`form.Form`) in which kernels read 4-bit weights."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from .form import Form
from .four_bits import FourBits
from .scaled import Parts
from .words import WORD_DTYPE, elements_of, words_of


@dataclasses.dataclass(frozen=True)
class Words(Form):
    """The layout in which kernels read 4-bit weights: data as int32 words of eight elements (`words.py`).

    Scales stay as in the quantised tensor. The CPU reference also reads unprepared weights, whose data are bytes of two
    elements.
    """

    kind: ClassVar[type[FourBits]]
    elements = 2
    ready_as = WORD_DTYPE, 3

    def has_values(self, parts: Parts) -> bool:
        return parts.scale is not None

    def made(self, parts: Parts, report: bool) -> Parts:
        if parts.scale is not None:
            return parts._replace(data=words_of(parts.data))
        parts = self.quantized(parts.data)
        return parts._replace(data=words_of(parts.data, out=parts.data.view(WORD_DTYPE)))

    def columns(self, data: Tensor) -> int:
        return data.shape[-1] * elements_of(data.dtype)
