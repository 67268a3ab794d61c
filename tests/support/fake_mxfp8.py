"""Reads and writes MXFP8 tensors in the memory of the fake GPU (`support.fake_gpu`).

Functions pass quantised x and activation on through the memory that the call gives them. So buffers that overlap or are
too small give wrong results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import mxfp4, mxfp8
from .memory import memory, read
from .mxfp8_mlp import values

NAN_BYTE = 0x7F


class Rows:
    """A matrix quantised by rows: E4M3 elements [T, C], and plain scales at an address."""

    def __init__(self, data: Tensor, scale: int) -> None:
        rows, columns = data.shape
        self.data, self.scales = data, memory(scale, rows, columns // 32, dtype=torch.uint8)

    def poison(self) -> None:
        self.data.view(torch.uint8).fill_(NAN_BYTE)
        self.scales.fill_(mxfp8.NAN_SCALE)

    def write(self, x: Tensor, rows: int) -> None:
        data, scales = mxfp8.quantized_rows(x[:rows].float(), 128)
        self.data.view(torch.uint8)[:rows], self.scales[:rows] = data, scales

    def read(self, rows: int) -> Tensor:
        """Return the values; rows from `rows` on are zeros.

        The four scales of 128 elements must be equal, since kernels read only the first.
        """
        for first in range(0, self.scales.shape[1], 4):
            four = self.scales[:rows, first : first + 4]
            assert bool((four == four[:, :1]).all()), "scales of 128 elements differ"
        result = torch.zeros(self.data.shape, dtype=torch.float64)
        result[:rows] = values(self.data[:rows], self.scales[:rows])
        return result


def folded(w: Tensor, scale: int) -> list[Tensor]:
    """Return the values of each expert's weights, with one scale for each row."""
    experts, rows, columns = w.shape
    scales = read(scale, experts, rows, 1, dtype=torch.uint8)
    return list(values(w, scales.expand(-1, -1, columns // 32).contiguous()))


def blocked(w: Tensor, scale: int) -> list[Tensor]:
    """Return the values of each expert's weights, with one scale for 32 elements."""
    experts, rows, columns = w.shape
    return list(values(w, read(scale, experts, rows, columns // 32, dtype=torch.uint8)))


def words(w: Tensor, scale: int) -> list[Tensor]:
    """Return the values of each expert's MXFP4 weights, stored as words of eight elements.

    There is one scale for 32 elements.
    """
    experts, rows, count = w.shape
    scales = read(scale, experts, rows, count // 4, dtype=torch.uint8)
    return list(mxfp4.values(mxfp4.bytes_of_words(w), scales))


def rebased(c: Any) -> list[Tensor]:
    """Return the values of each expert's MXFP4 weights as FP8 MMAs multiply them.

    A row has one power of two, which multiplies the sum. An element is multiplied by the ratio of its block's scale to
    that power; the product must be an E4M3 number.
    """
    experts, rows, count = c.w.shape
    scales = read(c.w_scale, experts, rows, count // 4, dtype=torch.uint8)
    powers = read(c.w_global_scale, experts, rows, 1, dtype=torch.uint8)
    assert bool((powers <= mxfp8.NAN_SCALE - 12).all())
    binades = (scales.int() - powers.int()).clamp(min=-6)  # a block of zeros may have any scale
    assert int(binades.max()) <= 6
    elements = mxfp4.values(c.w.view(torch.uint8), (binades + 127).to(torch.uint8))
    assert torch.equal(elements.to(torch.float8_e4m3fn).double(), elements), "no numbers of E4M3"
    return list(elements * torch.exp2(powers.double() - 127))


def rounded_rows(x: Tensor) -> Tensor:
    return values(*mxfp8.quantized_rows(x.float(), 32))


def check_rounded(x: Tensor) -> None:
    assert torch.equal(rounded_rows(x).to(x.dtype), x), "x holds other values than MXFP8's"
