"""Batch-invariant products for the Linears of nn.MoE (router, shared gate), used under `glulam.batch_invariant(True)`.

torch's Linear adds in an order that depends on the number of tokens. These functions add in the same order for any
number of tokens, so a token's result does not depend on the batch. For 16-bit results they run a grouped GEMM with one
expert, in forward and backward. For float32 logits of 16-bit tokens they run the kernel of `layer.few_tokens`, which is
otherwise used only for few tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..calls.checks import ALIGNMENT_ELEMENTS, KERNEL_DTYPES, runs_kernels
from ..host.invariance import refuse, refuse_on_cpu
from ..layer import Routing, route
from ..layer.few_tokens import route_few, routes_few
from ..ops.grouped_mm import grouped_mm
from .children import product

MOST_TOKENS = 4 * 65535
"""Most tokens in a launch of the kernel of float32 logits: 4 tokens a CTA, times 65535 CTAs in a grid dimension."""
FALSE = "or set it to False"


def route_in_order(
    name: str, tokens: Tensor, weight: Tensor, weight_bias: Tensor | None, k: int, dtype: torch.dtype, **options: Any
) -> Routing:
    """Compute the router's logits = tokens weight^T + weight_bias batch-invariantly, and return `route(logits, k)`.

    Args:
        name: the router's name in errors.
        tokens, weight, weight_bias: [N, H], [E, H] and [E] or None.
        dtype: dtype of the logits.
        k: number of experts for each token.
        options: further keyword arguments of `glulam.route`.

    Raises:
        NotImplementedError: no kernel computes these logits batch-invariantly: tokens are on the CPU, or neither the
            grouped GEMM (logits in the tokens' 16-bit dtype) nor the kernel of few tokens fits.
    """
    if dtype == tokens.dtype and dtype in KERNEL_DTYPES:
        return route(product_in_order(name, tokens, weight, weight_bias), k, **options)
    if not runs_kernels(tokens):
        refuse_on_cpu(name, tokens.device)
    if len(tokens) == 0:
        return route(product(tokens, weight, weight_bias, dtype), k, **options)
    if not routes_few(tokens, weight, weight_bias, dtype, most=MOST_TOKENS):
        refuse(
            name,
            f"no kernel makes {dtype} logits of {len(tokens)} tokens in {tokens.dtype} whose gradient is recorded",
            f"leave out router_dtype, call it under torch.no_grad() with at most {MOST_TOKENS} tokens, {FALSE}",
        )  # fmt: skip
    return route_few(tokens, weight, weight_bias, k, dtype, **options)


def product_in_order(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x weight^T + bias [N, E] in x's dtype, added in the same order for any N. Differentiable.

    Args:
        name: the layer's name in errors.
        x, weight, bias: [N, H], [E, H] and [E] or None.

    Raises:
        NotImplementedError: x is on the CPU, or not of 16 bits.
    """
    if not runs_kernels(x):
        refuse_on_cpu(name, x.device)
    if x.dtype not in KERNEL_DTYPES:
        refuse(name, f"no kernel multiplies {x.dtype}", f"cast the layer to bfloat16 or float16, {FALSE}")
    width, missing = len(weight), -len(weight) % ALIGNMENT_ELEMENTS
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if missing:
        weight, bias = F.pad(weight, (0, 0, 0, missing)), None if bias is None else F.pad(bias, (0, missing))
    ends = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
    made: Tensor = grouped_mm(x, weight[None], offs=ends, bias=None if bias is None else bias[None])
    return made[:, :width].contiguous() if missing else made


def refuse_called(name: str, child: Any) -> None:
    """Refuse a torch Linear that must be called as a module, since its order of addition is not fixed.

    Modules of other classes pass: their order of addition is the user's concern.

    Args:
        name: the child's name in errors.

    Raises:
        NotImplementedError: the child is a Linear.
    """
    if isinstance(child, nn.Linear):
        refuse(
            name, "it is hooked, wrapped or compiled, so that torch's own Linear multiplies",
            f"remove its hooks, replace it by a module that adds in one order, {FALSE}",
        )  # fmt: skip
