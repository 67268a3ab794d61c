"""MXFP8 by its definition, in float64; the reference and the kernels must match it bit for bit.

A scale is the least power of two not below fl32(amax * fl32(1/448)); an element is the nearest E4M3 number, ties to
even mantissas. No code under test is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK, TILE = 32, 128
NAN, INF_SCALE, NAN_SCALE = 0x7F, 0xFE, 0xFF


class Quantized(NamedTuple):
    """One quantised copy of a matrix as bytes: data [T, K], and scales [outer, blocks].

    `axis`: the axis along which blocks lie. `rows`: number of rows of data, and of plain scales, that the quantiser
    writes.
    """

    data: Tensor
    scales: Tensor
    axis: str
    rows: int


def _magnitudes() -> Tensor:
    """Return the E4M3 numbers of the bytes from 0 to 0x7E."""
    byte = torch.arange(NAN, dtype=torch.float64)
    exponent, mantissa = byte // 8, byte % 8
    return torch.where(exponent > 0, (1 + mantissa / 8) * torch.exp2(exponent - 7), mantissa / 8 * 2.0**-6)


MAGNITUDES = _magnitudes()


def exponents(amax: Tensor) -> Tensor:
    """Return scale bytes, int64, for the float32 maxima of blocks."""
    quotient = (amax * torch.tensor(1 / 448, dtype=torch.float32)).double()
    mantissa, power = torch.frexp(torch.where(quotient.isfinite(), quotient, 1.0))
    least = power - (mantissa == 0.5).long()
    byte = torch.where(quotient == 0, 0, (least + 127).clamp(0, INF_SCALE))
    return torch.where(quotient.isnan(), NAN_SCALE, torch.where(quotient.isinf(), INF_SCALE, byte))


def elements(values: Tensor) -> Tensor:
    """Return E4M3 bytes of float64 values.

    Numbers from 2^e on are 2^(e-3) apart; below 2^-6 the distance stays the same. `round` breaks ties to even. A table
    of all midpoints gives the same bytes (`tests/test_mxfp8.py`), but takes seven times as long.
    """
    magnitude = values.abs().nan_to_num(0).clamp(max=448)
    _, power = torch.frexp(magnitude.clamp(min=2.0**-6))  # e + 1
    byte = 8 * (power + 5) + torch.ldexp(magnitude, 4 - power).round()
    return torch.where(values.isnan(), NAN, byte + 128 * values.signbit()).to(torch.uint8)


def quantized_rows(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Quantise x [R, C] in blocks of `size` along rows: return data [R, C] and scale bytes [R, ceil(C/32)]."""
    rows, columns = x.shape
    blocks = -(-columns // size)
    byte = exponents(pad(x.float().abs(), (0, blocks * size - columns)).reshape(rows, blocks, size).amax(dim=2))
    factor = torch.where(byte == NAN_SCALE, torch.nan, torch.exp2((127 - byte).double()))
    data = elements(x.double() * factor.repeat_interleave(size, dim=1)[:, :columns])
    scales = byte.repeat_interleave(size // BLOCK, dim=1)[:, : -(-columns // BLOCK)]
    return data, scales.to(torch.uint8)


def numbers(data: Tensor) -> Tensor:
    """Return the float64 values of E4M3 bytes; there must be no NaN."""
    magnitudes = MAGNITUDES[(data & 0x7F).long()]
    return torch.where(data >= 128, -magnitudes, magnitudes)


def folded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise finite rows in blocks of 32, then fold: return data and one scale byte for each row.

    A row's scale is the least with which its largest element fits.
    """
    data, scales = quantized_rows(x, BLOCK)
    powers = torch.exp2(scales.double() - 127).repeat_interleave(BLOCK, dim=1)[:, : x.shape[1]]
    values = numbers(data) * powers
    candidates = 448 * torch.exp2(torch.arange(NAN_SCALE, dtype=torch.float64) - 127)
    target = torch.searchsorted(candidates, values.abs().amax(dim=1))
    return elements(values * torch.exp2((127 - target).double())[:, None]), target.to(torch.uint8)


def grouped(x: Tensor, ends: list[int]) -> Tensor:
    """Return rows up to the end of the last 128-row tile that a group reaches; rows between groups are zeros."""
    result = torch.zeros_like(x)
    begin = last = 0
    for end in ends:
        if end > begin:
            result[begin:end] = x[begin:end]
            last = end
        begin = max(begin, -(-end // TILE) * TILE)
    return result[: -(-last // TILE) * TILE]


def quantized(x: Tensor, axis: str, size: int, ends: list[int] | None = None, padded: bool = True) -> Quantized:
    """Return one quantised copy of x.

    Args:
        axis: "row" or "col".
        size: elements that share a scale.
        ends: group ends. None: all rows are quantised.
        padded: groups begin at multiples of 128 rows. False: only the last end counts.
    """
    if ends is not None:
        x = grouped(x, ends) if padded else x[: ends[-1]]
    if axis == "row":
        return Quantized(*quantized_rows(x, size), axis, x.shape[0])
    data, scales = quantized_rows(x.mT, size)
    return Quantized(data.mT, scales, axis, x.shape[0])


def swizzled_index(i: int, j: int, blocks: int) -> int:
    tiles = -(-blocks // 4)
    return ((i // 128) * tiles + j // 4) * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4


def store(wanted: Quantized, data: Tensor, swizzled: bool, scale_memory: Callable[[int], Tensor]) -> None:
    """Write the expected bytes into the flat memory of a whole result, as a kernel would."""
    columns = wanted.data.shape[1]
    rows = data.numel() // columns
    data.view(rows, columns)[: wanted.rows] = wanted.data
    outer, blocks = (rows, columns // BLOCK) if wanted.axis == "row" else (columns, -(-rows // BLOCK))
    scales = wanted.scales
    if not swizzled:
        plain = scale_memory(outer * blocks)
        if wanted.axis == "row":
            plain.view(outer, blocks)[: scales.shape[0]] = scales
        else:
            plain.view(blocks, outer)[: scales.shape[1]] = scales.mT
        return
    atoms = scale_memory(-(-outer // 128) * -(-blocks // 4) * 512)
    for i, j in itertools.product(range(-(-outer // 128) * 128), range(-(-blocks // 4) * 4)):
        if i < scales.shape[0] and j < scales.shape[1]:
            atoms[swizzled_index(i, j, blocks)] = scales[i, j]
        elif i >= outer or j >= blocks:
            atoms[swizzled_index(i, j, blocks)] = 0
