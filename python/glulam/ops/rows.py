"""Rows by index: the copy that the CPU reference makes of them, and what a layer's tokens are checked for."""

from __future__ import annotations

from torch import Tensor, uint8

from ..signature import check_alignment, mismatch


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows], with indices clamped: those behind the last group may be anything."""
    matrix = x.view(uint8) if x.element_size() == 1 else x  # torch takes no rows of FP8
    taken = matrix.index_select(0, rows.clamp(0, max(x.shape[0] - 1, 0)))
    return taken.view(x.dtype)


def check_tokens(op: str, tokens: int, **given: Tensor | None) -> None:
    """Of what has a layer's tokens: as many of them, and addresses that kernels take. Raises ValueError, naming it."""
    for name, tensor in given.items():
        if tensor is not None:
            if len(tensor) != tokens:
                mismatch(op, name, tensor.shape, (tokens, tensor.shape[1]), f"routing is of {tokens} tokens")
            check_alignment(op, name, tensor)
