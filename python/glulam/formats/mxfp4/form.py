"""MXFP4 as kernels read it."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..four_bits_form import Words
from ..scaled import BLOCK, SCALE_DTYPE, Parts
from .quantize import quantize_mxfp4
from .tensor import MXFP4Tensor


@dataclasses.dataclass(frozen=True)
class Mxfp4(Words):
    name = "mxfp4"
    kind = MXFP4Tensor
    classes = (MXFP4Tensor,)
    block = multiple = BLOCK
    quantize = staticmethod(quantize_mxfp4)

    def tensor_of(self, parts: Parts) -> MXFP4Tensor:
        made: MXFP4Tensor = MXFP4Tensor.unchecked(parts.data, parts.scale.view(SCALE_DTYPE))  # type: ignore[union-attr]
        return made

    def values(self, parts: Parts, expert: int) -> Tensor:
        assert parts.scale is not None
        return MXFP4Tensor(parts.data[expert], parts.scale[expert].view(torch.uint8)).dequantize()


MXFP4 = Mxfp4()
