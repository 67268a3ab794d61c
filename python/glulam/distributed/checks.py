"""Checks of the arguments of `ExpertParallel` and of its `combine`."""

from __future__ import annotations

import math
from typing import Any, get_args

import torch

from ..calls.addressed import check_like
from ..calls.checks import check_flag, check_tensor, shape_text
from ..layer.checks import MAX_EXPERTS, MAX_K
from ..layer.routing import Routing
from ..names import Transport
from .exchange import COMBINE, Handle

NAME = "ExpertParallel"
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
MAX_RANKS = MAX_K
"""Most ranks: the kernel that sums a token's rows from all ranks also sums the rows of its choices, at most MAX_K."""


def check_options(sizes: dict[str, Any], world: int, transport: Any, dtype: Any) -> None:
    """Raise ValueError or TypeError if an option of ExpertParallel is invalid.

    Args:
        sizes: the integer options by name.
        world: the number of ranks.
        transport, dtype: the other options.
    """
    num_experts = sizes["num_experts"]
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{NAME}: {name} is {value!r}; give an integer")
        most = {"num_experts": MAX_EXPERTS, "top_k": min(MAX_K, num_experts)}.get(name, math.inf)
        if not 1 <= value <= most:
            raise ValueError(
                f"{NAME}: {name} is {value}; it must be 1 {'or more' if most == math.inf else f'to {most}'}"
            )
    if world > min(num_experts, MAX_RANKS):
        raise ValueError(
            f"{NAME}: {world} ranks for {num_experts} experts; there may be at most {MAX_RANKS}, and one for each "
            "expert, so give a smaller group"
        )
    if transport not in TRANSPORTS:
        raise ValueError(f"{NAME}: transport={transport!r}; choose {' or '.join(map(repr, TRANSPORTS))}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"{NAME}: dtype is {dtype!r}; give that of tokens, as torch.bfloat16")


def check_back(y_here: Any, handle: Handle, summed: bool | None, residual: Any) -> bool:
    """Check the arguments of `combine`; return True if y_here holds sums, False if it holds rows.

    Raises:
        ValueError, TypeError: an argument is invalid.
    """
    is_summed = _holds_sums(y_here, handle.here, summed)
    if residual is not None:
        shape = handle.exchange.tokens, y_here.shape[1]
        check_like(COMBINE, "residual", residual, shape, y_here, "it is added to the tokens' sums")
    return is_summed


def _holds_sums(y_here: Any, here: Routing, summed: bool | None) -> bool:
    """Return True if y_here holds sums, one for each token of `here`; False: rows, one for each choice.

    Args:
        y_here: [R, H] (sums) or [R K, H] (rows), for the R received tokens with K choices each.
        here: the Routing of the tokens on this rank.
        summed: True: sums are required. False: rows are required. None: the shape decides.

    Raises:
        ValueError, TypeError: y_here has neither shape, or not the shape that `summed` requires.
    """
    check_tensor(COMBINE, "y_here", y_here, "a tensor [tokens here, H] or [T, H]", here.row_of)
    tokens, k = here.row_of.shape
    wanted = {True: (tokens, "a sum for each token here"), False: (tokens * k, "a row for each of their choices")}
    if summed is not None:
        check_flag(COMBINE, "summed", summed)
        wanted = {summed: wanted[summed]}
    found = [is_summed for is_summed, (rows, _) in wanted.items() if y_here.dim() == 2 and len(y_here) == rows]
    if not found:
        shapes = " or ".join(f"[{rows}, H], {what}" for rows, what in wanted.values())
        why = "" if summed is None else f", since summed={summed}"
        raise ValueError(f"{COMBINE}: y_here has shape {shape_text(y_here.shape)}; it must be {shapes}{why}")
    return found[0]
