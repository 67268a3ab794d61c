"""Arguments of `mhc.boundary`, and its formulas written in plain torch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

SLACK = 5e-5
"""Error allowed for float32 results in addition to the error of torch's own arithmetic.

Reasons: a GPU's exp and reciprocals are approximations, the projection is a sum of products of 16-bit parts, and some
sums over tokens cancel.
"""


def given(
    lead: tuple[int, ...], width: int = 8, n: int = 4, dtype: torch.dtype = torch.float64,
    streams: torch.dtype | None = None, seed: int = 0,
) -> list[Any]:  # fmt: skip
    """Return y, streams, pre, post, comb, weight, scale, base and norm_weight. streams: dtype of y and streams."""
    generator, rows = torch.Generator().manual_seed(seed), n * n + 2 * n

    def normal(*shape: int, like: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(like)

    coefficients = [normal(*lead, n).sigmoid(), 2 * normal(*lead, n).sigmoid(), normal(*lead, n, n).softmax(-1)]
    weight = normal(rows, n * width) * 3 / (n * width) ** 0.5
    of_streams = [normal(*lead, width, like=streams or dtype), normal(*lead, n, width, like=streams or dtype)]
    return [*of_streams, *coefficients, weight, normal(3), normal(rows), normal(width) + 1]


def update_removed(arguments: list[Any]) -> list[Any]:
    """Return the arguments of a boundary that does not update the streams: y, post and comb are None."""
    _, streams, pre, _, _, *parameters = arguments
    return [None, streams, pre, None, None, *parameters]


def oracle(
    y: Tensor | None, streams: Tensor, pre: Tensor, post: Tensor, comb: Tensor, weight: Tensor, scale: Tensor,
    base: Tensor, norm_weight: Tensor, rms_eps: float = 1e-6, eps: float = 1e-6, norm_eps: float = 1e-6,
    iters: int = 20,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return boundary's results, rounded at the same places as a model that computes in the streams' dtype."""
    n, dtype, wide = streams.shape[-2], streams.dtype, pre.dtype
    if y is not None:
        mixed = torch.einsum("...ij,...ic->...jc", comb, streams.to(wide))
        streams = (mixed + torch.einsum("...j,...c->...jc", post, y.to(wide))).to(dtype)
    u = torch.einsum("...j,...jc->...c", pre, streams.to(wide)).to(dtype).to(wide)
    x = torch.nn.functional.rms_norm(u, (u.shape[-1],), norm_weight, norm_eps).to(dtype)
    flat = streams.to(wide).flatten(-2)
    z = torch.nn.functional.linear(flat, weight) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
    new_pre = torch.sigmoid(z[..., :n] * scale[0] + base[:n]) + eps
    new_post = 2 * torch.sigmoid(z[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    new_comb = (z[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n)).softmax(-1) + eps
    new_comb = new_comb / (new_comb.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        new_comb = new_comb / (new_comb.sum(-1, keepdim=True) + eps)
        new_comb = new_comb / (new_comb.sum(-2, keepdim=True) + eps)
    return streams, x, new_pre, new_post, new_comb


def of_all_kinds(width: int, streams: torch.dtype, tokens: int = 7) -> list[Any]:
    """Return arguments with special values.

    Token 0 has a NaN, token 1 an Inf, token 2 only zeros; norm_weight has a NaN.
    """
    arguments = given((tokens,), width, dtype=torch.float32, streams=streams)
    y, stream, *_, norm_weight = arguments
    y[0, 3], y[1, width - 1] = math.nan, math.inf
    y[2], stream[2] = 0, 0
    norm_weight[5] = math.nan
    return arguments
