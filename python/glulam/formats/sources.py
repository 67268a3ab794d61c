"""Helpers of weight quantisers: a check of the weight, and a division that gives the same bits on CPU and GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..calls.checks import check_plain, refuse_gradients, shape_text
from .scaled import SOURCE_DTYPES

CHUNK_ROWS = 2**14
"""Rows that are quantised together, which bounds the memory of their float32 copies."""


def check_source(op: str, w: Any, multiple: int, *, any_batch: bool = False) -> None:
    """Check a weight that will be quantised along its rows.

    Args:
        multiple: K must be a multiple of this.
        any_batch: True: accept [..., N, K]. False: only [N, K] and [E, N, K].

    Raises:
        TypeError: w is not a tensor of SOURCE_DTYPES. ValueError: its shape or memory layout is wrong.
        GradientNotSupported: grad mode is on and w requires a gradient.
    """
    if not isinstance(w, Tensor) or w.dtype not in SOURCE_DTYPES:
        got = w.dtype if isinstance(w, Tensor) else type(w).__name__
        raise TypeError(f"{op}: w is {got}; give a tensor of {', '.join(map(str, SOURCE_DTYPES))}")
    if w.dim() < 2 or (w.dim() > 3 and not any_batch) or w.shape[-1] % multiple:
        shapes = "[..., N, K]" if any_batch else "[N, K] or [E, N, K]"
        raise ValueError(
            f"{op}: w has shape {shape_text(w.shape)}; give {shapes} with K a multiple of {multiple}, so pad it with "
            "zeros"
        )
    check_plain(op, "w", w)
    if torch.is_grad_enabled():
        refuse_gradients(op, w=w)


def divided(x: Tensor, number: float) -> Tensor:
    """Return x / number, rounded once, on any device.

    `x / number` would not do: torch's GPU operators multiply by the reciprocal of a Python number. With a tensor as
    divisor, they divide as the CPU and the kernels do.
    """
    return x / torch.full_like(x, number)
