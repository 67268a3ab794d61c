"""Routing, permute and combine in torch: the CPU implementation, and the reference that kernels must match.

16-bit inputs are computed in float32. Rows that belong to no choice are zero here; kernels leave them unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference import wide

TINY = 1e-20
"""Added to a sum of sigmoids before dividing by it, as in DeepSeek-V3."""


def _descending(values: Tensor) -> Tensor:
    """Return indices in descending order of values: NaN counts as largest; equal values keep their order."""
    return values.sort(dim=-1, descending=True, stable=True).indices


def _chosen(by: Tensor, k: int, num_groups: int, top_groups: int) -> Tensor:
    order = _descending(by)
    if num_groups > 1:
        grouped = by.view(len(by), num_groups, by.shape[1] // num_groups)
        best = grouped.gather(-1, _descending(grouped)[..., :2]).sum(-1)
        takes_part = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, _descending(best)[:, :top_groups], True)
        open_to = takes_part.repeat_interleave(by.shape[1] // num_groups, dim=-1).gather(-1, order)
        order = order.gather(-1, _descending(open_to.int()))
    return order[:, :k]


def route(
    logits: Tensor, bias: Tensor | None, num_tokens: Tensor | None, k: int, score: str, normalize: bool,
    num_groups: int, top_groups: int, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute `layer.route`, which describes the arguments, on the CPU.

    Returns (ids, weights, offs, token_of_row, row_of, weight_of_row), attributes of a Routing.
    """
    values = wide(logits)
    scores = values.sigmoid() if score == "sigmoid" else values
    ids = _chosen(scores if bias is None else scores + bias, k, num_groups, top_groups)
    weights = _weights(values, ids, score, normalize) * scale
    if num_tokens is not None:
        is_padding = torch.arange(len(ids), device=ids.device).unsqueeze(1) >= num_tokens
        ids, weights = ids.masked_fill(is_padding, -1), weights.masked_fill(is_padding, 0)
    ids = ids.int()
    return ids, weights, *sort(ids, weights, None, None, logits.shape[1], 0)


def router(
    x: Tensor, weight: Tensor, weight_bias: Tensor | None, bias: Tensor | None, num_tokens: Tensor | None, k: int,
    score: str, normalize: bool, num_groups: int, top_groups: int, scale: float, in_float32: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return logits, x weight^T + weight_bias, and the results of `route` for them."""
    made = wide(x) @ wide(weight).to(wide(x).dtype).mT
    made = made if weight_bias is None else made + wide(weight_bias)
    logits = made if in_float32 else made.to(x.dtype)
    return logits, *route(logits, bias, num_tokens, k, score, normalize, num_groups, top_groups, scale)


def _weights(values: Tensor, ids: Tensor, score: str, normalize: bool) -> Tensor:
    if score == "sigmoid":
        weights = values.sigmoid().gather(-1, ids)
        return weights / (weights.sum(-1, keepdim=True) + TINY) if normalize else weights
    if normalize or score == "topk_softmax":
        return values.gather(-1, ids).softmax(-1)
    return values.softmax(-1).gather(-1, ids)


def route_backward(
    d_weights: Tensor, logits: Tensor, ids: Tensor, score: str, normalize: bool, scale: float
) -> tuple[Tensor]:
    has_row, at = ids >= 0, ids.clamp(min=0).long()
    values = wide(logits)
    g = (d_weights * scale).masked_fill(~has_row, 0)
    of_all = torch.zeros_like(values)
    if score == "sigmoid":
        s = values.sigmoid().gather(-1, at).masked_fill(~has_row, 0)
        if normalize:
            total = s.sum(-1, keepdim=True) + TINY
            g = (g - (g * s).sum(-1, keepdim=True) / total) / total
        mine = g * s * (1 - s)
    elif normalize or score == "topk_softmax":
        p = values.gather(-1, at).masked_fill(~has_row, -torch.inf).softmax(-1).masked_fill(~has_row, 0)
        mine = p * (g - (p * g).sum(-1, keepdim=True))
    else:
        p = values.softmax(-1)
        chosen = p.gather(-1, at).masked_fill(~has_row, 0)
        all_chosen = (chosen * g).sum(-1, keepdim=True)
        of_all = (-p * all_chosen).masked_fill(~has_row.any(-1, keepdim=True), 0)
        mine = chosen * g
    return (of_all.scatter_add(-1, at, mine.masked_fill(~has_row, 0)).to(logits.dtype),)


def placed(ids: Tensor, expert_map: Tensor | None, first: int) -> Tensor:
    """Return the local number of each choice's expert, int64. A number outside of 0 .. E - 1 means: not on this rank.

    expert_map: the local number of the expert with each id, indexed by id - `first`; ids outside the map get -1. None:
    the local number is id - `first`.
    """
    places = ids.long() - first
    if expert_map is None:
        return places
    is_mapped = (places >= 0) & (places < len(expert_map))
    return expert_map.long()[places.where(is_mapped, 0)].where(is_mapped, -1)


def sort(
    ids: Tensor, weights: Tensor, num_tokens: Tensor | None, expert_map: Tensor | None, experts: int, first: int
) -> tuple[Tensor, ...]:  # fmt: skip
    """Sort choices by expert, as `Routing.from_topk` does, on the CPU.

    Returns (offs, token_of_row, row_of, weight_of_row), attributes of a Routing.
    """
    local = placed(ids, expert_map, first)
    has_row = (local >= 0) & (local < experts)
    if num_tokens is not None:
        has_row &= torch.arange(len(ids), device=ids.device).unsqueeze(1) < num_tokens
    local = local.masked_fill(~has_row, experts).view(-1)
    order = local.sort(stable=True).indices
    offs = torch.bincount(local, minlength=experts + 1)[:experts].cumsum(0).int()
    is_row = torch.arange(local.numel(), device=ids.device) < offs[-1]
    row_of = torch.empty_like(order, dtype=torch.int32)
    row_of[order] = torch.arange(order.numel(), dtype=torch.int32, device=ids.device).masked_fill(~is_row, -1)
    token_of_row = (order // ids.shape[1]).masked_fill(~is_row, 0).int()
    weight_of_row = wide(weights).reshape(-1)[order].masked_fill(~is_row, 0)
    return offs, token_of_row, row_of.view(ids.shape), weight_of_row


def _rows_there(row_of: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return (row numbers, int64; a mask of choices without a row). The row number of a choice without a row is 0.

    count: number of rows; a row_of outside of 0 .. count - 1 means no row.
    """
    is_none = (row_of < 0) | (row_of >= count)
    return row_of.masked_fill(is_none, 0).long(), is_none


def row_weights_backward(d_rows: Tensor, row_of: Tensor) -> tuple[Tensor]:
    rows, is_none = _rows_there(row_of, d_rows.numel())
    return (d_rows.reshape(-1)[rows].masked_fill(is_none, 0),)


def permute(x: Tensor, row_of: Tensor) -> tuple[Tensor]:
    """Copy tokens x [N, H] to their rows; return [N, K, H], which viewed as [N K, H] holds the rows in their order."""
    rows = x.new_zeros(row_of.numel() + 1, x.shape[1])
    places, is_none = _rows_there(row_of, row_of.numel())
    rows[places.masked_fill(is_none, row_of.numel())] = x.unsqueeze(1)
    return (rows[:-1].view(*row_of.shape, x.shape[1]),)


def combine(y: Tensor, row_of: Tensor, residual: Tensor | None) -> tuple[Tensor]:
    """Return the sum of each token's rows, plus the residual unless None, added in the order of the token's choices."""
    rows = wide(y.reshape(-1, y.shape[-1]))
    out = rows.new_zeros(len(row_of), y.shape[-1]) if residual is None else wide(residual).clone()
    for places, is_none in (_rows_there(row, len(rows)) for row in row_of.unbind(1)):
        out += rows[places].masked_fill(is_none.unsqueeze(1), 0)
    return (out.to(y.dtype),)
