"""Trials of quantisers: their bytes must equal those of the CPU reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cute_kernels.specs import BY_GROUP, QuantizeMxfp4Spec, QuantizeMxfp8Spec

from ..formats.mxfp4 import quantize_mxfp4
from ..formats.mxfp8 import MXFP8Tensor, quantize_mxfp8
from ..formats.mxfp8.layout import BLOCK_SIZES, SCALE_LAYOUTS
from .inputs import Size, randn
from .trial import Given, Trial


def values_of_all_magnitudes(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of this shape and dtype with numbers of all magnitudes, zeros, infinities and NaN."""
    values = randn(*shape, seed=1) * torch.exp2(randn(*shape[:-1], 1, seed=2) * 12)
    flat = values.view(-1)
    flat[::97], flat[13::389], flat[29::787] = 0.0, torch.inf, torch.nan
    return values.to(dtype)


def mxfp8(spec: QuantizeMxfp8Spec, size: Size) -> Iterator[Trial]:
    """Yield trials of quantize_mxfp8.

    Two kinds of kernels are tried elsewhere: kernels that round to values of MXFP8 and back are part of an MLP's call
    (`grouped.mlp`), and kernels that quantise rows of groups are part of weight gradients (`grouped.wgrad`).
    """
    if spec.rounded or spec.axis == BY_GROUP:
        return
    for rows, columns in size.matrices:
        if spec.axis != "row" and rows % 32:
            rows += 32 - rows % 32
        for block in BLOCK_SIZES:
            for scale_layout in SCALE_LAYOUTS:
                options: dict[str, Any] = {"axis": spec.axis, "block": block, "scale_layout": scale_layout}

                def call(given: Given, options: dict[str, Any] = options) -> list[Tensor]:
                    made = quantize_mxfp8(given["x"], **options)
                    both = [made] if isinstance(made, MXFP8Tensor) else made
                    return [part for one in both for part in (one.data, one.scale)]

                given = {"x": values_of_all_magnitudes((rows, columns), getattr(torch, spec.dtype))}
                yield Trial(f"{rows} x {columns}, {block}, {scale_layout}", given, call, is_bits=True)


def mxfp4(spec: QuantizeMxfp4Spec, size: Size) -> Iterator[Trial]:
    def call(given: Given) -> list[Tensor]:
        made = quantize_mxfp4(given["x"])
        return [made.data, made.scale]

    for rows, columns in size.matrices:
        yield Trial(
            f"3 x {rows} x {columns}",
            {"x": values_of_all_magnitudes((3, rows, columns), getattr(torch, spec.dtype))},
            call,
            is_bits=True,
        )
