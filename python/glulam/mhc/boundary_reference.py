"""The boundary between two sublayers and its gradients in torch: it runs on the CPU, and is the reference for kernels.

16-bit inputs are computed in float32. The updated streams and their mix are rounded to the streams' dtype, as if each
were read from memory; everything else is rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference import wide
from .boundary_mxfp8 import quantised
from .reference import post_mix_backward, project_backward, segments


def balanced(logits: Tensor, iters: int, eps: float) -> tuple[Tensor, list[Tensor]]:
    """Return (the softmax of each row of the logits, a list of the matrix after each Sinkhorn step), in float64.

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
        stats: [..., K + 2]: p, then rms, then one number that is not used here (see `boundary`).
        scale: [3], a factor each for pre, post and comb.
        base: [K].
    """
    by_row = torch.cat([wide(scale)[place].expand(rows.stop - rows.start) for place, rows in enumerate(segments(n))])
    return stats[..., :-2] / stats[..., -2:-1] * by_row.to(stats.dtype) + wide(base).to(stats.dtype)


def _updated(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Return the streams [..., n, D] after their update with y [..., D], in their dtype."""
    mixed = comb.transpose(-1, -2) @ wide(streams)
    return (mixed + post.unsqueeze(-1) * wide(y).unsqueeze(-2)).to(streams.dtype)


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

    stats [..., K + 2], for K = n n + 2n coefficients, holds p = streams'_flat weight^T, then sqrt(mean streams'_flat^2
    + rms_eps), then r = 1 / sqrt(mean u^2 + norm_eps). The updated streams are None if y is None.
    """
    n, dtype, updated = streams.shape[-2], streams.dtype, None
    if y is not None and post is not None and comb is not None:
        updated = streams = _updated(y, streams, post, comb)
    u = wide(mix(streams, pre))
    r = torch.rsqrt(u.square().mean(-1, keepdim=True) + norm_eps)
    x = u * r * wide(norm_weight).to(u.dtype)
    flat = wide(streams).flatten(-2)
    p = flat @ wide(weight).to(flat.dtype).t()
    rms = (torch.linalg.vector_norm(flat, dim=-1, keepdim=True).square() / flat.shape[-1] + rms_eps).sqrt()
    stats = torch.cat([p, rms, r], -1)
    z = gate_arguments(stats, scale, base, n)
    of_pre, of_post, of_comb = (z[..., rows] for rows in segments(n))
    new_comb = balanced(of_comb.unflatten(-1, (n, n)), iters, eps)[1][-1].to(z.dtype)
    x = x.to(dtype)
    in_mxfp8 = quantised(x, x_block) if x_block else (None, None)
    return updated, x, torch.sigmoid(of_pre) + eps, 2 * torch.sigmoid(of_post), new_comb, stats, *in_mxfp8


def boundary_backward(
    d_new_streams: Tensor | None, d_x: Tensor | None, d_new_pre: Tensor | None, d_new_post: Tensor | None,
    d_new_comb: Tensor | None, y: Tensor | None, streams: Tensor, pre: Tensor, post: Tensor | None,
    comb: Tensor | None, weight: Tensor, scale: Tensor, base: Tensor, norm_weight: Tensor, x: Tensor, stats: Tensor,
    eps: float, iters: int,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of y, streams, pre, post, comb, weight and norm_weight, then one vector for base and scale.

    A gradient is None if its argument is absent. The vector holds the gradient of base, followed by the gradient of
    scale.

    The norm's gradient needs the sum over D of (d_x norm_weight) u. Since x = u r norm_weight, that sum equals the sum
    of d_x x / r.

    Args:
        d_new_streams, d_x, d_new_pre, d_new_post, d_new_comb: gradients of boundary's results. None: there is none.
        x, stats: results of `boundary`.
        Others: see `boundary`.
    """
    n, dtype = streams.shape[-2], streams.dtype
    updated = streams if y is None or post is None or comb is None else _updated(y, streams, post, comb)
    d_logits = None
    if d_new_comb is not None:
        logits = gate_arguments(stats, scale, base, n)[..., segments(n)[2]].unflatten(-1, (n, n))
        d_logits = balanced_backward(d_new_comb, logits, iters, eps)
    d_updated, d_weight, sums = project_backward(
        d_new_pre, d_new_post, d_logits, wide(updated), weight, (scale[:1], scale[1:2], scale[2:]), base,
        stats[..., :-1], 0.0,
    )  # fmt: skip
    d_pre = d_norm = None
    if d_new_streams is not None:
        d_updated = d_updated + wide(d_new_streams)
    if d_x is not None:
        d, r, u = wide(d_x), stats[..., -1:], wide(mix(updated, pre))
        mean = (d * wide(x)).mean(-1, keepdim=True)
        d_mix = r * (d * wide(norm_weight).to(d.dtype) - u * r * mean)
        d_updated = d_updated + pre.unsqueeze(-1) * d_mix.unsqueeze(-2)
        d_pre = (d_mix.unsqueeze(-2) * wide(updated)).sum(-1)
        d_norm = (d * u * r).reshape(-1, u.shape[-1]).sum(0).to(norm_weight.dtype)
    if y is None or post is None or comb is None:
        return None, d_updated.to(dtype), d_pre, None, None, d_weight, d_norm, sums
    d_streams, d_comb, d_post, d_y, _ = post_mix_backward(d_updated, wide(streams), comb, post, wide(y), None, True)
    return d_y.to(dtype), d_streams.to(dtype), d_pre, d_post, d_comb, d_weight, d_norm, sums
