"""MXFP4 as kernels read it: words of eight elements, and a scale for 32 of them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..form import Form
from ..scaled import BLOCK, SCALE_DTYPE, Parts
from .quantize import quantize_mxfp4
from .tensor import MXFP4Tensor
from .words import WORD_DTYPE, elements_of, words_of


@dataclasses.dataclass(frozen=True)
class Words(Form):
    """As an MXFP4Tensor that is prepared has them; references read bytes as well."""

    name = "mxfp4"
    kind = MXFP4Tensor
    classes = (MXFP4Tensor,)
    multiple = BLOCK
    elements = 2
    ready_as = WORD_DTYPE, 3

    def has_values(self, parts: Parts) -> bool:
        return parts.scale is not None

    def made(self, parts: Parts, report: bool) -> Parts:
        if parts.scale is None:
            parts = self.quantized(parts.data, quantize_mxfp4)
            return Parts(words_of(parts.data, out=parts.data.view(WORD_DTYPE)), parts.scale)
        return Parts(words_of(parts.data), parts.scale)

    def tensor_of(self, data: Tensor, scale: Tensor, global_scale: Tensor | None) -> MXFP4Tensor:
        made: MXFP4Tensor = MXFP4Tensor.unchecked(data, scale.view(SCALE_DTYPE))
        return made

    def columns(self, data: Tensor) -> int:
        return data.shape[-1] * elements_of(data.dtype)

    def values(self, parts: Parts, expert: int) -> Tensor:
        assert parts.scale is not None
        return MXFP4Tensor(parts.data[expert], parts.scale[expert].view(torch.uint8)).dequantize()


WORDS = Words()
