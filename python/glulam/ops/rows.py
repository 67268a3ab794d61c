"""Rows by index: what a layer's tokens are checked for, and the copy that the CPU reference makes of them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, uint8

from ..signature import check_alignment, mismatch


class Sums(NamedTuple):
    """What adds up rows to tokens: addresses of `row_of`, the residual and the result, the tokens and the rows of each.
    All 0: nothing does.
    """

    row_of: int = 0
    residual: int = 0
    out: int = 0
    tokens: int = 0
    k: int = 0


NO_SUMS = Sums()


def sums_of(row_of: Tensor, residual: Tensor | None, out: Tensor) -> Sums:
    tokens, k = row_of.shape
    return Sums(row_of.data_ptr(), 0 if residual is None else residual.data_ptr(), out.data_ptr(), tokens, k)


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
