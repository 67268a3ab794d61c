"""The hyper-connection operators and their gradients in torch: they run on the CPU, and are the reference for kernels.

16-bit inputs are computed in float32. Each function takes and returns tensors as the operator of the same name does.
Results are rounded to the dtypes that the operators return, gradients to the dtype of the tensor they belong to.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..reference import wide


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    return _normalised(logits, iters, eps)[-1].to(logits.dtype)


def _normalised(logits: Tensor, iters: int, eps: float) -> list[Tensor]:
    """Return the matrix after each step, in float64: first the exponentials, then rows and columns normalised in turns.

    In float32 the exponentials of a column 104 below its rows' maxima would be zeros, which no step brings back.
    """
    values = logits.double()
    steps = [(values - values.amax(-1, keepdim=True)).exp()]
    for step in range(2 * iters):
        axis = -1 - step % 2
        steps.append(steps[-1] / (steps[-1].sum(axis, keepdim=True) + eps))
    return steps


def sinkhorn_backward(d_out: Tensor, logits: Tensor, iters: int, eps: float) -> Tensor:
    """Return the gradient of the logits, from `d_out`, the gradient of the matrix after the last step of `_normalised`.

    With H = gradient * M, elementwise, going back through a step M' = M / (sum M + eps) gives H = H' - M' sum H'. The
    first matrix is exp(l - rowmax), so each row's sum of H is subtracted at the row's maximum, in equal shares if
    several elements tie.
    """
    steps = _normalised(logits, iters, eps)
    h = d_out.double() * steps[-1]
    for step in reversed(range(2 * iters)):
        h = h - steps[step + 1] * h.sum(-1 - step % 2, keepdim=True)
    largest = steps[0] == 1
    shares = largest / largest.sum(-1, keepdim=True)
    return (h - shares * h.sum(-1, keepdim=True)).to(logits.dtype)


def aggregate(x: Tensor, h_pre: Tensor) -> Tensor:
    return (wide(x) * wide(h_pre).unsqueeze(-1)).sum(-2).to(x.dtype)


def aggregate_backward(d_out: Tensor, x: Tensor, h_pre: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and h_pre from d_out, the gradient of aggregate's result."""
    d = wide(d_out).unsqueeze(-2)
    return (d * wide(h_pre).unsqueeze(-1)).to(x.dtype), (d * wide(x)).sum(-1).to(h_pre.dtype)


def _matrix(h_res: Tensor, transpose_res: bool) -> Tensor:
    return wide(h_res).transpose(-1, -2) if transpose_res else wide(h_res)


def post_mix(
    residual: Tensor, h_res: Tensor, h_post: Tensor, x: Tensor, bias: Tensor | None, transpose_res: bool
) -> Tensor:
    added = wide(x) if bias is None else wide(x) + wide(bias)
    mixed = _matrix(h_res, transpose_res).to(wide(residual).dtype) @ wide(residual)
    return (mixed + wide(h_post).unsqueeze(-1) * added.unsqueeze(-2)).to(residual.dtype)


def post_mix_backward(
    d_out: Tensor, residual: Tensor, h_res: Tensor, h_post: Tensor, x: Tensor, bias: Tensor | None, transpose_res: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of residual, h_res, h_post, x and bias (None if there is no bias) from d_out."""
    d, streams = wide(d_out), wide(residual)
    added = wide(x) if bias is None else wide(x) + wide(bias)
    d_residual = _matrix(h_res, not transpose_res).to(d.dtype) @ d
    d_res = d @ streams.transpose(-1, -2)
    d_post = (d * added.unsqueeze(-2)).sum(-1)
    d_x = (d * wide(h_post).unsqueeze(-1)).sum(-2)
    d_bias = None if bias is None else _rows(d_x).sum(0).to(bias.dtype)
    return (
        d_residual.to(residual.dtype),
        (d_res.transpose(-1, -2).contiguous() if transpose_res else d_res).to(h_res.dtype),
        d_post.to(h_post.dtype),
        d_x.to(x.dtype),
        d_bias,
    )


def _rows(tensor: Tensor) -> Tensor:
    """Return a tensor [..., C] as [tokens, C], also if there are no token dimensions."""
    return tensor.reshape(-1, tensor.shape[-1])


def segments(n: int) -> tuple[slice, slice, slice]:
    """Return the slices of `weight`'s n n + 2n rows that make h_pre, h_post and h_res, for n streams."""
    return slice(0, n), slice(n, 2 * n), slice(2 * n, 2 * n + n * n)


def spread(alphas: tuple[Tensor, Tensor, Tensor], n: int) -> Tensor:
    """Return the factor (alpha) of each row of `weight`, as one vector of n n + 2n elements.

    alphas: (alpha_pre, alpha_post, alpha_res), one element each; they belong to n, n and n n rows.
    """
    return torch.cat([wide(a).reshape(1).expand(size) for a, size in zip(alphas, (n, n, n * n), strict=True)])


def project(
    x: Tensor, weight: Tensor, alphas: tuple[Tensor, Tensor, Tensor], bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `mhc.project` in torch, and return h_pre, h_post, h_res and stats, which backward needs.

    stats [..., n n + 2n + 1] holds p = x_flat weight^T, then the root mean square of the token's n streams.
    """
    n = x.shape[-2]
    flat = wide(x).flatten(-2)
    p = flat @ wide(weight).to(flat.dtype).t()
    rms = torch.linalg.vector_norm(flat, dim=-1, keepdim=True) / math.sqrt(flat.shape[-1])
    z = p / (rms + eps) * spread(alphas, n).to(p.dtype) + wide(bias).to(p.dtype)
    pre, post, res = (z[..., rows] for rows in segments(n))
    h_res = res.unflatten(-1, (n, n)).contiguous()
    return torch.sigmoid(pre), 2 * torch.sigmoid(post), h_res, torch.cat([p, rms], -1)


def project_backward(
    d_pre: Tensor | None, d_post: Tensor | None, d_res: Tensor | None, x: Tensor, weight: Tensor,
    alphas: tuple[Tensor, Tensor, Tensor], bias: Tensor, stats: Tensor, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of x and of weight, and a vector with the gradients of bias, then of the three alphas."""
    n = x.shape[-2]
    flat, p, rms = wide(x).flatten(-2), stats[..., :-1], stats[..., -1:]
    r, alpha = 1 / (rms + eps), spread(alphas, n).to(stats.dtype)
    dz = _through_gates(d_pre, d_post, d_res, p * r * alpha + wide(bias).to(stats.dtype), n)
    dp = dz * r * alpha
    d_norm = (dz * alpha * p).sum(-1, keepdim=True) * r.square() / (flat.shape[-1] * rms)
    d_flat = dp @ wide(weight).to(dp.dtype) - torch.where(rms > 0, d_norm, 0) * flat
    d_weight = _rows(dp).t() @ _rows(flat)
    by_row = _rows(dz * r * p).sum(0)
    sums = torch.cat([_rows(dz).sum(0), torch.stack([by_row[rows].sum() for rows in segments(n)])])
    return d_flat.view(x.shape).to(x.dtype), d_weight.to(weight.dtype), sums


def add_uses(d_x: Tensor, d_aggregate: Tensor, h_pre: Tensor, d_residual: Tensor | None) -> Tensor:
    """Return d_x, the gradient of the streams, plus the gradient through `aggregate`, plus d_residual if not None."""
    total = wide(d_x) + wide(h_pre).unsqueeze(-1) * wide(d_aggregate).unsqueeze(-2)
    return (total if d_residual is None else total + wide(d_residual)).to(d_x.dtype)


def _through_gates(d_pre: Tensor | None, d_post: Tensor | None, d_res: Tensor | None, z: Tensor, n: int) -> Tensor:
    """Return the gradient of z from d_pre, d_post and d_res, the gradients of h_pre, h_post and h_res (None: zero).

    z holds the arguments of the sigmoids (pre, post), then the logits (res).
    """
    dz = torch.zeros_like(z)
    pre, post, res = segments(n)
    gate = torch.sigmoid(z)
    slope = gate * (1 - gate)
    if d_pre is not None:
        dz[..., pre] = wide(d_pre) * slope[..., pre]
    if d_post is not None:
        dz[..., post] = 2 * wide(d_post) * slope[..., post]
    if d_res is not None:
        dz[..., res] = wide(d_res).flatten(-2)
    return dz
