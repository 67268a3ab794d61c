"""Reads FP8 tensors with block scales from the memory of the fake GPU (`support.fake_gpu`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import fp8_block
from .memory import memory, read

NAN_BYTE = 0x7F


class Rows:
    """A matrix quantised by rows: E4M3 [T, C], and float32 scales [T, ceil(C / 128)] at an address."""

    def __init__(self, data: Tensor, scale: int) -> None:
        rows, columns = data.shape
        self.data, self.scales = data, memory(scale, rows, fp8_block.blocks_of(columns), dtype=torch.float32)

    def poison(self) -> None:
        self.data.view(torch.uint8).fill_(NAN_BYTE)
        self.scales.fill_(torch.nan)

    def write(self, x: Tensor, rows: int) -> None:
        made = fp8_block.quantized_rows(x[:rows].float())
        self.data.view(torch.uint8)[:rows], self.scales[:rows] = made.data.view(torch.uint8), made.scale

    def read(self, rows: int) -> Tensor:
        """Return the values in float64; rows from `rows` on are zeros."""
        result = torch.zeros(self.data.shape, dtype=torch.float64)
        result[:rows] = fp8_block.Rows(self.data[:rows], self.scales[:rows]).values()
        return result


def weights(c: Any, layout: str, is_decoded: bool) -> list[Tensor]:
    """Return the values of a launch's weights, one tensor for each expert.

    layout: the gate layout of a gated w1; "" for other weights.
    """
    experts, rows, k = c.w.shape
    grid = int(fp8_block.grid_rows(rows, layout).max()) + 1
    scale = read(c.w_scale, experts, grid, fp8_block.blocks_of(k), dtype=torch.float32)
    found = fp8_block.Weights(c.w, scale, layout)
    return list(found.in_bfloat16() if is_decoded else found.values())


def quantize(c: Any) -> None:
    rows, columns = c.x.shape
    data = memory(c.data, rows, columns, dtype=torch.uint8).view(torch.float8_e4m3fn)
    made = Rows(data, c.scale)
    made.poison()
    made.write(c.x, rows)
