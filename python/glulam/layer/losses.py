"""Auxiliary losses of a router, for equal loads of experts and for small logits. Plain torch, no host sync."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..calls.checks import check_plain, check_tensor, mismatch, shape_text
from ..reference import wide
from .checks import check_matrix
from .routing import Routing

INTEGERS = (torch.int32, torch.int64)


def load_balancing_loss(routing: Routing) -> Tensor:
    """Return the load-balancing loss E * sum over experts of f_e P_e. Differentiable in the logits, through P.

    f_e is the fraction of all choices that choose expert e (the f_e sum up to 1). P_e is the mean over tokens of e's
    probability: the softmax over all logits, or the sigmoid divided by the token's sum of sigmoids. So the loss is 1 if
    f or P is uniform, for any k. Implementations in which f_e counts choices per token, as in transformers, give a loss
    k times as large. Padding does not count.

    Source: Switch Transformer (arXiv:2101.03961, equations 4 to 6) without its alpha; with a sigmoid, DeepSeek-V3
    (arXiv:2412.19437, equations 17 to 20) over all tokens of the routing.

    Args:
        routing: a Routing from `route`. If it has the tokens of several sequences, the loss is over all of them; route
            each sequence by itself for a loss per sequence.

    Returns:
        A scalar, float32 (float64 for float64 logits); 0 if there is no token.

    Raises:
        TypeError, ValueError: routing is not a Routing, or is one from `from_topk`, which has no logits.
    """
    if not isinstance(routing, Routing):
        raise TypeError(f"load_balancing_loss: routing is a {type(routing).__name__}; give what glulam.route returned")
    if routing.logits is None:
        raise ValueError(
            "load_balancing_loss: routing has no logits, which from_topk is not given; give what glulam.route returned"
        )
    _check(routing)
    is_padding = routing.ids[:, :1] < 0
    values = wide(routing.logits).masked_fill(is_padding, 0)
    if routing.score == "sigmoid":  # in logarithms, since sums of small sigmoids round to 0; log 0 is -inf
        values = logsigmoid(values).clamp(min=torch.finfo(values.dtype).min)
    probabilities = values.softmax(-1)
    sums, rows = probabilities.masked_fill(is_padding, 0).sum(0), routing.offs[-1].clamp(min=1)
    return (routing.counts * sums).sum() / rows / rows * (routing.num_experts * routing.ids.shape[1])


def _check(routing: Routing) -> None:
    """Check that a routing's tensors fit each other; a caller may have changed them by hand.

    Raises:
        ValueError, TypeError: they do not.
    """
    op, logits = "load_balancing_loss", routing.logits
    tokens, experts = check_matrix(op, "routing.logits", logits, "N, E")
    for name, count, letters in (("ids", tokens, "N, K"), ("offs", experts, "E")):
        label, value = f"routing.{name}", getattr(routing, name)
        tensor = check_tensor(op, label, value, f"a tensor [{letters}]", logits, dtypes=INTEGERS)
        if tensor.dim() != len(letters.split()) or tensor.shape[0] != count or 0 in tensor.shape[1:]:
            why = f"routing.logits has {count} {'tokens' if name == 'ids' else 'experts'}"
            mismatch(op, label, tensor.shape, letters.replace(letters[0], str(count), 1).split(", "), why)
    for name in ("logits", "ids", "offs"):
        check_plain(op, f"routing.{name}", getattr(routing, name))


def router_z_loss(logits: Tensor, num_tokens: Tensor | None = None) -> Tensor:
    """Return the router z-loss, the mean over tokens of logsumexp(logits)^2. Differentiable.

    Source: ST-MoE (arXiv:2202.08906, equation 5).

    Args:
        logits: [..., E].
        num_tokens: [1] on logits' device, as for `route`; tokens from this number on do not count. None: all count.

    Returns:
        A scalar, float32 (float64 for float64 logits); 0 if there is no token.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """
    check_tensor("router_z_loss", "logits", logits, "a tensor [..., E]")
    check_plain("router_z_loss", "logits", logits)
    if not logits.dim() or not logits.shape[-1]:
        raise ValueError(f"router_z_loss: logits has shape {shape_text(logits.shape)}; give [..., E], E at least 1")
    values = wide(logits).flatten(0, -2)
    if num_tokens is None:
        return values.logsumexp(-1).square().sum() / max(values.shape[0], 1)
    check_tensor("router_z_loss", "num_tokens", num_tokens, "a tensor [1]", logits, shape=(1,), why="it is one number")
    check_plain("router_z_loss", "num_tokens", num_tokens)
    is_padding = torch.arange(values.shape[0], device=values.device) >= num_tokens
    squares = values.masked_fill(is_padding.unsqueeze(1), 0).logsumexp(-1).square()
    return (squares.masked_fill(is_padding, 0).sum() / num_tokens.clamp(1, max(values.shape[0], 1))).squeeze(0)
