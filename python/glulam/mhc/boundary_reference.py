"""The boundary between two sublayers and its gradients in torch: runs on the CPU, and is the reference for kernels.

16-bit inputs are computed in float32. The updated streams and their mix are rounded to the streams' dtype, as if each
were read from memory; everything else is rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference import wide
from .boundary_mxfp8 import quantised
from .reference import segments


def balanced(logits: Tensor, iters: int, eps: float) -> tuple[Tensor, list[Tensor]]:
    """Return the softmax of each row of the logits, and a list of the matrix after each Sinkhorn step; both in float64.

    The steps: softmax + eps; columns divided by their sum + eps; then `iters` - 1 times rows and columns.
    """
    shares = logits.double().softmax(-1)
    steps = [shares + eps]
    for axis in _axes(iters):
        steps.append(steps[-1] / (steps[-1].sum(axis, keepdim=True) + eps))
    return shares, steps


def _axes(iters: int) -> list[int]:
    """Return, for each step of `balanced` after the first, the axis over which it sums."""
    return [-2, *[-1, -2] * (iters - 1)]


def balanced_backward(d_comb: Tensor, logits: Tensor, iters: int, eps: float) -> Tensor:
    """Return the gradient of the logits, from `d_comb`, the gradient of the matrix after the last step of `balanced`.

    With H = gradient * M, elementwise, going back through a step M' = M / (sum M + eps) gives H = H' - M' sum H'.
    """
    shares, steps = balanced(logits, iters, eps)
    h = d_comb.double() * steps[-1]
    for axis, after in zip(reversed(_axes(iters)), reversed(steps[1:]), strict=True):
        h = h - after * h.sum(axis, keepdim=True)
    d_shares = h / steps[0]
    return (shares * (d_shares - (shares * d_shares).sum(-1, keepdim=True))).to(logits.dtype)


def gate_arguments(stats: Tensor, scale: Tensor, base: Tensor, n: int) -> Tensor:
    """Return z [..., K] = p / rms * scale + base, for the K = n n + 2n coefficients.

    Args:
        stats: [..., K + 1], the projections p, then rms.
        scale: [3], a factor each for pre, post and comb.
        base: [K].
    """
    by_row = torch.cat([wide(scale)[place].expand(rows.stop - rows.start) for place, rows in enumerate(segments(n))])
    return stats[..., :-1] / stats[..., -1:] * by_row.to(stats.dtype) + wide(base).to(stats.dtype)


def mix(streams: Tensor, pre: Tensor) -> Tensor:
    """Return the sum of the streams [..., n, D] with weights `pre` [..., n], in the streams' dtype."""
    return (pre.to(wide(streams).dtype).unsqueeze(-1) * wide(streams)).sum(-2).to(streams.dtype)


def boundary(
    y: Tensor | None, streams: Tensor, pre: Tensor, post: Tensor | None, comb: Tensor | None, weight: Tensor,
    scale: Tensor, base: Tensor, norm_weight: Tensor, rms_eps: float, eps: float, norm_eps: float, iters: int,
    x_block: int,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Compute `mhc.boundary` in torch, and return its results, then stats, which backward needs, then x in MXFP8.

    x_block: the columns of x that share a scale; 0: x is not quantised, and the last two results are None.

    stats [..., K + 1] holds p = streams'_flat weight^T and sqrt(mean square + rms_eps), for K = n n + 2n coefficients.
    The updated streams are None if y is None.
    """
    n, dtype, updated = streams.shape[-2], streams.dtype, None
    if y is not None and post is not None and comb is not None:
        mixed = comb.transpose(-1, -2) @ wide(streams)
        updated = streams = (mixed + post.unsqueeze(-1) * wide(y).unsqueeze(-2)).to(dtype)
    u = wide(mix(streams, pre))
    x = u * torch.rsqrt(u.square().mean(-1, keepdim=True) + norm_eps) * wide(norm_weight).to(u.dtype)
    flat = wide(streams).flatten(-2)
    p = flat @ wide(weight).to(flat.dtype).t()
    rms = (torch.linalg.vector_norm(flat, dim=-1, keepdim=True).square() / flat.shape[-1] + rms_eps).sqrt()
    stats = torch.cat([p, rms], -1)
    z = gate_arguments(stats, scale, base, n)
    of_pre, of_post, of_comb = (z[..., rows] for rows in segments(n))
    new_comb = balanced(of_comb.unflatten(-1, (n, n)), iters, eps)[1][-1].to(z.dtype)
    x = x.to(dtype)
    in_mxfp8 = quantised(x, x_block) if x_block else (None, None)
    return updated, x, torch.sigmoid(of_pre) + eps, 2 * torch.sigmoid(of_post), new_comb, stats, *in_mxfp8


def boundary_backward(
    d_x: Tensor | None, d_comb: Tensor | None, streams: Tensor, pre: Tensor, scale: Tensor, base: Tensor,
    norm_weight: Tensor, stats: Tensor, eps: float, norm_eps: float, iters: int,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return (d_mix, d_pre, d_logits, d_norm): back through the norm, the mix and Sinkhorn's steps.

    Args:
        d_x: the gradient of x. None: d_mix, d_pre and d_norm are None.
        d_comb: the gradient of the new comb. None: d_logits is None.
        streams: the streams after the update.
    """
    n = streams.shape[-2]
    d_mix = d_pre = d_logits = d_norm = None
    if d_comb is not None:
        logits = gate_arguments(stats, scale, base, n)[..., segments(n)[2]].unflatten(-1, (n, n))
        d_logits = balanced_backward(d_comb, logits, iters, eps)
    if d_x is not None:
        u = wide(mix(streams, pre))
        r = torch.rsqrt(u.square().mean(-1, keepdim=True) + norm_eps)
        g = wide(d_x) * wide(norm_weight).to(u.dtype)
        d_mix = r * g - u * (r.pow(3) * (g * u).sum(-1, keepdim=True) / u.shape[-1])
        d_pre = (d_mix.unsqueeze(-2) * wide(streams)).sum(-1)
        d_norm = (wide(d_x) * u * r).reshape(-1, u.shape[-1]).sum(0).to(norm_weight.dtype)
        d_mix = d_mix.to(streams.dtype)
    return d_mix, d_pre, d_logits, d_norm
