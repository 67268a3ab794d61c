"""Matrices that expose mistakes of a quantiser."""

from __future__ import annotations

import torch
from torch import Tensor

BF16, F32 = torch.bfloat16, torch.float32


def spread(rows: int, columns: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    """Return normal numbers [rows, columns]; scales of neighbouring blocks of 16 x 16 differ by up to 2^20."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-10, 11, (-(-rows // 16), -(-columns // 16)), generator=generator)
    by_element = powers.repeat_interleave(16, 0).repeat_interleave(16, 1)[:rows, :columns]
    return torch.ldexp(torch.randn(rows, columns, generator=generator), by_element.int()).to(dtype)


def every_bfloat16() -> Tensor:
    """Return [65536, 32]: row i contains bfloat16 number i, and no number of greater magnitude."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(BF16)
    share = torch.rand(2**16, 32, generator=torch.Generator().manual_seed(3)) * 2 - 1
    x = (patterns.float()[:, None] * share).to(BF16)
    x[torch.arange(2**16), torch.arange(2**16) % 32] = patterns
    return torch.where(x.isnan() & ~patterns.isnan()[:, None], 0, x)


def random_float32(rows: int = 4096) -> Tensor:
    """Return [rows, 32] of random finite float32 bits, including blocks of subnormal numbers."""
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(2**31), 2**31, (rows, 32), generator=generator, dtype=torch.int64)
    x = bits.to(torch.int32).view(F32)
    small = torch.exp2(-(torch.arange(rows) % 160).float())[:, None]
    x = torch.where(torch.arange(rows)[:, None] % 2 == 0, x, torch.randn(rows, 32, generator=generator) * small)
    return torch.where(x.isfinite(), x, 1.0)


def special_blocks(dtype: torch.dtype) -> Tensor:
    """Return [rows, 128] with zeros, NaN, Inf, both, negative zeros, the smallest and the largest numbers."""
    inf, nan, big = torch.inf, torch.nan, torch.finfo(dtype).max
    least, normal = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
    rows = [
        [0.0] * 4, [-0.0] * 4, [nan] * 4, [inf] * 4, [-inf] * 4, [1.0, nan, 2.0, -3.0], [1.0, inf, -2.0, big],
        [nan, inf, -inf, 1.0], [least, -least, 0.0, 2 * least], [normal, least, -normal, 3 * least],
        [big, -big, 1.0, -1e-3], [-nan, 0.0, 0.0, 0.0],
    ]  # fmt: skip
    x = torch.tensor(rows, dtype=torch.float64).to(dtype).repeat(1, 8)
    return torch.cat([x, torch.zeros_like(x), spread(len(rows), 32, dtype), x.flip(1)], dim=1)


def padded_buffer(sizes: list[int], tail: int, columns: int = 96) -> tuple[Tensor, list[int]]:
    """Return (a buffer whose groups begin at multiples of 128 rows, the groups' ends).

    Rows between and after the groups are NaN.
    """
    ends: list[int] = []
    for size in sizes:
        ends.append((-(-ends[-1] // 128) * 128 if ends else 0) + size)
    x = torch.full((ends[-1] + tail, columns), torch.nan, dtype=BF16)
    for end, size in zip(ends, sizes, strict=True):
        x[end - size : end] = spread(size, columns, seed=end)
    return x, ends


def folding_cases(n: int = 64, k: int = 96) -> list[Tensor]:
    """Return finite weights [E, n, k] of every dtype that are hard to fold.

    Among them are a massive channel, a huge row, zeros, subnormals, and a wide spread.
    """
    generator = torch.Generator().manual_seed(11)
    w = torch.randn(3, n, k, generator=generator) * 0.05
    w[0, :, 5] *= 2.0**12
    w[0, 7] *= 2.0**14
    w[1, 3], w[1, :, 9] = 0, 0
    w[1, 4], w[1, :, 10] = 2.0**-14, 2.0**-14
    w[2] = spread(n, k, F32) * 0.01
    tiny = torch.randn(1, n, k, generator=generator) * 2.0**-130
    tiny[0, 5], tiny[0, 6, 7] = 0, 2.0**-149
    powers = torch.randint(-120, 121, (1, n, k), generator=generator)
    wild = torch.ldexp(torch.randn(1, n, k, generator=generator), powers.int())
    # Every 16th of a binade, so that block maxima are rounded up, down and to an even mantissa.
    steps = (torch.arange(n * k).view(1, n, k) % 257 - 128) / 16
    return [*(w.to(dtype) for dtype in (BF16, torch.float16, F32)), tiny, tiny.to(BF16), wild, wild.to(BF16), steps]
