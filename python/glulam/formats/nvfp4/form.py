"""The layout in which kernels read NVFP4 weights: words of eight elements, E4M3 block scales and global scales."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..four_bits import FourBits
from ..four_bits_form import Words
from ..scaled import Parts
from .quantize import quantize_nvfp4
from .tensor import BLOCK, SCALE_DTYPE, NVFP4Tensor, by_row, check_global_scale


@dataclasses.dataclass(frozen=True)
class Nvfp4(Words):
    """Describes the layout in which kernels read NVFP4 weights, and converts weights to it; holds no weight itself.

    The layout is that of an NVFP4Tensor after `prepare_`: data as int32 words of eight elements, E4M3 block scales,
    float32 global scales.
    """

    name = "nvfp4"
    kind = NVFP4Tensor
    classes = (NVFP4Tensor,)
    block, multiple = BLOCK, FourBits.multiple
    quantize = staticmethod(quantize_nvfp4)

    def on_meta(self, like: Tensor, shape: tuple[int, ...]) -> Parts:
        global_scale = like.new_empty(shape[:1], dtype=torch.float32)
        return super().on_meta(like, shape)._replace(global_scale=global_scale)

    def tensor_of(self, parts: Parts) -> NVFP4Tensor:
        data, scale, global_scale = parts
        made: NVFP4Tensor = NVFP4Tensor.unchecked(data, scale.view(SCALE_DTYPE), global_scale)  # type: ignore[union-attr]
        return made

    def check_fit(self, op: str, name: str, parts: Parts, shape: tuple[int, ...], is_concatenated: bool) -> None:
        data, _, global_scale = parts
        label = f"{op}: {name}'s global_scale"
        if not isinstance(global_scale, Tensor) or global_scale.dtype != torch.float32:
            got = global_scale.dtype if isinstance(global_scale, Tensor) else type(global_scale).__name__
            raise TypeError(f"{label} is {got}; it must be torch.float32, as an NVFP4Tensor has it")
        check_global_scale(label, global_scale, shape)
        if global_scale.device != data.device or not global_scale.is_contiguous():
            raise ValueError(f"{label} must be contiguous, and on {data.device} as its data")
        if global_scale.dim() == 2 and not is_concatenated:
            raise ValueError(
                f"{label} has one number for each half of the rows, which are no halves of a gate in glu_layout "
                "'concat'; give one a matrix, [E]"
            )

    def values(self, parts: Parts, expert: int) -> Tensor:
        data, scale, global_scale = parts
        assert scale is not None and global_scale is not None
        shape = data.shape[0], data.shape[1], self.columns(data)
        factors = by_row(global_scale, shape)
        one = NVFP4Tensor.unchecked(data[expert], scale[expert], global_scale.new_ones(()))
        return one.dequantize() * (factors[expert] if factors.dim() else factors)


NVFP4 = Nvfp4()
