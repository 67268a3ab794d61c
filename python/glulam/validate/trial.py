"""What is asked of a function: inputs, a call of the public API, and which of its results are compared with what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Given = Mapping[str, Any]
"""Tensors, or formats made of tensors, by name."""


class Trial(NamedTuple):
    """One call of an operator.

    Attributes:
        what: in words, as "swiglu, interleaved, zipf".
        given: what it takes, on the CPU, in the dtypes of kernels.
        call: of what is given, on any device and in any dtype; returns results, and gradients where it makes any.
        ends: rows of all groups, and rows in all. Of results with so many rows only those of groups are compared.
        leaves_tail: whether rows behind the groups are left as they were.
        tolerance: of the largest error, over the largest value of a result; None: the rule of `judge`.
        is_bits: results are bytes, and the CPU's are the same: nothing is computed in float64.
        replayed: other values for some of what is given. A graph that captured the call is replayed with them.
    """

    what: str
    given: Given
    call: Callable[[Given], Sequence[Tensor]]
    ends: tuple[int, int] | None = None
    leaves_tail: bool = False
    tolerance: float | None = None
    is_bits: bool = False
    replayed: Given = {}

    def parts(self, result: Tensor) -> tuple[Tensor, Tensor]:
        """A result's rows that are compared, and those behind the groups."""
        if self.ends is None or result.dim() == 0 or result.shape[0] != self.ends[1]:
            return result, result[:0] if result.dim() else result.new_empty(0)
        return result[: self.ends[0]], result[self.ends[0] :]


def gradients(
    function: Callable[..., Any], of: Sequence[Tensor], upstream: Callable[[int, Tensor], Tensor]
) -> list[Tensor]:
    """Of `function(*of)`, one result or several, in all of its arguments. upstream: that of the result of a number."""
    leaves = [one.detach().requires_grad_() for one in of]
    with torch.enable_grad():
        made = function(*leaves)
        results = list(made) if isinstance(made, (tuple, list)) else [made]
        given = [upstream(place, one).to(one) for place, one in enumerate(results)]
        return list(torch.autograd.grad(results, leaves, given))
