"""Layouts in which kernels read MXFP4 weights: `Mxfp4` for MMAs in 16 bits, `Mxfp4Rebased` for MMAs in FP8."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..form import Form
from ..four_bits_form import Words
from ..scaled import BLOCK, SCALE_DTYPE, Parts
from ..words import WORD_DTYPE, elements_of
from .codec import values_of
from .quantize import quantize_mxfp4
from .rebase import REBASED, RebasedWeight, row_scales, words_of_bytes
from .tensor import MXFP4Tensor


@dataclasses.dataclass(frozen=True)
class Mxfp4(Words):
    """The layout in which kernels of recipe "mxfp4_weight_only" read weights: int32 words and E8M0 scales.

    An MXFP4Tensor has this layout after `prepare_`.
    """

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


@dataclasses.dataclass(frozen=True)
class Mxfp4Rebased(Form):
    """The layout of a RebasedWeight, for recipe "mxfp4": a checkpoint's bytes and scales, a power of two for each row.

    The file `rebase.py` explains the powers of two.
    """

    name = REBASED
    kind = MXFP4Tensor
    classes = (RebasedWeight, MXFP4Tensor)
    block = multiple = BLOCK
    elements = 2
    ready_as = WORD_DTYPE, 3
    quantize = staticmethod(quantize_mxfp4)

    def is_ready(self, parts: Parts) -> bool:
        return parts.global_scale is not None and super().is_ready(parts)

    def made(self, parts: Parts, report: bool) -> Parts:
        """Convert a weight to this layout.

        All results are copies: the cache of converted (prepared) weights must not keep w's memory alive.
        """
        parts = self.quantized(parts.data) if parts.scale is None else parts
        data, scale = words_of_bytes(parts.data).clone(), parts.scale.clone()  # type: ignore[union-attr]
        return Parts(data, scale, row_scales(data, scale, "recipe 'mxfp4'").view(SCALE_DTYPE))

    def check_fit(self, op: str, name: str, parts: Parts, shape: tuple[int, ...], is_concatenated: bool) -> None:
        data, _, rows = parts
        if rows is None:
            return
        if rows.dtype != SCALE_DTYPE or tuple(rows.shape) != shape[:2]:
            raise ValueError(
                f"{op}: {name}'s row_scale is {rows.dtype} {list(rows.shape)}; it must be {SCALE_DTYPE} "
                f"{list(shape[:2])}, as prepare_mxfp4_weight makes it"
            )
        if rows.device != data.device or not rows.is_contiguous():
            raise ValueError(f"{op}: {name}'s row_scale must be contiguous, and on {data.device} as its data")

    def tensor_of(self, parts: Parts) -> RebasedWeight:
        data, scale, rows = parts
        assert scale is not None and rows is not None
        made: RebasedWeight = RebasedWeight.unchecked(data, scale.view(SCALE_DTYPE), rows.view(SCALE_DTYPE))
        return made

    def columns(self, data: Tensor) -> int:
        return data.shape[-1] * elements_of(data.dtype)

    def values(self, parts: Parts, expert: int) -> Tensor:
        data, scale, _ = parts
        assert scale is not None
        return values_of(data[expert].view(torch.uint8), scale[expert].view(torch.uint8))


MXFP4, MXFP4_REBASED = Mxfp4(), Mxfp4Rebased()
