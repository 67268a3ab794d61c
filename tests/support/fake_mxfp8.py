"""MXFP8 in the memory of a GPU that is played by the CPU: see `support.fake_gpu`.

Functions go through the memory that they are given for x and the activation, so that two of these in one place, or one
too small, is a wrong result.
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
    """A matrix in MXFP8 by rows: elements [T, C], and plain scales at an address."""

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
        """Values, zeros behind `rows`. Kernels read the first of four scales, so all four must be equal."""
        for first in range(0, self.scales.shape[1], 4):
            four = self.scales[:rows, first : first + 4]
            assert bool((four == four[:, :1]).all()), "scales of 128 elements differ"
        result = torch.zeros(self.data.shape, dtype=torch.float64)
        result[:rows] = values(self.data[:rows], self.scales[:rows])
        return result


def folded(w: Tensor, scale: int) -> list[Tensor]:
    """Experts of w, with one scale a row."""
    experts, rows, columns = w.shape
    scales = read(scale, experts, rows, 1, dtype=torch.uint8)
    return list(values(w, scales.expand(-1, -1, columns // 32).contiguous()))


def blocked(w: Tensor, scale: int) -> list[Tensor]:
    """Experts of w, with a scale for 32 elements."""
    experts, rows, columns = w.shape
    return list(values(w, read(scale, experts, rows, columns // 32, dtype=torch.uint8)))


def words(w: Tensor, scale: int) -> list[Tensor]:
    """Experts of w, eight elements a word, with a scale for 32 elements."""
    experts, rows, count = w.shape
    scales = read(scale, experts, rows, count // 4, dtype=torch.uint8)
    return list(mxfp4.values(mxfp4.bytes_of_words(w), scales))


def rebased(c: Any) -> list[Tensor]:
    """Experts of w in a checkpoint's bytes, as FP8 MMAs have them: times what a block's scale is more than its row's,
    which is then a number of E4M3, and the row's power of two.
    """
    experts, rows, count = c.w.shape
    scales = read(c.w_scale, experts, rows, count // 4, dtype=torch.uint8)
    powers = read(c.w_global_scale, experts, rows, 1, dtype=torch.uint8)
    assert bool((powers <= mxfp8.NAN_SCALE - 12).all())
    binades = (scales.int() - powers.int()).clamp(min=-6)  # of blocks of zeros, any
    assert int(binades.max()) <= 6
    elements = mxfp4.values(c.w.view(torch.uint8), (binades + 127).to(torch.uint8))
    assert torch.equal(elements.to(torch.float8_e4m3fn).double(), elements), "no numbers of E4M3"
    return list(elements * torch.exp2(powers.double() - 127))


def rounded_rows(x: Tensor) -> Tensor:
    return values(*mxfp8.quantized_rows(x.float(), 32))


def check_rounded(x: Tensor) -> None:
    assert torch.equal(rounded_rows(x).to(x.dtype), x), "x holds other values than MXFP8's"
